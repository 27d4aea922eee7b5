"""Several passes over one batch of fresh unrolls: minibatches, number format, and the loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.agents.formats import faster_dtype
from troupe.common.agents.learners.learning_rate import LearningRate, LearningRateConfig
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.common.agents.network import Learner, body_options, network_inputs
from troupe.common.agents.stored.unrolls import Unrolls
from troupe.common.agents.tensors import below, module_arrays, prefixed, tensors
from troupe.common.config.fields import RecurrentAgentConfig, TableNeeds, structural, tunable
from troupe.common.nets.recurrent import SequenceBody
from troupe.common.nets.torsos import Activation, Style
from troupe.common.rl import policy
from troupe.common.rl.returns import explained_variance

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class PassesConfig(LearningRateConfig, RecurrentAgentConfig):
    """Fields of agents that learn in passes."""

    table = TableNeeds("queue")

    activation: Activation = structural(
        "auto", "Activation of the torso: auto is relu for pixels, tanh for vectors."
    )
    layer_norm: bool = structural(False, "Apply layer normalisation to the torso's outputs.")
    residual: bool = structural(False, "Residual connections in the `mlp` torso.")
    normalize_vectors: bool = structural(
        False, "Normalise vectors by their running mean and standard deviation, clipped at 10."
    )
    see_last_step: bool = structural(
        False, "Feed the last action and the clipped last reward to the network."
    )
    max_staleness: int | None = tunable(
        0,
        "Maximum lag of the acting policy, in versions; actors wait for a newer one. 0 = strictly on "
        "policy, 1 = acting and learning overlap by one batch, none = no limit.",
        ge=0,
    )
    gamma: float = tunable(0.99, "Discount per step.", ge=0, le=1)
    reward_clip: policy.RewardClip = tunable(
        "none",
        "Reward in the loss: raw, clipped to [-1, 1], its sign, or squashed with negative rewards "
        "scaled down.",
    )
    reward_scale: float = tunable(1.0, "Factor on the reward, after clipping.", gt=0)
    epochs: int = tunable(3, "Passes over a batch.", ge=1, le=1024)
    minibatch_steps: int = tunable(
        768, "Steps of a minibatch; a recurrent network gets whole unrolls. 0 = the whole batch.", ge=0
    )
    batch_mode: Literal["shuffle", "split", "repeat"] = tunable(
        "shuffle",
        "shuffle: new random minibatches in each pass; split: the same minibatches in every pass; repeat: "
        "each is the whole batch.",
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = tunable(
        "float32",
        "Number format for computation in the passes; weights are float32. auto: bfloat16 on processors "
        "that support it natively, if a trial at the first update finds it faster.",
    )
    optimizer_epsilon: float = tunable(1e-5, "Term added to Adam's denominator.", gt=0)
    max_grad_norm: float = tunable(0.5, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)

    @property
    def allowed_staleness(self) -> int | None:
        """See the base class."""
        return self.max_staleness


def styled_body(config: PassesConfig, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of a `SequenceBody` apart from its shapes and torso."""
    inputs = network_inputs(config, spec, vectors=config.normalize_vectors)
    options = body_options(config, spec) | {"inputs": inputs}
    return options | {"style": Style(config.activation, config.layer_norm, config.residual)}


@dataclass(frozen=True, slots=True)
class Steps:
    """What minibatches are cut from, `[T, N, ...]`: without memory every step is a column of its own.

    A subclass adds what its loss wants to know of a step.
    """

    obs: Tensor
    last_action: Tensor
    last_reward: Tensor
    first: Tensor
    memory: Tensor
    """`[N, memory_size]`, before the first step."""
    action: Tensor
    value: Tensor
    """What the network said of the step before this batch, a state's or an action's."""
    target: Tensor
    """What it should be."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The network's arguments."""
        return self.obs, self.last_action, self.last_reward, self.first, self.memory

    def columns(self, index: Tensor) -> Self:
        """These columns only."""
        parts = ((each.name, getattr(self, each.name)) for each in fields(self))
        return type(self)(
            **{name: part[index] if name == "memory" else _taken(part, index) for name, part in parts}
        )

    def flattened(self) -> Self:
        """Steps `[T, B]` as `[1, T B]`: without memory each stands for itself."""
        parts = {}
        for each in fields(self):
            part: Tensor = getattr(self, each.name)
            none = part.new_zeros(self.last_reward.numel(), 0)
            parts[each.name] = none if each.name == "memory" else part.flatten(0, 1)[None]
        return type(self)(**parts)


def inputs_of(unrolls: Unrolls) -> dict[str, Tensor]:
    """The part of `Steps` that `unrolls` have."""
    return {
        "obs": unrolls.obs[:-1],
        "last_action": unrolls.last_action[:-1],
        "last_reward": unrolls.last_reward[:-1],
        "first": unrolls.ended[:-1] != 0,
        "memory": unrolls.memory,
        "action": unrolls.last_action[1:],
    }


