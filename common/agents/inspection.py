"""What tells why an agent does not learn, measured of any agent on one batch every few seconds.

Units that never switch, what the network sees, the size of rewards and of the optimiser's steps, how episodes
end, actions at their bounds. What only an algorithm knows, such as its entropy, it measures itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common import system
from troupe.common.agents.base import Agent, Batch, Pending, Update, check_returned
from troupe.common.agents.tensors import shared_tensor
from troupe.common.data.accumulators.unrolls import TERMINATED, TRUNCATED
from troupe.common.nets.parts import PartInputs
from troupe.common.rl import policy

PERIOD_S = 5.0
"""From one look to the next: some milliseconds each, so less than a thousandth of the learner's time."""
_ROWS = 512
"""Rows of a layer's output that are looked at."""
_STEPS = 4096
"""Steps of a batch whose rewards and actions are looked at."""
_WEIGHTS = 1 << 16
"""Numbers of each parameter whose change is measured."""
_LAYERS = 16
_SATURATED = 0.97
"""A tanh beyond this has a gradient of less than 6 %."""
_AT_BOUND = 0.999
_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.ELU, nn.SiLU, nn.GELU)


class Inspection:
    """Lets an agent learn, and adds figures of `learner/...` to its metrics.

    Args:
        agent: learns. Of one without a `net` and a `learner`, which the protocol does not ask for, only
          what its batches hold is measured.
        period_s: seconds between two looks; the first update is looked at.
        update: of the agent, where nobody looks: a CUDA graph shows nothing of what is within; None: the
          agent's own.
    """

    def __init__(
        self,
        agent: Agent,
        period_s: float = PERIOD_S,
        update: Callable[[Batch], Update | Pending] | None = None,
    ) -> None:
        self._agent = agent
        self._update = update
        self._period_s = period_s
        self._next_s = -math.inf
        self._ends = Ends()

    def update(self, batch: Batch) -> Update | Pending:
        """`agent.update`, looked at if metrics are wanted and it is time."""
        if not batch.measure or system.monotonic() < self._next_s:
            return (self._update or self._agents_own)(batch)
        self._next_s = system.monotonic() + self._period_s
        network = getattr(self._agent, "net", None)
        # Before the hooks: made with the learner, a target network would be a copy that has them too.
        optimizer = getattr(getattr(self._agent, "learner", None), "optimizer", None)
        with contextlib.ExitStack() as looks:
            layers = step = None
            if isinstance(network, nn.Module):
                layers = looks.enter_context(_watched(network))
                if isinstance(optimizer, torch.optim.Optimizer):
                    step = looks.enter_context(_first_step(network, optimizer))
            # Before the update: its arrays may be unpacked into anew as soon as it is over.
            found = self._of_batch(batch)
            update = self._agents_own(batch)
        for look in (layers, step):
            found |= look.metrics() if look is not None else {}
        found |= self._of_entropy(update.metrics)
        return replace(update, metrics=found | update.metrics)

    def _agents_own(self, batch: Batch) -> Update:
        update = self._agent.update(batch)
        check_returned(self._agent, "update", update, Update)
        return update

    def _of_batch(self, batch: Batch) -> dict[str, float]:
        steps = steps_of(batch, self._agent)
        if steps is None:
            return {}
        config = getattr(self._agent, "config", None)
        rewards, learned = steps.rewards, shared_tensor(steps.rewards)
        if (clip := getattr(config, "reward_clip", None)) is not None:
            learned = policy.clip_reward(learned, clip)
        scale = float(getattr(config, "reward_scale", 1.0))
        found = {
            "reward_size": float(np.abs(rewards).max(initial=0.0)),
            "reward_size_learned": scale * float(learned.abs().max()) if len(rewards) else 0.0,
            "reward_share": _per_step(float((rewards != 0).mean()), steps.summed),
            "terminated_share": _per_step(float((steps.ended == TERMINATED).mean()), steps.summed),
            "truncated_share": _per_step(float((steps.ended == TRUNCATED).mean()), steps.summed),
        }
        actions = self._agent.spec.actions
        if actions.reals and any(actions.bounded):
            reals = steps.actions[:, -actions.reals :][:, list(actions.bounded)]
            found["action_at_bounds_share"] = float((np.abs(reals) >= _AT_BOUND).mean())
        if steps.obs is not None:
            self._ends.take(steps.obs, steps.ended, again="bootstrap_steps" in batch.fields)
            if (seen := self._ends.seen_share()) is not None:
                found["ends_seen_share"] = seen
        return {f"learner/{name}": value for name, value in found.items()}

    def _of_entropy(self, metrics: dict[str, float]) -> dict[str, float]:
        """The entropy as a share of the largest; of real numbers, the share of their range it is spread over.

        A normal that reaches beyond the bounds is spread over more than 1.
        """
        if (entropy := metrics.get("learner/entropy")) is None:
            return {}
        actions = self._agent.spec.actions
        most = sum(math.log(count) for count in actions.choices)
        if actions.reals:
            # A uniform density over [-1, 1] has log 2 nats a number.
            width = math.exp(min(50.0, (entropy - most) / actions.reals - math.log(2.0)))
            return {"learner/entropy_share": width}
        return {"learner/entropy_share": entropy / most} if most else {}


