"""Updates as CUDA graphs: all kernels of an update in one launch, on tensors that stay where they are.

An update launches hundreds of kernels of some microseconds each, so that a GPU waits for Python. A graph is
recorded once, and repeated. What the CPU decides travels with the batch: draws, minibatches, weights. What
changes from one update to the next is a tensor: the learning rate, the optimiser's counts. Nothing is drawn
on the GPU, so no generator need be known to the graph.

On a CPU there is no graph: the same tensors are written to, and `learn` is run on them each time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Agent, Batch, Pending, Update
from troupe.common.agents.network import NetworkAgent
from troupe.common.agents.tensors import on_device, shared_tensor
from troupe.common.rl.fixed import fixed_shapes

_log = logging.getLogger(__name__)

WARM_UPS = 3
"""Updates of one kind before it is recorded: kernels are chosen, and the optimiser makes its state."""
MAX_GRAPHS = 4
"""Kinds of updates that are recorded. Each graph keeps its memory; others are launched kernel by kernel."""


class GraphedUpdates:
    """Lets an agent learn by graphs where it can.

    Args:
        agent: learns. One that is no `NetworkAgent` in parts, see `NetworkAgent.update`, does so as before.

    Attributes:
        no_graph_because: why there are no graphs; empty where there are.
        graphs: recorded so far.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._seen: Counter[Hashable] = Counter()
        self._kinds: dict[Hashable, _Kind] = {}
        self._taken_over = 0
        self.no_graph_because = _why_not(agent)
        if self.no_graph_because:
            _log.info("updates are not CUDA graphs: %s", self.no_graph_because)
        elif isinstance(agent, NetworkAgent):
            make_capturable(agent.learner.optimizer, agent.device)

    @property
    def graphs(self) -> int:
        """How many kinds of updates have been recorded."""
        return len(self._kinds)

    def update(self, batch: Batch) -> Update | Pending:
        """`agent.update`; on a GPU it may go on when this returns."""
        agent = self._agent
        # The others' messages come in the middle of an update of several learners.
        if (
            self.no_graph_because
            or not isinstance(agent, NetworkAgent)
            or not (agent.learner.reduction.alone)
        ):
            return agent.update(batch)
        told = agent.told(batch)
        if agent.learner.taken_over != self._taken_over:  # the graphs have the tensors from before
            self._taken_over = agent.learner.taken_over
            self._kinds.clear()
            self._seen.clear()
        # By shapes: windows are as long as their longest item, and items may have been left out.
        key = agent.learner.branch, tuple((name, *_form(each)) for name, each in told.items())
        kind = self._kinds.get(key)
        if kind is None:
            if len(self._kinds) >= MAX_GRAPHS:
                return agent.updated(batch, told)
            self._seen[key] += 1
            if agent.device.type == "cuda" and self._seen[key] <= WARM_UPS:
                return self._warm_up(agent, batch, told)
            kind = self._recorded(agent, batch, told)
            if kind is None:
                return agent.updated(batch, told)
            self._kinds[key] = kind
        return kind.update(batch, told)

    def _warm_up(self, agent: NetworkAgent, batch: Batch, told: Mapping[str, Tensor | np.ndarray]) -> Update:
        """An update as it will be recorded, on a stream beside, as CUDA wants it before a recording."""
        now, beside = torch.cuda.current_stream(agent.device), torch.cuda.Stream(agent.device)
        beside.wait_stream(now)
        with torch.cuda.stream(beside), fixed_shapes(), _best_kernels():
            update = agent.updated(batch, told)
        now.wait_stream(beside)
        return update

    def _recorded(
        self, agent: NetworkAgent, batch: Batch, told: Mapping[str, Tensor | np.ndarray]
    ) -> _Kind | None:
        """The graph of this kind of update; None where it cannot be recorded."""
        if agent.device.type != "cuda":
            return _Kind(agent, batch, told)
        updates = agent.learner.updates
        try:
            kind = _Kind(agent, batch, told)
        except RuntimeError as error:
            self.no_graph_because = " ".join(str(error).split())[:200]
            _log.warning("updates are not CUDA graphs: no recording: %s", self.no_graph_because)
            return None
        finally:
            # Python has counted an update, and the GPU has not made it yet.
            agent.learner.updates = updates
        _log.info("updates are one CUDA graph (%d recorded)", len(self._kinds) + 1)
        return kind