def _taken(part: Tensor, index: Tensor) -> Tensor:
    """`part[:, index]`; of images stored channels-last whole rows are copied, and stay so."""
    if part.ndim < 5:
        return part.index_select(1, index)
    # Indexing the tensor as it stands would gather channel by channel and return another layout, which the
    # next convolution would convert back.
    return part.movedim(2, -1).index_select(1, index).movedim(-1, 2)


def _columns(part: Tensor, columns: slice) -> Tensor:
    """`part[:, columns]`; images stay channels-last, also where they have to be copied to be one batch."""
    if part.ndim < 5:
        return part[:, columns]
    return part.movedim(2, -1)[:, columns].contiguous().movedim(-1, 2)


def means(measured: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """What `PassesLearner.learn` gave, as scalars for the log."""
    return {f"learner/{name}": torch.stack(each).mean() for name, each in measured.items()}


class Minibatches:
    """Which columns of a batch `[T, N]` each minibatch takes."""

    def __init__(self, config: PassesConfig, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._steps = config.minibatch_steps
        self._mode = config.batch_mode
        self._order = torch.arange(0)

    def of_pass(self, epoch: int, steps: int, columns: int, reduction: Reduction = ALONE) -> Iterator[Tensor]:
        """Indices `[n]` of each minibatch of pass number `epoch` over T `steps` and N `columns`.

        Where several learners share the batch, all cut the whole batch alike, and each takes those of its
        own columns: none, perhaps.
        """
        places, whole = reduction.places(columns)
        if reduction.alone:
            yield from self._parts(epoch, steps, whole)
            return
        own = torch.full((whole,), -1)
        own[places] = torch.arange(len(places))
        for part in self._parts(epoch, steps, whole):
            found = own[part]
            yield found[found >= 0]

    def _parts(self, epoch: int, steps: int, columns: int) -> Iterator[Tensor]:
        size = max(1, self._steps // steps) if self._steps else columns
        if self._mode == "repeat" or size >= columns:
            yield torch.arange(columns)
            return
        # `split` keeps the first pass's order: each minibatch then sees the same steps in every pass.
        if epoch == 0 or self._mode == "shuffle":
            self._order = torch.randperm(columns, generator=self.generator)
        # Equal parts: a small last one would move the policy as far as a whole one.
        yield from self._order.tensor_split(max(1, round(columns / size)))


OwnSteps = TypeVar("OwnSteps", bound=Steps)


class PassesLearner(Learner):
    """A learner that goes over a batch of unrolls several times.

    Args:
        config: see there.
        net: the network that learns.
        optimizer: of its parameters, and of those of `own`.
        own: what else an agent needs to learn; part of the checkpoint.
        seed: of the minibatches.
        pixels: observations are pixels, which are made to images once for all passes.
        period_updates: after so many an update is another `branch`; 0: never.
    """

    def __init__(
        self,
        config: PassesConfig,
        net: SequenceBody,
        optimizer: torch.optim.Optimizer,
        own: nn.Module | None = None,
        *,
        seed: int,
        pixels: bool,
        period_updates: int = 0,
    ) -> None:
        super().__init__(net, optimizer, config.max_grad_norm)
        self.rate = LearningRate(config, optimizer)
        self._config = config
        self._net = net
        self._own = own or nn.Module()
        self._pixels = pixels
        self._period = period_updates
        self._minibatches = Minibatches(config, seed)
        self._dtype: torch.dtype | None = None  # found out at the first update

    def prepared(self, unrolls: Unrolls) -> Unrolls:
        """The unrolls with pixels as the network sees them.

        Their statistics are taken in before: all passes are made by the network that is published.
        """
        self._net.observe(unrolls.obs[1:])
        if self._dtype is None:
            self._dtype = self._trial(unrolls)
        if not self._pixels:
            return unrolls
        # Scaled once for all passes: with 3 passes the same bytes would otherwise become floats three times.
        return unrolls._replace(obs=self._net.seen(unrolls.obs, self._dtype))

    def drawn(self, steps: int, rows: int) -> dict[str, Tensor]:
        """Which columns each minibatch of the next update takes, for `learn`; `[n]` by name.

        Args:
            steps: T of the unrolls.
            rows: B of them. Without memory each of their steps is a column of its own.
        """
        shape = (steps, rows) if self._net.state_size else (1, steps * rows)
        return {
            f"columns/{epoch}/{number}": index
            for epoch in range(self._config.epochs)
            for number, index in enumerate(self._minibatches.of_pass(epoch, *shape, self.reduction))
        }

    def learn(
        self,
        columns: Mapping[str, Tensor],
        estimate: Callable[[OwnSteps | None], OwnSteps],
        loss: Callable[[OwnSteps], tuple[Tensor, dict[str, Tensor]]],
    ) -> dict[str, list[Tensor]]:
        """Makes all passes; what was measured in each minibatch, by name.

        Args:
            columns: what `drawn` gave, among other things.
            estimate: the steps of a pass, given those of the pass before; of None for the first.
            loss: of a minibatch, and what was measured.
        """
        measured: dict[str, list[Tensor]] = {}
        steps: OwnSteps | None = None
        for epoch in range(self._config.epochs):
            steps = estimate(steps)
            if not epoch:
                explained = explained_variance(steps.target - steps.value, steps.target)
                measured["explained_variance"] = [explained]
            terms: list[dict[str, Tensor]] = []
            moved: list[tuple[Tensor, int]] = []  # of each minibatch: how far, and how many columns say so
            for number in itertools.count():
                if (index := columns.get(f"columns/{epoch}/{number}")) is None:
                    break
                if not len(index):  # all of this minibatch is in the shares of other learners
                    self.descend(None, 0)
                    moved.append((torch.zeros(()), 0))
                    continue
                terms.append(self._step(*loss(steps.columns(index)), len(index)))
                if self.rate.follows_kl:
                    moved.append((terms[-1]["moved_kl"], len(index)))
            if self.rate.follows_kl:
                # Once per pass: within one, the first minibatches have not moved the policy yet, and would
                # raise the rate every time.
                self.rate.follow_kl(self.reduction.means(moved).mean())
            for each in terms:
                for name, value in each.items():
                    measured.setdefault(name, []).append(value)
        # One update per batch, whatever the number of passes: versions, checkpoints and `Pace` count batches.
        self.updates += 1
        return measured

    @property
    def branch(self) -> bool:
        """See `Learner`: whether the next update ends a period."""
        return bool(self._period) and (self.updates + 1) % self._period == 0

    def metrics(self) -> dict[str, float]:
        """See `Learner`: the learning rate."""
        return {"learner/learning_rate": self.rate.value}

    def forward(self, *inputs: Tensor, net: nn.Module | None = None) -> tuple[Tensor, ...]:
        """What the network, or `net`, says of its arguments, float32, without the memory after them."""
        return self._forward_in(self._dtype, *inputs, net=net)

    @torch.no_grad()
    def evaluated(self, unrolls: Unrolls, net: nn.Module | None = None) -> tuple[Tensor, ...]:
        """What the network says of all observations, each `[T + 1, B, ...]`, in bounded memory."""
        # In parts: without gradients a pass over the whole batch would still hold the activations of its
        # largest layer.
        steps, rows = unrolls.ended.shape
        size = max(self._config.minibatch_steps or 4096, steps)
        inputs: tuple[Tensor, ...]
        inputs = unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0
        if self._net.state_size:
            size, memory = size // steps, unrolls.memory
        else:
            # Each stands for itself, so parts of all of them in a row need no copy.
            inputs = tuple(each.flatten(0, 1)[None] for each in inputs)
            memory = unrolls.memory.new_zeros(steps * rows, 0)
        parts = []
        for first in range(0, len(memory), size):
            part = slice(first, first + size)
            parts.append(self.forward(*(_columns(each, part) for each in inputs), memory[part], net=net))
        said = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        return tuple(each.reshape(steps, rows, *each.shape[2:]) for each in said)

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Learner`: what the agent holds, the generator of minibatches, a rate that follows KL."""
        arrays = prefixed("learning/", module_arrays(self._own))
        arrays["generator"] = self._minibatches.generator.get_state().numpy().copy()
        # Else it follows from the configuration: learners that have copied a state would seem to differ.
        return arrays | ({"learning_rate": np.array(self.rate.value)} if self.rate.follows_kl else {})

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Learner`."""
        self._own.load_state_dict(tensors(below("learning/", arrays)))
        self._minibatches.generator.set_state(torch.from_numpy(arrays["generator"].copy()))
        if self.rate.follows_kl:  # else it is what the configuration says now
            self.rate.value = float(arrays["learning_rate"].reshape(()))  # a file may hold it as [1]

    def _step(self, loss: Tensor, measured: dict[str, Tensor], columns: int) -> dict[str, Tensor]:
        """One step of the optimiser; returns what was measured, without gradients."""
        norm = self.descend(loss, columns)
        return {
            name: value.detach() for name, value in (measured | {"loss": loss, "grad_norm": norm}).items()
        }

    def _forward_in(
        self, dtype: torch.dtype | None, *inputs: Tensor, net: nn.Module | None = None
    ) -> tuple[Tensor, ...]:
        short = dtype is torch.bfloat16
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=short):
            said = (net or self._net)(*inputs)
        return tuple(each.float() for each in said[:-1])

    def _trial(self, unrolls: Unrolls) -> torch.dtype:
        """The number format in which this machine makes passes over such unrolls faster."""
        columns = max(1, self._config.minibatch_steps // len(unrolls.obs))
        inputs = (unrolls.last_action, unrolls.last_reward, unrolls.ended != 0)
        last = [each[:, :columns] for each in inputs]

        def step(dtype: torch.dtype) -> None:
            obs = unrolls.obs[:, :columns]
            obs = self._net.seen(obs, dtype) if self._pixels else obs
            said = self._forward_in(dtype, obs, *last, unrolls.memory[:columns])
            # Any loss will do: the time is that of the layers, not of the loss.
            torch.stack([each.square().mean() for each in said]).sum().backward()
            self.optimizer.zero_grad(set_to_none=True)

        return faster_dtype(
            self._config.compute_dtype, unrolls.obs.device, step, of="learning", what="a minibatch"
        )