class Steps(NamedTuple):
    """Steps of a batch, `[M]` each; of transitions one an item."""

    rewards: np.ndarray
    """Float32, over `summed` steps each."""
    ended: np.ndarray
    """Uint8, see `troupe.common.data.accumulators.unrolls`."""
    actions: np.ndarray
    """`[M, numbers]`."""
    obs: np.ndarray | None
    """`[M, ...]`, newest frames at which was acted; None where they are bytes of something else."""
    summed: int


def steps_of(batch: Batch, agent: Agent) -> Steps | None:
    """What a batch of transitions, unrolls or sequences has of steps; None of anything else."""
    fields, spec = batch.fields, agent.spec
    if not {"obs", "action", "reward"} <= fields.keys():
        return None
    before = max(0, spec.stack - 1)
    opaque = bool(spec.obs_leaves) or spec.packed_bits
    if "bootstrap_steps" in fields:
        summed = int(getattr(getattr(agent, "config", None), "n_steps", 1))
        rewards, bootstrap = fields["reward"][:, 0], fields["bootstrap_steps"][:, 0]
        cut = np.where(bootstrap < summed, TRUNCATED, 0)
        ended = np.where(fields["discount"][:, 0] == 0.0, TERMINATED, cut)
        actions, obs = fields["action"][:, 0], fields["obs"][:, before]
        chosen = slice(0, _STEPS)
    elif "ended" in fields:
        summed, count = 1, fields["ended"].shape[1] - 1
        rows = max(1, _STEPS // max(1, count))
        lengths = np.full(len(fields["ended"]), count) if batch.lengths is None else batch.lengths
        ended, rewards, actions = (fields[name][:rows, 1:] for name in ("ended", "reward", "action"))
        # The first entry of an action led to the first observation: what was done there is in the second.
        real = (np.arange(count) < lengths[:rows, None]) & (ended <= TRUNCATED)
        obs = fields["obs"][:rows, before : before + count]
        ended, rewards, actions = ended[real], rewards[real], actions[real]
        obs = obs if opaque else obs[real]
        chosen = slice(None)
    else:
        return None
    actions = actions[chosen].reshape(len(actions[chosen]), -1)
    return Steps(rewards[chosen], ended[chosen], actions, None if opaque else obs[chosen], summed)


def _per_step(share: float, summed: int) -> float:
    """The chance of something in a step, from the share of windows of so many steps that have it."""
    return 1.0 - (1.0 - share) ** (1.0 / summed)


class Ends:
    """Whether an observation shows that the episode is about to end.

    If not, the end came from outside, as a time limit does. The newest observations before ends that were
    told as terminations are kept, as directions of at most WIDTH numbers.
    """

    KEPT = 32
    OTHERS = 256
    FEWEST = 8
    WIDTH = 64

    def __init__(self) -> None:
        self._ends = np.zeros((0, 0), np.float32)
        self._others = np.zeros((0, 0), np.float32)
        self._directions: np.ndarray | None = None

    def take(self, obs: np.ndarray, ended: np.ndarray, *, again: bool) -> None:
        """Take in observations `[M, ...]` and how the steps from there ended the episode, `[M]`.

        `again`: the same ones may come again, and count once.
        """
        terminated, running = np.flatnonzero(ended == TERMINATED), np.flatnonzero(ended == 0)
        ends = self._seen(obs[terminated[-self.KEPT :]])
        spaced = running[:: max(1, len(running) // self.OTHERS)][: self.OTHERS]
        others = self._seen(obs[spaced])
        if ends.shape[1] == self._ends.shape[1]:
            ends = np.concatenate([self._ends, ends])
        if again:
            ends = ends[np.sort(np.unique(ends, axis=0, return_index=True)[1])]
        self._ends = ends[-self.KEPT :]
        if len(others):
            self._others = others

    def seen_share(self) -> float | None:
        """The chance that what is most like the observation before an end is one before another end.

        Among as many others. 1: an end shows. 0.5: it looks like anything. None: there are too few of either.
        """
        fewer = len(self._ends) - 1
        if fewer < self.FEWEST or len(self._others) < 2 * fewer:
            return None
        scale = self._others.std(0) + 1e-6
        ends, others = self._ends / scale, self._others / scale
        apart = _squares(ends, ends)
        np.fill_diagonal(apart, np.inf)
        nearest, chances = apart.min(1), []
        for first in range(groups := len(others) // fewer):
            other = _squares(ends, others[first::groups][:fewer]).min(1)
            chances.append((nearest < other - 1e-6).mean() + 0.5 * (abs(nearest - other) <= 1e-6).mean())
        return float(np.mean(chances))

    def _seen(self, obs: np.ndarray) -> np.ndarray:
        rows = obs.reshape(len(obs), int(np.prod(obs.shape[1:]))).astype(np.float32)
        if rows.shape[1] <= self.WIDTH:
            return rows
        if self._directions is None or len(self._directions) != rows.shape[1]:
            # Any will do: they keep distances (Johnson & Lindenstrauss 1984).
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(rows.shape[1], self.WIDTH, generator=generator)
            self._directions = drawn.numpy() / math.sqrt(self.WIDTH)
        directed: np.ndarray = rows @ self._directions
        return directed


def _squares(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Squares of the distances, `[M, N]`."""
    sizes = np.square(rows).sum(1)[:, None] + np.square(others).sum(1)
    return np.maximum(0.0, sizes - 2.0 * rows @ others.T)


class _Layers:
    """Hooks of a network's layers: what goes into the first, and what comes out of each activation."""

    def __init__(self, network: nn.Module) -> None:
        self._names = {module: name for name, module in network.named_modules()}
        self._layer = ""
        self._seen: dict[str, list[float]] = {}
        self._shares: dict[str, float] = {}
        self._looked: set[nn.Module] = set()

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Of a layer with weights."""
        self._layer = self._names[module]
        if not self._seen and args and isinstance(args[0], Tensor) and args[0].is_floating_point():
            self._seen[""] = _moments(args[0])

    def parts(self, module: PartInputs, args: tuple[Any, ...], seen: Tensor) -> None:
        """Of what makes numbers of observations of several parts."""
        if module in self._looked:
            return
        self._looked.add(module)
        for leaf, part in zip(module.leaves, seen.split(list(module.widths), dim=1), strict=True):
            self._seen["/" + ".".join(map(str, leaf.path))] = _moments(part)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Of an activation."""
        if module in self._looked or len(self._looked) > _LAYERS:
            return
        self._looked.add(module)
        units = output.detach()
        if units.ndim < 2:  # one unit, of which nobody has made a column
            units = units.reshape(-1, 1)
        # A channel of a picture is one unit, wherever in the picture it is on.
        units = (
            units[:_ROWS].transpose(0, 1).flatten(1) if units.ndim == 4 else units.flatten(0, -2)[:_ROWS].T
        )
        units = units.float()
        if units.shape[1] < 2:
            return
        # Dead: the same whatever the observation. A ReLU is then 0, with a gradient of 0, for good.
        still = units.amax(1) - units.amin(1) <= 1e-6
        self._shares[f"dead_share/{self._layer}"] = still.float().mean().item()
        if isinstance(module, nn.Tanh):
            beyond = (units.abs() > _SATURATED).float().mean(1) > 0.95
            self._shares[f"saturated_share/{self._layer}"] = beyond.float().mean().item()

    def metrics(self) -> dict[str, float]:
        """What was found."""
        found = {f"learner/{name}": value for name, value in self._shares.items()}
        for part, moments in self._seen.items():
            for name, value in zip(("mean", "deviation", "least", "most"), moments, strict=True):
                found[f"learner/seen_{name}{part}"] = value
        return found


def _moments(seen: Tensor) -> list[float]:
    """Mean, deviation, least and most of some rows."""
    rows = seen.detach().flatten(0, max(0, seen.ndim - 2))[:_ROWS] if seen.ndim < 4 else seen.detach()[:64]
    rows = rows.float()
    deviation, mean = torch.std_mean(rows, correction=0)
    found: list[float] = torch.stack([mean, deviation, rows.min(), rows.max()]).tolist()
    return found


@contextlib.contextmanager
def _watched(network: nn.Module) -> Iterator[_Layers]:
    """Look at the first call of each layer."""
    layers = _Layers(network)
    hooks = []
    for module in network.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, PartInputs):
            hooks.append(module.register_forward_hook(layers.parts))
        elif isinstance(module, _ACTIVATIONS):
            hooks.append(module.register_forward_hook(layers.after))
        elif (isinstance(weight, Tensor) and weight.ndim > 1) or isinstance(module, nn.LSTM):
            hooks.append(module.register_forward_pre_hook(layers.before))
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


class _StepSize:
    """Hooks of an optimiser: how far its first step moves the weights, beside how large these are."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before: list[Tensor] | None = None
        self._found: dict[str, float] = {}

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep weights."""
        if self._before is None:
            self._before = [weights.clone() for weights in self._weights()]

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compare."""
        if self._before is None or self._found:
            return
        moved = torch._foreach_sub(self._weights(), self._before)
        norms = [torch.stack(torch._foreach_norm(each)).norm().item() for each in (moved, self._before)]
        self._found = {
            "learner/step_size": norms[0] / max(1e-12, norms[1]),
            "learner/learning_rate": float(optimizer.param_groups[0]["lr"]),
        }

    def _weights(self) -> list[Tensor]:
        parameters = self._network.parameters()
        return [each.detach().reshape(-1)[:_WEIGHTS] for each in parameters if each.is_floating_point()]

    def metrics(self) -> dict[str, float]:
        """What was found."""
        return self._found


@contextlib.contextmanager
def _first_step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[_StepSize]:
    """Look at the first step of an optimiser."""
    size = _StepSize(network)
    hooks = [optimizer.register_step_pre_hook(size.before), optimizer.register_step_post_hook(size.after)]
    try:
        yield size
    finally:
        for hook in hooks:
            hook.remove()
