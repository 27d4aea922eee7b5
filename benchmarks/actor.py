"""Acting on Pong with the learner off: real actor processes, a real replay process, a real control server.

`python -m benchmarks.actor --json [--seconds S]`. `raw_emulator_steps_per_s` is what as many processes reach
that only step ale-py's vectoriser with random actions: no network, no chunks, no replay.
The figures per CPU-second (of actors and replay together) hold on a machine that is busy otherwise, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import zmq

from benchmarks import common
from troupe.common.agents import make_agent
from troupe.common.config import Config, load_config, structural_hash
from troupe.common.envs import make_spec
from troupe.services.learner.control.reports import Report
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules

WARM_UP_S = 4.0
PUBLISH_PERIOD_S = 10.0
START_TIMEOUT_S = 180.0

RAW_LOOP = """
import sys, time
import numpy as np
from ale_py.vector_env import AtariVectorEnv
game, slots, threads, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
env = AtariVectorEnv(game, slots, num_threads=threads, autoreset_mode="SameStep", reward_clipping=False)
env.reset(seed=1)
actions = np.random.default_rng(0).integers(0, env.single_action_space.n, (1000, slots))
for step in range(20):
    env.step(actions[step])
began, cpu, steps = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - began < seconds:
    env.step(actions[steps % 1000])
    steps += 1
print(steps * slots / (time.perf_counter() - began), steps * slots / (time.process_time() - cpu))
"""


def raw_emulator(game: str, processes: int, slots: int, threads: int, seconds: float) -> tuple[float, float]:
    """Steps/s, and steps per CPU-second, of `processes` bare vectorisers of a game side by side."""
    command = [sys.executable, "-c", RAW_LOOP, game, str(slots), str(threads), str(seconds)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        rates = [process.communicate(timeout=seconds + START_TIMEOUT_S)[0].split() for process in running]
    finally:
        for process in running:
            process.kill()
    return sum(float(rate[0]) for rate in rates), sum(float(rate[1]) for rate in rates) / processes


@contextlib.contextmanager
def services(config: Config, directory: Path) -> Iterator[tuple[ControlServer, list[psutil.Process]]]:
    """Control server here, replay and actors as processes of their own; all stopped at the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = ControlServer(
        context,
        f"ipc://{directory}/control",
        f"ipc://{directory}/announce",
        Terms(config.model_dump(mode="json"), structural_hash(config)),
        SlotRules(config.actor.processes * config.actor.slots),
    )
    control.start()
    children: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        log = ["--log-file", str(directory / f"{words[0]}-{len(children)}.log")]
        children.append(subprocess.Popen([sys.executable, "-m", *words, *log]))

    try:
        learner = ("--learner", control.control_endpoint)
        bind = ("--bind", f"ipc://{directory}/replay-0")
        start(
            "troupe.services.replay",
            "serve",
            *learner,
            *bind,
            "--data-dir",
            str(directory / "replay"),
            "--index",
            "0",
        )
        for index in range(config.actor.processes):
            start("troupe.services.actor", *learner, "--name", f"actor-{index}")
        yield control, [psutil.Process(child.pid) for child in children]
    finally:
        control.set_state(stopping=True)
        for child in children:
            child.terminate()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(15)
            child.kill()
        control.stop()
        context.destroy(linger=0)


class StepCounter:
    """Steps of the actors over time, from their own reports."""

    def __init__(self) -> None:
        self.reports: dict[str, list[tuple[float, float]]] = {}
        self.last: dict[str, dict[str, float]] = {}
        self.steps_per_cpu_s = 0.0

    def take(self, report: Report) -> None:
        """Note a report of an actor."""
        if report.role == "actor":
            point = (time.monotonic(), report.metrics["actor/steps"])
            self.reports.setdefault(report.source, []).append(point)
            self.last[report.source] = report.metrics

    def complete(self, actors: int) -> bool:
        """Whether there is a rate of every actor."""
        return len(self.reports) == actors and all(len(points) > 1 for points in self.reports.values())

    def steps(self) -> float:
        """All steps so far."""
        return sum(metrics["actor/steps"] for metrics in self.last.values())

    def steps_per_s(self) -> float:
        """The actors' rates added up, each between its first and its last report."""
        return sum((last[1] - first[1]) / (last[0] - first[0]) for first, *_, last in self.reports.values())

    def mean(self, name: str) -> float:
        """Mean of the actors' last reported value."""
        return sum(metrics[name] for metrics in self.last.values()) / len(self.last)


