"""Hundreds of actors: what each service costs per step, and what thousands of members cost the learner.

`python -m benchmarks.scale --json [--seconds S] [--actors 1,8,64,512] [--steps-per-s R] [--idle 4096]`

Learner, replay shard and evaluator are the real services, with the preset `cartpole-apex`. Actors are
simulated, many to a process, but their clients are the real ones: they join, beat, report, fetch
parameters (32 of them share a relay, as on one host), and insert chunks that real accumulators have cut. What
they do not do is act: all of them together make the same R steps a second, so that what grows with their
number is what their number costs. `*_us_per_step_N` are microseconds of CPU time per step with N actors, of
all threads in Python and in the kernel, and `*_ratio` the largest number of actors over the smallest.

`idle_*` are members that only beat, once a second, from plain sockets: `idle_cores` of the learner, and
`idle_us_per_beat`, which is as true on a busy machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import zmq

from benchmarks import common
from benchmarks.params import cpu_seconds
from troupe.common.agents import make_agent
from troupe.common.config import config_from_dict
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.envs import make_vector
from troupe.common.runtime import open_files
from troupe.common.runtime.files import read_status
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import encode
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient
from troupe.services.actor.local_inference import Rollout
from troupe.services.actor.timing import Timing, TimingReports

PER_HOST = 32
MAX_PER_PROCESS = 128
IDLE_PER_PROCESS = 512
CHUNKS = 64
SETTLE_S = 5.0
LIMIT_S = 240.0
OPTIONS = {
    "run.total_steps": "1000000000",
    "run.log_every_s": "10",
    "agent.mlp_units": "[16]",
    "agent.hidden_units": "16",
    "replay.samples_per_insert": "8",  # so that updates take little of two cores
    "actor.slots": "1",
    "actor.total_slots": "1024",
    "learner.publish_period_updates": "100",
    "evaluator.episodes": "4",
    "evaluator.slots": "4",
    "evaluator.video": "false",
}
"""Fields of the preset that are changed: what is measured is the services, not the network."""


class SimulatedActor:
    """An actor's clients, and steps that cost nothing: the same chunks over and over."""

    def __init__(self, context: zmq.Context, learner: str, number: int, relays: Path) -> None:
        self.name = f"actor-{number}"
        self.control = ControlClient(
            context,
            learner,
            role="actor",
            name=self.name,
            incarnation=new_incarnation(),
            slots_wanted=1,
            relay_directory=relays / str(number // PER_HOST),
        )
        self._context = context
        self._timing, self._reports, self._version = Timing(), TimingReports(), -1

    def begin(self, tables: Sequence[str], specs: Sequence[FieldSpec]) -> None:
        """Make what inserts."""
        self._replay = ShardedReplayClient(
            ctx=self._context,
            name=self.name,
            incarnation=self.control.incarnation,
            specs=specs,
            tolerate_refusals=True,
        )
        self._replay.set_shards(self.control.shards)  # it connects meanwhile
        self._outbox = Outbox(self._replay, *tables)

    def advance(self, chunk: Chunk) -> None:
        """Make the steps of a chunk and insert it, unless replay or the run do not take them."""
        control, timing = self.control, self._timing
        control.check()
        self._replay.set_shards(control.shards)
        self._outbox.pump()
        params = control.params_if_newer(self._version)
        self._version = self._version if params is None else params.version
        if not self._outbox.waiting and control.may_step(chunk.steps):
            timing.steps += chunk.steps
            timing.calls += chunk.steps
            timing.chunks += 1
            control.report_steps(timing.steps)
            self._outbox.put([dataclasses.replace(chunk, version=max(0, self._version), more={})])

    def report(self) -> None:
        """Send what an actor reports."""
        metrics, fields = self._reports.report(
            self._timing, max(0, self.control.state.version - self._version)
        )
        metrics |= {"actor/cpu_cores": 1.0, "actor/starved_cores": 0.0, "actor/slots": 1.0}
        self.control.send_telemetry(metrics, fields=fields)

    def close(self) -> None:
        """Leave."""
        self.control.close("the benchmark is over")
        self._replay.close()


def context() -> zmq.Context:
    """A context for the sockets of hundreds of clients."""
    open_files.raise_limit()
    made = zmq.Context()
    made.set(zmq.MAX_SOCKETS, 16 * MAX_PER_PROCESS)
    return made


def act(learner: str, first: int, count: int, period_s: float, relays: Path) -> None:
    """A child: so many actors, each of which makes a chunk every `period_s`, until the run stops."""
    ctx = context()
    actors = [SimulatedActor(ctx, learner, number, relays) for number in range(first, first + count)]
    config = config_from_dict(actors[0].control.join(LIMIT_S).config)
    env = make_vector(config.env, 1, first)
    agent = make_agent(config.agent, env.spec, seed=first)
    rollout = Rollout(agent, env, config.actor.chunk_steps, seed=first)
    chunks: list[Chunk] = []
    while len(chunks) < CHUNKS:
        chunks += rollout.step(0)
    for actor in actors:
        actor.control.join(LIMIT_S)
        actor.begin(list(config.replay.shares()), agent.fields)
    print("joined", flush=True)
    # Evenly over the period, as actors that started at different times are.
    now_s = time.monotonic()
    due = [(now_s + period_s * place / count, 2 * place) for place in range(count)]
    due += [(now_s + 2.0 * place / count, 2 * place + 1) for place in range(count)]
    heapq.heapify(due)
    turn = 0
    while not actors[0].control.state.stopping:
        when_s, which = due[0]
        time.sleep(max(0.0, min(1.0, when_s - time.monotonic())))
        if time.monotonic() < when_s:
            continue
        actor = actors[which // 2]
        if which % 2:
            actor.report()
            pause_s = actor.control.report_s
        else:
            actor.advance(chunks[turn % CHUNKS])
            turn, pause_s = turn + 1, period_s
        heapq.heapreplace(due, (when_s + pause_s, which))
    for actor in actors:
        actor.close()


def idle(learner: str, first: int, count: int, answers: Path) -> None:
    """A child: so many members that join and beat once a second; counts the learner's answers in a file."""
    ctx = context()
    counted = np.memmap(answers, np.int64, "r+", offset=8 * (first // IDLE_PER_PROCESS), shape=(1,))
    members = [
        sockets.make_dealer(ctx, learner, b"idle-%d.%d" % (number, new_incarnation()))
        for number in range(first, first + count)
    ]
    announcements = []
    waiting = dict(enumerate(members))
    deadline = time.monotonic() + LIMIT_S
    asked: set[int] = set()
    while waiting and time.monotonic() < deadline:
        for place, member in list(waiting.items()):
            name = f"idle-{first + place}"
            hello = messages.Hello(role="actor", name=name, incarnation=new_incarnation())
            if place not in asked and sockets.send(member, hello.message(1)):
                asked.add(place)
            answer = sockets.receive(member)
            if answer is not None:
                welcome = messages.Welcome.of(answer)
                announcements.append(sockets.make_sub(ctx, welcome.announce))
                del waiting[place]
        time.sleep(0.01)
    print("joined" if not waiting else f"{len(waiting)} got no WELCOME", flush=True)
    beat = encode(messages.Heartbeat(version=0).message(2))
    started = time.monotonic()
    for turn in range(1 << 40):
        member = members[turn % count]
        time.sleep(max(0.0, started + turn / count - time.monotonic()))
        sockets.send_frames(member, beat)
        while (answer := sockets.receive(member)) is not None:
            counted[0] += answer.type == messages.HeartbeatOk.TYPE


class Rig:
    """The services of one run, and the simulated members, as processes.

    Attributes:
        control: the learner's address.
        folder: of the run, and of everything else.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.control = f"tcp://127.0.0.1:{port}"
        self._of: dict[str, psutil.Popen] = {}
        self._replay: ReplayClient | None = None
        self.children: list[subprocess.Popen[str]] = []
        fields = [word for name, value in OPTIONS.items() for word in (f"--{name}", value)]
        announce = f"tcp://127.0.0.1:{port + 1}"
        words = ["cartpole-apex", "--run-dir", str(folder / "run"), "--control", self.control]
        self._start("learner", *words, "--announce", announce, *fields)

    def _start(self, service: str, *words: str) -> None:
        command = [sys.executable, "-m", f"troupe.services.{service}", *words]
        log = ["--log-file", str(self.folder / f"{service}.log"), "--log-level", "warning"]
        self._of[service] = psutil.Popen([*command, *log])

    def serve(self, port: int) -> None:
        """Start replay and evaluator."""
        words = ["--data-dir", str(self.folder / "replay"), "--bind", f"tcp://127.0.0.1:{port}"]
        joining = ["--learner", self.control, "--join-timeout-s", str(LIMIT_S)]
        self._replay = ReplayClient(f"tcp://127.0.0.1:{port}", name="benchmark")
        self._start("replay", "serve", *joining, *words)
        self._start("evaluator", *joining)

    def simulate(self, kind: str, count: int, at_most: int, *words: str) -> None:
        """Start members in as many processes as it takes, and wait until all have joined."""
        for first in range(0, count, at_most):
            numbers = [str(first), str(min(at_most, count - first))]
            command = [sys.executable, "-m", "benchmarks.scale", kind, self.control, *numbers, *words]
            self.children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for child in self.children:
            assert child.stdout is not None
            if (said := child.stdout.readline().strip()) != "joined":
                raise SystemExit(f"not all members could join: {said or 'their process has ended'}")

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each service, and of all simulated actors, so far."""
        used = {service: cpu_seconds(process) for service, process in self._of.items()}
        used["simulated"] = sum(cpu_seconds(psutil.Process(child.pid)) for child in self.children)
        return used

    def steps(self) -> int:
        """Steps that the shard has stored. The learner hears of them with each HEARTBEAT, seconds later."""
        assert self._replay is not None
        return int(self._replay.status(LIMIT_S)["inserted_steps"])

    def learns(self) -> bool:
        """Whether there have been updates and an evaluation."""
        status = read_status(self.folder / "run") or {}
        return status.get("updates", 0) > 0 and "eval/episode_return" in status.get("metrics", {})

    def stop(self) -> None:
        """End all of it."""
        if self._replay is not None:
            self._replay.close(0)
        for child in self.children:
            child.kill()
        for process in reversed(self._of.values()):
            process.terminate()
        for process in [*self.children, *self._of.values()]:
            try:
                process.wait(30)
            except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
                process.kill()
                process.wait()


@contextlib.contextmanager
def rig(port: int) -> Iterator[Rig]:
    """A `Rig` for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        running = Rig(Path(folder), port)
        try:
            yield running
        finally:
            running.stop()


def measure_actors(count: int, steps_per_s: float, seconds: float, port: int) -> dict[str, float]:
    """Microseconds of CPU time per step, of each service, with so many actors."""
    with rig(port) as running:
        running.serve(port + 2)
        period_s = 10 * count / steps_per_s  # a chunk of the preset has ten steps
        words = [str(period_s), str(running.folder / "relays")]
        running.simulate("--act", count, MAX_PER_PROCESS, *words)
        deadline = time.monotonic() + LIMIT_S
        while not running.learns():
            if time.monotonic() > deadline:
                raise SystemExit(f"no update and evaluation within {LIMIT_S:.0f} s with {count} actors")
            time.sleep(0.5)
        time.sleep(SETTLE_S)
        before, steps, began = running.cpu_s(), running.steps(), time.monotonic()
        time.sleep(seconds)
        after, made = running.cpu_s(), running.steps() - steps
        elapsed = time.monotonic() - began
    figures = {f"{name}_us_per_step": round((after[name] - before[name]) / made * 1e6, 1) for name in after}
    return {"steps_per_s": round(made / elapsed, 1)} | figures


def measure_idle(count: int, seconds: float, port: int) -> dict[str, float]:
    """What so many members cost the learner that only beat."""
    with rig(port) as running:
        answers = running.folder / "answers"
        processes = -(-count // IDLE_PER_PROCESS)
        answers.write_bytes(bytes(8 * processes))
        time.sleep(3 * SETTLE_S)
        before, began = running.cpu_s()["learner"], time.monotonic()
        time.sleep(seconds / 2)
        base = (running.cpu_s()["learner"] - before) / (time.monotonic() - began)
        began = time.monotonic()
        running.simulate("--idle", count, IDLE_PER_PROCESS, str(answers))
        joined_s = time.monotonic() - began
        time.sleep(SETTLE_S)
        counted = np.memmap(answers, np.int64, "r")
        before, heard, began = running.cpu_s()["learner"], int(counted.sum()), time.monotonic()
        time.sleep(seconds)
        used, beats = running.cpu_s()["learner"] - before, int(counted.sum()) - heard
        elapsed = time.monotonic() - began
    cores = used / elapsed
    return {
        "idle_members": count,
        "idle_join_s": round(joined_s, 1),
        "idle_answered_share": round(beats / elapsed / count, 3),
        "idle_base_cores": round(base, 3),
        "idle_cores": round(cores, 3),
        "idle_us_per_beat": round((cores - base) * elapsed / max(1, beats) * 1e6, 1),
    }


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--act"]:
        learner, first, many, period, relays = sys.argv[2:]
        act(learner, int(first), int(many), float(period), Path(relays))
        return
    if sys.argv[1:2] == ["--idle"] and len(sys.argv) == 6:
        learner, first, many, answers = sys.argv[2:]
        idle(learner, int(first), int(many), Path(answers))
        return
    args = common.parser(__doc__, seconds=20.0)
    args.add_argument("--actors", default="1,8,64,512", help="numbers of actors; empty: none")
    args.add_argument("--steps-per-s", type=float, default=500.0, help="steps of all actors together")
    args.add_argument("--idle", type=int, default=4096, help="members that only beat; 0: none")
    args.add_argument("--port", type=int, default=15700, help="first of the ports to use")
    options = args.parse_args()
    figures: dict[str, float | int | str] = {}
    counts = [int(word) for word in options.actors.split(",") if word]
    rows = {}
    for count in counts:
        rows[count] = measure_actors(count, options.steps_per_s, options.seconds, options.port)
        figures |= {f"{name}_{count}": value for name, value in rows[count].items()}
        if not options.json:
            print(count, rows[count], flush=True)
    for service in ("learner", "replay", "evaluator") if len(counts) > 1 else ():
        of_few, of_many = (rows[count][f"{service}_us_per_step"] for count in (min(counts), max(counts)))
        figures[f"{service}_ratio"] = round(of_many / of_few, 2)
    if options.idle:
        figures |= measure_idle(options.idle, options.seconds, options.port)
    common.report("scale", figures)


if __name__ == "__main__":
    main()
