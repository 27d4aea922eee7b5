"""Several learners: how much of the time of an update is left when gradients are really reduced.

`python -m benchmarks.learners --json [--learners 4] [--update-ms 100] [--megabytes 7] [--bfloat16]`

Each learner is a process. Its backward pass waits instead of computing, layer by layer, two thirds of the
time of an update, so that processes do not compete for cores; everything else is what learners do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import statistics
import time
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import parser, report
from troupe.common.agents.learners.reduction import Reduction
from troupe.common.agents.network import Learner
from troupe.services.learner.peers.group import Meeting, ProcessGroup, joined_store

LAYERS = 14
LOOPBACK = "127.0.0.1"


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


class Simulated:
    """A learner whose update takes a given time, of which it computes nothing."""

    def __init__(self, update_ms: float, megabytes: float, reduction: Reduction) -> None:
        self._layers = nn.ParameterList(
            torch.zeros(round(megabytes * 1e6 / 4 / LAYERS)) for _ in range(LAYERS)
        )
        self._learner = Learner(self._layers, torch.optim.SGD(self._layers.parameters(), lr=1e-3), 40.0)
        self._learner.reduction = self._reduction = reduction
        self._forward_s = update_ms / 3000
        self._layer_s = update_ms * 2 / 3000 / LAYERS

    def update(self) -> float:
        """Make one; seconds."""
        began = time.perf_counter()
        self._reduction.exchange(8)
        time.sleep(self._forward_s)
        x = torch.zeros((), requires_grad=True)
        for weights in self._layers:
            x = Waits.apply(x, weights, self._layer_s)
        self._learner.step(x)
        return time.perf_counter() - began


def learn(rank: int, port: int, options: Any, told: Queue[list[float]]) -> None:
    """The body of a process."""
    torch.set_num_threads(1)
    store = joined_store(LOOPBACK, port, 300.0)
    group = ProcessGroup(store, 1, rank, options.learners, LOOPBACK, 300.0)
    reduction = Reduction(group, bfloat16=options.bfloat16)
    simulated = Simulated(options.update_ms, options.megabytes, reduction)
    updates = max(10, round(options.seconds * 1000 / options.update_ms))
    took = [simulated.update() for _ in range(updates)]
    if rank == 0:
        told.put(took[3:])
    reduction.exchange(0)
    group.close()


def together_s(options: Any) -> list[float]:
    """Seconds of each update of several learners."""
    meeting, context = Meeting(LOOPBACK), multiprocessing.get_context("spawn")
    told: Queue[list[float]] = context.Queue()
    processes = [
        context.Process(target=learn, args=(rank, meeting.port, options, told), daemon=True)
        for rank in range(options.learners)
    ]
    for process in processes:
        process.start()
    while True:
        with contextlib.suppress(queue.Empty):
            took = told.get(timeout=1.0)
            break
        if any(process.exitcode for process in processes):
            raise SystemExit("a learner has ended with an error, see above")
    for process in processes:
        process.join(60)
    return took


def main() -> None:
    """The command line."""
    args = parser(__doc__)
    args.add_argument("--learners", type=int, default=4)
    args.add_argument("--update-ms", type=float, default=100.0)
    args.add_argument("--megabytes", type=float, default=7.0, help="of gradients, in float32")
    args.add_argument("--bfloat16", action="store_true", help="as learner.gradient_dtype bfloat16")
    options = args.parse_args()
    torch.set_num_threads(1)
    alone = Simulated(options.update_ms, options.megabytes, Reduction())
    updates = max(10, round(options.seconds * 1000 / options.update_ms))
    alone_s = [alone.update() for _ in range(updates)][3:]
    several_s = together_s(options)
    report(
        "learners",
        {
            "learners": options.learners,
            "megabytes": options.megabytes,
            "bfloat16": int(options.bfloat16),
            "alone_ms": round(statistics.median(alone_s) * 1e3, 1),
            "together_ms": round(statistics.median(several_s) * 1e3, 1),
            "efficiency": round(statistics.median(alone_s) / statistics.median(several_s), 3),
            # What other programs on the machine hold up least.
            "fastest_alone_ms": round(min(alone_s) * 1e3, 1),
            "fastest_together_ms": round(min(several_s) * 1e3, 1),
        },
    )


if __name__ == "__main__":
    main()