class _Kind:
    """Updates of one kind, on tensors of their own."""

    def __init__(self, agent: NetworkAgent, batch: Batch, told: Mapping[str, Tensor | np.ndarray]) -> None:
        """Take memory for updates as that of `told`; on a GPU, record them. Nothing is learned."""
        self._agent = agent
        self._told = {
            name: torch.empty(shape, dtype=dtype, device=agent.device)
            for name, (shape, dtype) in ((name, _form(each)) for name, each in told.items())
        }
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: dict[str, Tensor] = {}
        if agent.device.type != "cuda":
            return
        self._write(batch, told)
        self._graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(agent.device),
            _best_kernels(),
            fixed_shapes(),
            # Other threads use the GPU meanwhile: they copy batches, and act.
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._found = agent.learn(self._told, measure=True)
        self._gradients = [(each, each.grad) for each in agent.net.parameters()]

    def update(self, batch: Batch, told: Mapping[str, Tensor | np.ndarray]) -> Update | Pending:
        """Learn from `told`."""
        agent = self._agent
        self._write(batch, told)
        if self._graph is None:
            return agent.made(batch, agent.learn(self._told, measure=True))
        self._graph.replay()
        for parameter, gradient in self._gradients:  # another update may have been made in between
            parameter.grad = gradient
        agent.learner.updates += 1
        return _Under(agent, batch, self._found)

    def _write(self, batch: Batch, told: Mapping[str, Tensor | np.ndarray]) -> None:
        for name, place in self._told.items():
            source = batch.placed.get(name)
            if source is None:
                array = told[name]
                source = array if isinstance(array, Tensor) else shared_tensor(array)
                # Of other memory a copy waits for the update before.
                if place.is_cuda and source.numel() and not source.is_pinned():
                    source = source.pin_memory()
            place.copy_(source, non_blocking=True)


class _Under:
    """An update that a GPU may be at: see `Pending`."""

    def __init__(self, agent: NetworkAgent, batch: Batch, found: Mapping[str, Tensor]) -> None:
        """Ask for what it finds, on its stream: the next update writes to the same tensors."""
        self._agent, self._batch = agent, batch
        self._found = {
            name: torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
            if each.is_cuda
            else each
            for name, each in found.items()
            if batch.measure or not name.startswith("learner/")
        }
        self._done = torch.cuda.Event()
        self._done.record(torch.cuda.current_stream(agent.device))

    def settled(self) -> Update:
        """Wait for it."""
        self._done.synchronize()
        return self._agent.made(self._batch, self._found)


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Have it read learning rates, and count its steps, where a graph can: in tensors on the device."""
    # As the optimisers' kernels want it; on a CPU they read it as Python's floats, which are float64.
    dtype = torch.float32 if device.type == "cuda" else torch.float64
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=dtype, device=device)
        if device.type == "cuda" and "capturable" in group:
            group["capturable"] = True
    # It would warn that the updates before the first recording, and those looked at, are none.
    optimizer._warned_capturable_if_run_uncaptured = True
    for state in optimizer.state.values():
        if isinstance(step := state.get("step"), Tensor):
            state["step"] = on_device(step, device)


@contextlib.contextmanager
def _best_kernels() -> Iterator[None]:
    """Within it cuDNN tries its convolutions and keeps the fastest: of one shape that pays."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _why_not(agent: Agent) -> str:
    if not isinstance(agent, NetworkAgent):
        return "the agent has no network of the usual kind"
    if type(agent).update is not NetworkAgent.update:
        return f"{agent.config.algorithm} has an update in one piece"
    return agent.no_graph_because


def _form(each: Tensor | np.ndarray) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(each, Tensor):
        return tuple(each.shape), each.dtype
    return each.shape, getattr(torch, each.dtype.name)
