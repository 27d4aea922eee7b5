"""A whole run on machines of one host: real processes with keys, each started again when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.machines import Network
from troupe.common.wire.security.keys import make_keys
from troupe.services.launcher import supervisor
from troupe.services.launcher.supervisor import Child, ChildSpec

ROOT = Path(__file__).parents[2]
TAG = "TROUPE_CHAOS_RUN"
HANG_S = float(os.environ.get("TROUPE_CHAOS_HANG_S") or 20)
SLOTS = 4
PREFETCHED = 10
"""Updates that a learner can make without a shard: batches that it has, and those on their way."""
FAR_AWAY = 1_000_000_000
RUN = {
    "TROUPE_RUN__TOTAL_STEPS": str(FAR_AWAY),
    "TROUPE_RUN__HANG_S": str(HANG_S),
    "TROUPE_RUN__LOG_EVERY_S": "1",
    "TROUPE_AGENT__MLP_UNITS": "[32]",
    "TROUPE_AGENT__HIDDEN_UNITS": "32",
    "TROUPE_ACTOR__SLOTS": str(SLOTS),
    "TROUPE_ACTOR__TOTAL_SLOTS": str(4 * SLOTS),
    "TROUPE_REPLAY__BATCH_SIZE": "64",
    "TROUPE_REPLAY__SAMPLES_PER_INSERT": "16",
    "TROUPE_REPLAY__MAX_BYTES": str(192 << 20),
    "TROUPE_LEARNER__CHECKPOINT_PERIOD_S": "3",
    "TROUPE_EVALUATOR__EPISODES": "1",
    "TROUPE_EVALUATOR__VIDEO": "false",
    "TROUPE_NET__TENSORBOARD_PORT": "0",
    "TROUPE_NET__LIVENESS_S": "10",
}
MACHINES = ["learner", "replay", "actor-a", "actor-b", "evaluator", "stranger"]


def mount(folder: Path, size_mb: int) -> None:
    """A disk of its own."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m", "tmpfs", str(folder)]
    subprocess.run(words, check=True, timeout=30)


@dataclass(frozen=True)
class Use:
    """What a process had at a moment; memory is anonymous memory."""

    name: str
    pid: int
    age_s: float
    memory_mb: float
    files: int
    threads: int


class System:
    """The run. `look` has to be called often: it starts again what has died."""

    def __init__(self, folder: Path, inference: str, capacity_items: int) -> None:
        supervisor.MAX_QUICK_DEATHS, supervisor.MAX_BACKOFF_S = 10**9, 2.0
        self.folder, self.inference = folder, inference
        self.capacity_items = capacity_items
        self.evicted_early = 0
        self.tag = f"{os.getpid()}"
        self.run_disk, self.replay_disk = folder / "run-disk", folder / "replay-disk"
        mount(self.run_disk, 96)
        mount(self.replay_disk, 512)
        self.run_dir, self.data = self.run_disk / "run", self.replay_disk / "shard-0"
        self.keys = folder / "keys"
        make_keys(self.keys)
        self.network = Network(MACHINES)
        self.children: dict[str, Child] = {}
        for name in MACHINES[:-1]:
            self._add(name)

    def _add(self, name: str) -> None:
        learner, shard = self.network.address("learner"), self.network.address("replay")
        kind = name.split("-")[0]
        words = [sys.executable, "-P", "-m", f"troupe.services.{kind}"]
        if kind == "learner":
            words += ["cartpole-apex", "--resume", "--run-dir", str(self.run_dir), "--keys", str(self.keys)]
            for number, word in enumerate(("control", "announce", "inference")):
                words += [f"--{word}", f"tcp://{learner}:{5550 + number}"]
        else:
            words += ["serve"] if kind == "replay" else ["--name", name]
            words += [
                "--learner",
                f"tcp://{learner}:5550",
                "--keys",
                str(self.keys),
                "--join-timeout-s",
                "600",
            ]
        if kind == "replay":
            words += ["--adopt", "--bind", f"tcp://{shard}:5560", "--data-dir", str(self.data)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), TAG: self.tag}
        if kind == "learner":
            environment |= RUN | {"TROUPE_INFERENCE__MODE": self.inference}
            environment["TROUPE_REPLAY__CAPACITY_ITEMS"] = str(self.capacity_items)
        spec = ChildSpec(
            name,
            lambda restarts, name=name, words=words: self.network.inside(name, *words),
            self.folder / f"{name}.log",
            environment=environment,
            signs_path=self.folder / f"signs-{name}",
            hang_s=HANG_S,
        )
        self.children[name] = Child(spec, backoff_s=0.5)

    def start(self) -> None:
        """All services."""
        for child in self.children.values():
            child.start()

    def look(self, *, may_be_done: bool = False) -> None:
        """Start again what has died, and kill what gives no sign of life."""
        for child in self.children.values():
            if child.state != "done":
                child.poll(may_be_done=may_be_done)

    def wait(self, condition: Callable[[], Any], timeout_s: float, what: str, **options: bool) -> float:
        """Look after the services until it is so; how long that took."""
        began_s = time.monotonic()
        while not condition():
            self.look(**options)
            waited_s = time.monotonic() - began_s
            assert waited_s < timeout_s, f"{what}: not within {timeout_s:.0f} s\n{self.story()}"
            time.sleep(0.05)
        return time.monotonic() - began_s

    def sleep(self, seconds: float) -> None:
        """Look after the services meanwhile."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.look()
            time.sleep(0.05)

    def status(self) -> dict[str, Any]:
        """What the learner wrote last."""
        try:
            return dict(json.loads((self.run_dir / "status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def updates_advance(self) -> Callable[[], bool]:
        """A condition that is true when the learner learns from new batches, whoever it is by then."""
        before = self.status().get("updates", 0)

        def advanced() -> bool:
            nonlocal before
            now = self.status().get("updates", before)
            if now < before:  # it has gone back to a checkpoint
                before = now
            return bool(now > before + PREFETCHED)

        return advanced

    def uses(self) -> list[Use]:
        """What each running service has now."""
        found = []
        for name, child in self.children.items():
            try:
                process = psutil.Process(child.pid) if child.pid else None
                if process is None or "troupe.services" not in " ".join(process.cmdline()):
                    continue
                memory = process.memory_info()
                use = (memory.rss - memory.shared) / 1e6, process.num_fds(), process.num_threads()
                found.append(Use(name, process.pid, time.time() - process.create_time(), *use))
            except psutil.Error:
                continue
        return found

    def strays(self) -> list[str]:
        """Processes of this run, wherever they have got to."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == self.tag:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def key(self, name: str) -> str:
        """A key file's text."""
        return (self.keys / name).read_text().strip()

    def story(self) -> str:
        """The end of every log."""
        parts = [f"states: { {name: child.state for name, child in self.children.items()} }"]
        for name in self.children:
            try:
                lines = (self.folder / f"{name}.log").read_text().splitlines()[-12:]
            except OSError:
                lines = []
            parts += [f"== {name}", *lines]
        return "\n".join(parts)

    def close(self) -> None:
        """End everything, and take the machines away."""
        with contextlib.ExitStack() as ends:
            for disk in (self.run_disk, self.replay_disk):
                ends.callback(subprocess.run, ["umount", "-l", str(disk)], timeout=30, check=False)
            ends.callback(self.network.close)
            supervisor.stop(list(self.children.values()), 20.0)