def measure(config: Config, seconds: float) -> StepCounter:
    """Let the services run; publishes parameters as a learner would."""
    agent = make_agent(config.agent, make_spec(config.env))
    counter = StepCounter()
    directory = tempfile.TemporaryDirectory(prefix="troupe-bench-")
    with directory as name, services(config, Path(name)) as (control, processes):
        version = 0
        control.publish(version, agent.params())
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(counter.reports) < config.actor.processes:
            if time.monotonic() > deadline:
                logs = [path.read_text()[-2000:] for path in Path(name).glob("*.log")]
                raise SystemExit("the actors did not start:\n" + "\n".join(logs))
            _collect(control, counter, 0.5)
        _collect(control, counter, WARM_UP_S)
        counter.reports.clear()
        cpu_s, steps = _cpu_s(processes), counter.steps()
        end = time.monotonic() + seconds
        while time.monotonic() < end or not counter.complete(config.actor.processes):
            _collect(control, counter, min(PUBLISH_PERIOD_S, max(1.0, end - time.monotonic())))
            version += 1
            control.publish(version, agent.params())
        counter.steps_per_cpu_s = (counter.steps() - steps) / (_cpu_s(processes) - cpu_s)
    return counter


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def _collect(control: ControlServer, counter: StepCounter, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(queue.Empty):
            counter.take(control.telemetry.get(timeout=left))


def config_of(arguments: argparse.Namespace) -> Config:
    """Pong as in the papers: full network, standard preprocessing, no limit on inserts."""
    overrides = {
        "env.id": "atari:pong",
        "agent.torso": "nature",
        "agent.hidden_units": "512",
        "actor.processes": str(arguments.processes),
        "actor.slots": str(arguments.slots),
        "actor.env_threads": str(arguments.env_threads),
        "actor.compute_dtype": arguments.compute_dtype,
        "replay.capacity_items": "100000",
        "replay.min_items": "1000",
    }
    return load_config(overrides=overrides)


def main() -> None:
    """The command line."""
    parser = common.parser(__doc__, seconds=20.0)
    parser.add_argument("--processes", type=int, default=2, help="actor processes")
    parser.add_argument("--slots", type=int, default=32, help="environment copies per process")
    parser.add_argument("--env-threads", type=int, default=1, help="emulator threads per process")
    parser.add_argument("--compute-dtype", default="float32", help="actor.compute_dtype")
    arguments = parser.parse_args()
    config = config_of(arguments)
    shape = (arguments.processes, arguments.slots, arguments.env_threads)
    raw, raw_per_cpu_s = raw_emulator("pong", *shape, seconds=max(3.0, arguments.seconds / 3))
    counter = measure(config, arguments.seconds)
    steps_per_s = counter.steps_per_s()
    figures = {
        "steps_per_s": round(steps_per_s, 1),
        "raw_emulator_steps_per_s": round(raw, 1),
        "vs_raw_emulator": round(steps_per_s / raw, 3),
        "steps_per_cpu_s": round(counter.steps_per_cpu_s, 1),
        "raw_emulator_steps_per_cpu_s": round(raw_per_cpu_s, 1),
        "processes": arguments.processes,
        "slots": arguments.slots,
        "env_ms": round(counter.mean("actor/env_ms"), 2),
        "inference_ms": round(counter.mean("actor/inference_ms"), 2),
        "accumulate_ms": round(counter.mean("actor/accumulate_ms"), 2),
        "insert_blocked_share": round(counter.mean("actor/insert_blocked_share"), 4),
    }
    if not arguments.json:
        for figure, value in figures.items():
            print(f"{figure:28} {value}")
    common.report("actor", figures)


if __name__ == "__main__":
    main()
