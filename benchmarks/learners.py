"""Several learners: how much of the time of an update is left when they really share it.

`python -m benchmarks.learners --json [--learners 4] [--update-ms 100] [--megabytes 7] [--bfloat16]`
`python -m benchmarks.learners --json --joins 20 [--learners 3] [--update-ms 25] [--megabytes 0.1]`

Each learner is a process. Its backward pass waits instead of computing, layer by layer, two thirds of the
time of an update, so that processes do not compete for cores; everything else is what learners do, with the
state of Adam. With `--joins` one more comes and goes so many times, and the others are timed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import queue
import statistics
import tempfile
import time
from functools import cached_property
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
import zmq
from torch import Tensor, nn

from benchmarks.common import parser, report
from troupe.common.agents.base import Batch, Update
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.network import Learner, NetworkAgent
from troupe.common.agents.stored.unrolls import StoredUnrolls
from troupe.common.envs import EnvSpec
from troupe.common.machine import keep_freed_memory
from troupe.common.runtime import StopSignal
from troupe.common.spaces import ActionSpec
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.link import new_incarnation
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.control.slots import SlotRules
from troupe.services.learner.peers.group import Meeting, ProcessGroup, joined_store
from troupe.services.learner.peers.seats import GivenSeats, OwnSeats, Seats
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

LAYERS = 14
LOOPBACK = "127.0.0.1"
ROWS = 8
STEPS = 20
SPEC = EnvSpec("bench:none", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)
AWAY_S = 0.5
"""Between two joins, at least: what the others do then is the measure of a join."""
TOGETHER = 8
"""Updates that the one that comes and goes takes part in."""
LIMIT_S = 300.0


class Waits(torch.autograd.Function):
    """A layer that takes `seconds` backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, seconds: float) -> Tensor:
        """`x` `[]`, as it is."""
        ctx.save_for_backward(weights)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Some gradient of the weights."""
        time.sleep(ctx.seconds)
        return gradient, torch.full_like(ctx.saved_tensors[0], 1e-3), None


class Simulated(NetworkAgent):
    """An agent whose update takes a given time, of which it computes nothing but Adam's step."""

    net: nn.ParameterList

    def __init__(self, update_ms: float, megabytes: float) -> None:
        self._numbers = round(megabytes * 1e6 / 4 / LAYERS)
        self._forward_s = update_ms / 3000
        self._layer_s = update_ms * 2 / 3000 / LAYERS
        super().__init__(ImpalaConfig(unroll_steps=STEPS), SPEC)

    def _network(self) -> nn.ParameterList:
        return nn.ParameterList(torch.zeros(self._numbers) for _ in range(LAYERS))

    @cached_property
    def stored(self) -> StoredUnrolls:
        """See the base class."""
        return StoredUnrolls(SPEC, STEPS, 0, staggered=False, behaviour_size=4)

    @cached_property
    def learner(self) -> Learner:
        """See the base class."""
        return Learner(self.net, torch.optim.Adam(self.net.parameters(), lr=1e-3, fused=True), 40.0)

    def act(self, *args: Any) -> Any:
        """Nobody asks for actions."""
        raise NotImplementedError

    values = act

    def update(self, batch: Batch) -> Update:
        """Wait, and make a step."""
        time.sleep(self._forward_s)
        x = torch.zeros((), requires_grad=True)
        for weights in self.net:
            x = Waits.apply(x, weights, self._layer_s)
        self.learner.step(x)
        return Update(None, {})


