"""Runs of the real services with one planted bottleneck each, and what they report of themselves.

`python -m tests.launcher.plants [NAME ...]` records them into `bottlenecks/` beside this file: the status of
the learner after RECORD_S seconds of learning. Root is needed for a disk, and a shard, whose files the
learner cannot see; and a machine that does nothing else.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from troupe.common.machine import usable_cores
from troupe.common.runtime.files import CONFIG_FILE, read_status
from troupe.common.runtime.metrics import OF_SERVICES

RECORD_S = 25.0
FOLDER = Path(__file__).parent / "bottlenecks"
_JOINING = ["--join-timeout-s", "600"]
CHECKOUT = Path(__file__).parents[2]
ANY_ENV = {"env.id": "tests.launcher.planted:Planted-v0"}
ENV = {**ANY_ENV, "replay.min_items": "200"}
PICTURES = {
    **ENV,
    "agent.torso": "small",
    "agent.mlp_units": "[]",
    "agent.hidden_units": "32",
    "replay.capacity_items": "5000",
    "replay.min_items": "100",
    "replay.compression": "lz4",
}


@dataclass
class Plant:
    """One run: a preset, fields that differ, and what is wrong with it.

    Attributes:
        actors: environment variables of each actor.
        evaluators: how many there are.
        neighbours: busy processes of others.
        link_bytes_per_s: limit on what comes from the shard, whose files the learner cannot see; 0 for none.
        disk: size of the shard's disk, as `mount -o size=` has it; empty for no disk of its own.
    """

    preset: str = "cartpole-apex"
    fields: dict[str, str] = field(default_factory=dict)
    actors: list[dict[str, str]] = field(default_factory=lambda: [{}])
    evaluators: int = 0
    neighbours: int = 0
    link_bytes_per_s: int = 0
    disk: str = ""


PLANTS = {
    "slow-environment": Plant(
        fields={**ENV, "env.kwargs": "{sleep_ms = 100}", "replay.samples_per_insert": "8"}
    ),
    "one-torch-thread": Plant(
        fields={**ENV, "agent.mlp_units": "[1024, 1024]", "replay.batch_size": "512"},
    ),
    "tiny-queue": Plant("cartpole-impala", {**ANY_ENV, "agent.mlp_units": "[512, 512]", "actor.slots": "64"}),
    "lagging-parameters": Plant(fields={**ENV, "actor.params_period_steps": "1000000"}),
    "full-disk": Plant(
        fields={
            **PICTURES,
            "env.kwargs": "{picture = 128, noise_share = 1.0}",
            "replay.samples_per_insert": "0",
        },
        disk="5m",
    ),
    "noisy-neighbour": Plant(fields=ENV, neighbours=8),
    "small-batches": Plant(
        fields={
            **ENV,
            "inference.mode": "central",
            "inference.max_batch": "2",
            "inference.min_batch": "1",
            "actor.slots": "4",
            "agent.mlp_units": "[512, 512]",
            "replay.samples_per_insert": "1",
        },
        actors=[{}, {}, {}, {}],
    ),
    "slow-link": Plant(
        fields={
            **PICTURES,
            "env.kwargs": "{picture = 84, noise_share = 0.2, sleep_ms = 1}",
            "replay.samples_per_insert": "0",
        },
        link_bytes_per_s=2_000_000,
    ),
    "limiter": Plant(fields={**ENV, "replay.samples_per_insert": "0.25"}),
    "evaluator": Plant(fields={**ENV, "evaluator.episodes": "1000", "evaluator.period_s": "0"}, evaluators=3),
    "slow-actor": Plant(
        fields={**ENV, "actor.slots": "4", "replay.samples_per_insert": "2"},
        actors=[*[{"PLANTED_SLEEP_MS": "20"}] * 3, {"PLANTED_SLEEP_MS": "500"}],
    ),
    "compression": Plant(
        fields={
            **PICTURES,
            "env.kwargs": "{picture = 128, noise_share = 0.97}",
            "replay.samples_per_insert": "1",
        }
    ),
}


class Throttled:
    """A proxy that passes on what comes from a server at so many bytes a second."""

    def __init__(self, path: str, bytes_per_s: int) -> None:
        self._path, self._bytes_per_s = path, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._path)
                for source, target, slow in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, target, slow), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, slow: bool) -> None:
        source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                target.sendall(data)
                if slow:
                    time.sleep(len(data) / self._bytes_per_s)

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.close()


@contextlib.contextmanager
def running(plant: Plant, folder: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Start the services of a plant by hand; yields the run directory and the learner, and ends them."""
    run, control, shard = folder / "run", f"ipc://{folder}/control", f"{folder}/replay"
    processes: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TROUPE_MODULES": "tests.launcher",
        "PYTHONPATH": str(CHECKOUT),
    }

    def start(service: str, *words: str, inside: str = "", **variables: str) -> None:
        command = [sys.executable, "-m", f"troupe.services.{service}", *words]
        if inside:
            command = ["unshare", "--mount", "sh", "-c", f'{inside} && exec "$@"', "sh", *command]
        with (folder / f"{service}-{len(processes)}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment | variables, stderr=log, cwd=folder))

    fields = {
        "run.total_steps": "100000000",
        "evaluator.enabled": str(plant.evaluators > 0).lower(),
        **plant.fields,
    }
    fields["actor.processes"] = str(len(plant.actors))
    words = [word for name, value in fields.items() for word in (f"--{name}", value)]
    names = {"--announce": "announce", "--inference": "inference"}
    places = [word for option, name in names.items() for word in (option, f"ipc://{folder}/{name}")]
    start("learner", plant.preset, "--run-dir", str(run), "--control", control, *places, *words)
    data = folder / "data"
    data.mkdir()
    size = plant.disk or ("1g" if plant.link_bytes_per_s else "")
    proxy = Throttled(shard, plant.link_bytes_per_s) if plant.link_bytes_per_s else None
    serve = ["serve", "--learner", control, *_JOINING, "--bind", f"ipc://{shard}", "--data-dir", str(data)]
    if proxy is not None:
        serve += ["--advertise", proxy.endpoint]
    start("replay", *serve, inside=f"mount -t tmpfs -o size={size} tmpfs {data}" if size else "")
    for index, variables in enumerate(plant.actors):
        start("actor", "--learner", control, *_JOINING, "--name", f"actor-{index}", **variables)
    for index in range(plant.evaluators):
        start("evaluator", "--learner", control, *_JOINING, "--name", f"evaluator-{index}")
    spin = [sys.executable, "-c", "while True: pass"]
    processes += [subprocess.Popen(spin) for _ in range(plant.neighbours)]
    try:
        yield run, processes[0]
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if proxy is not None:
            proxy.close()


def record(name: str, seconds: float = RECORD_S) -> None:
    """Let a plant run until it has learned for so many seconds, and keep what it reports."""
    with (
        tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder,
        running(PLANTS[name], Path(folder)) as (run, learner),
    ):
        deadline_s = time.monotonic() + 300
        began_s = None
        while time.monotonic() < deadline_s and (began_s is None or time.monotonic() < began_s + seconds):
            if began_s is None and read_status(run).get("updates", 0) > 20:
                began_s = time.monotonic()
            assert learner.poll() is None, "the learner has ended"
            time.sleep(0.5)
        status = read_status(run)
        kept = {key: status[key] for key in ("steps", "frames", "updates", "version", "total_steps", "note")}
        prefixes = ("speed/", "learner/", "params/", "replay/", "actor/", "inference/", "eval/")
        kept["metrics"] = {k: v for k, v in status["metrics"].items() if k.startswith(prefixes)}
        kept["services"] = {
            service: {k: v for k, v in values.items() if k in OF_SERVICES}
            for service, values in status["services"].items()
        }
        kept["peers"] = [
            {k: peer[k] for k in ("role", "name", "slots", "seen_s_ago")} for peer in status["peers"]
        ]
        found = {"cores": usable_cores(), "config": (run / CONFIG_FILE).read_text(), "status": kept}
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(
            json.dumps(found, indent=1, default=lambda x: round(x, 5)) + "\n"
        )
        print(name, began_s is not None, flush=True)


if __name__ == "__main__":
    for plant_name in sys.argv[1:] or list(PLANTS):
        record(plant_name)