class One:
    """A learner, and the share that it brings to every update."""

    def __init__(self, options: argparse.Namespace, seats: Seats, learners: int, *, owner: bool) -> None:
        keep_freed_memory()  # as a learner's process does: the copy of each update has the memory of the last
        torch.set_num_threads(1)
        agent = Simulated(options.update_ms, options.megabytes)
        fields = {
            spec.name: np.zeros((ROWS, spec.entries(STEPS), *spec.shape), spec.dtype) for spec in agent.fields
        }
        batch = Batch(fields, np.ones(ROWS, np.float32), measure=False)
        self._share = Share(lambda *told: batch, ROWS, 0.0)
        rules = Rules(owner, ROWS * learners, timeout_s=LIMIT_S, bfloat16=options.bfloat16)
        self.team = Team(agent, RunCounters(1, StepBudget(1 << 50)), seats, rules)

    def leave(self) -> None:
        """Have the others go on without."""
        while not self.team.let_go():
            self.team.learn(self._share)
        self.team.close()

    def update(self) -> tuple[int, float]:
        """Make one with the others: how many they were, and the second at which it was made."""
        while not self.team.learn(self._share).moved:
            pass
        return self.team.learners, time.perf_counter()


class Fixed:
    """One seat, for good; see `troupe.services.learner.peers.team.Seats`."""

    def __init__(self, rank: int, learners: int, store: Any = None) -> None:
        self._seat = Seat(0, rank, learners, 0, LOOPBACK)
        self._store = store

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """It, once."""
        if ended >= 0:
            raise SystemExit("the learners have lost each other")
        return self._seat

    def wanted(self) -> bool:
        """Nobody else comes."""
        return False

    def planned(self, staying: Any) -> Seat | None:
        """See `wanted`."""
        return None

    def changed(self) -> None:
        """See `wanted`."""

    def gone(self) -> bool:
        """See `wanted`."""
        return False

    def over(self) -> bool:
        """See `wanted`."""
        return False

    def silent_s(self) -> float | None:
        """Nobody gives it."""
        return None

    def begun(self, group: ProcessGroup, seat: Seat) -> None:
        """Nothing is prepared for the end."""

    def failed(self, seat: Seat) -> None:
        """`next` says so."""

    def unreached(self, ranks: Any) -> bool:
        """`next` says so."""
        return False

    def misled(self, ranks: Any) -> None:
        """`next` says so."""

    def store(self, seat: Seat) -> Any:
        """That of the owner."""
        return self._store


def learn(rank: int, port: int, options: argparse.Namespace, told: Queue[list[float]]) -> None:
    """The body of a process that stays."""
    seats = Fixed(rank, options.learners, joined_store(LOOPBACK, port, LIMIT_S))
    took = updates_s(One(options, seats, options.learners, owner=rank == 0), options)
    if rank == 0:
        told.put(took)
        time.sleep(1.0)  # the others make their last update too


def updates_s(one: One, options: argparse.Namespace) -> list[float]:
    """Seconds of each update."""
    count = max(10, round(options.seconds * 1000 / options.update_ms))
    times = [one.update()[1] for _ in range(count)]
    return [after - before for before, after in itertools.pairwise(times)][3:]


def endpoints(directory: str) -> tuple[str, str]:
    """Of the control server."""
    return f"ipc://{directory}/control", f"ipc://{directory}/announce"


def own(options: argparse.Namespace, directory: str, told: Queue[list[float]]) -> None:
    """The body of the process that has the run, where one more comes and goes."""
    context, stop = zmq.Context(), StopSignal()
    epochs = Epochs(expected=options.learners, start_s=60.0)
    server = ControlServer(
        context, *endpoints(directory), Terms({}, run="bench"), SlotRules(1), epochs=epochs
    )
    server.start()
    one = One(options, OwnSeats(server, "", stop), options.learners, owner=True)
    made: list[tuple[int, float]] = []
    joined = 0
    while joined <= options.joins:
        made.append(one.update())
        joined += len(made) > 1 and made[-2][0] == options.learners < made[-1][0]
    # The first is left out: whoever comes has to make its optimiser.
    changes = [(before[0], after[0], after[1] - before[1]) for before, after in itertools.pairwise(made)]
    told.put([gap for before, after, gap in changes if before == options.learners < after][1:])
    told.put([gap for before, after, gap in changes if before > options.learners == after][1:])
    told.put([gap for before, after, gap in changes if before == options.learners == after])
    time.sleep(1.0)
    server.stop()


def follow(options: argparse.Namespace, directory: str, name: str, *, stays: bool) -> None:
    """The body of another, which stays or comes and goes."""
    context = zmq.Context()
    while True:
        client = ControlClient(
            context, endpoints(directory)[0], role="learner", name=name, incarnation=new_incarnation()
        )
        client.join(60.0)
        one = One(options, GivenSeats(client, "", LIMIT_S), options.learners, owner=False)
        together = 0
        while stays or together < TOGETHER:
            one.update()
            together += 1
        one.leave()
        client.close("done")
        time.sleep(AWAY_S + np.random.default_rng().uniform(0, options.update_ms / 1000))


def figures_of_joins(options: argparse.Namespace) -> dict[str, float]:
    """How long the others stand still when one joins, and when it leaves."""
    context = multiprocessing.get_context("spawn")
    told: Queue[list[float]] = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        names = [f"learner-{number}" for number in range(1, options.learners)]
        bodies: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [(own, (options, directory, told), {})]
        bodies += [(follow, (options, directory, name), {"stays": True}) for name in names]
        bodies.append((follow, (options, directory, "guest"), {"stays": False}))
        processes = [
            context.Process(target=body, args=args, kwargs=kwargs, daemon=True)
            for body, args, kwargs in bodies
        ]
        for process in processes[:-1]:
            process.start()
        time.sleep(5.0 + options.learners)
        processes[-1].start()
        joins, leaves, typical = (first_told(told, processes) for _ in range(3))
        for process in processes:
            process.terminate()
            process.join(60)
    usual = statistics.median(typical)
    return {
        "update_ms": round(usual * 1e3, 1),
        "join_ms": round((statistics.median(joins) - usual) * 1e3, 1),
        "longest_join_ms": round((max(joins) - usual) * 1e3, 1),
        "leave_ms": round((statistics.median(leaves) - usual) * 1e3, 1),
    }


def together_s(options: argparse.Namespace) -> list[float]:
    """Seconds of each update of several learners."""
    meeting, context = Meeting(LOOPBACK), multiprocessing.get_context("spawn")
    told: Queue[list[float]] = context.Queue()
    processes = [
        context.Process(target=learn, args=(rank, meeting.port, options, told), daemon=True)
        for rank in range(options.learners)
    ]
    for process in processes:
        process.start()
    took = first_told(told, processes)
    for process in processes:
        process.join(60)
    return took


def first_told(told: Queue[list[float]], processes: list[Any]) -> list[float]:
    """What comes first; SystemExit where a process fails before."""
    while True:
        with contextlib.suppress(queue.Empty):
            return told.get(timeout=1.0)
        if any(process.exitcode for process in processes):
            raise SystemExit("a learner has ended with an error, see above")


def main() -> None:
    """The command line."""
    args = parser(__doc__)
    args.add_argument("--learners", type=int, default=4)
    args.add_argument("--update-ms", type=float, default=100.0)
    args.add_argument("--megabytes", type=float, default=7.0, help="of gradients, in float32")
    args.add_argument("--bfloat16", action="store_true", help="as learner.gradient_dtype bfloat16")
    args.add_argument("--joins", type=int, default=0, help="time so many joins instead")
    options = args.parse_args()
    figures: dict[str, float | int | str] = {
        "learners": options.learners,
        "megabytes": options.megabytes,
        "bfloat16": int(options.bfloat16),
    }
    if options.joins:
        figures |= figures_of_joins(options)
    else:
        alone_s = updates_s(One(options, Fixed(0, 1), 1, owner=True), options)
        several_s = together_s(options)
        figures |= {
            "alone_ms": round(statistics.median(alone_s) * 1e3, 1),
            "together_ms": round(statistics.median(several_s) * 1e3, 1),
            "efficiency": round(statistics.median(alone_s) / statistics.median(several_s), 3),
            # What other programs on the machine hold up least.
            "fastest_alone_ms": round(min(alone_s) * 1e3, 1),
            "fastest_together_ms": round(min(several_s) * 1e3, 1),
        }
    report("learners", figures)


if __name__ == "__main__":
    main()
