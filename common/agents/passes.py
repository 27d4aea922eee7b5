"""Several passes over one batch of fresh unrolls: minibatches, the learning rate, and the number format."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.config.fields import PixelAgentConfig, TableNeeds, tunable

log = logging.getLogger(__name__)

_TRIALS = 3
_WORTH = 0.9
"""bfloat16 has to take at most this share of float32's time: it is less exact, so a draw is no gain."""


class PassesConfig(PixelAgentConfig):
    """Fields of agents that learn in passes."""

    table = TableNeeds("queue")

    epochs: int = tunable(3, "Passes over a batch.", ge=1, le=1024)
    minibatch_steps: int = tunable(
        768, "Steps of a minibatch; with memory it is made of whole unrolls. 0 = the whole batch.", ge=0
    )
    batch_mode: Literal["shuffle", "split", "repeat"] = tunable(
        "shuffle", "Minibatches are drawn anew in each pass, cut once, or each is the whole batch."
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = tunable(
        "float32",
        "Number format of the passes' arithmetic; weights are float32. auto: bfloat16 where a trial at the "
        "first update finds this machine faster with it.",
    )
    optimizer_epsilon: float = tunable(1e-5, "Term added to Adam's denominator.", gt=0)
    learning_rate: float = tunable(3e-4, "Step size of Adam, at the beginning.", gt=0)
    learning_rate_schedule: Literal["constant", "linear", "polynomial", "kl"] = tunable(
        "constant",
        "kl: divided by 1.5 after a pass that moved the policy by more than twice kl_target, multiplied "
        "where it was less than half; linear and polynomial: to learning_rate_final at run.total_steps.",
    )
    learning_rate_final: float = tunable(0.0, "Where linear and polynomial schedules end.", ge=0)
    learning_rate_power: float = tunable(1.0, "Of the polynomial schedule.", gt=0)
    kl_target: float = tunable(
        0.01, "Nats of KL(mu || pi) that a pass may move the policy, if schedule is kl.", gt=0
    )
    learning_rate_min: float = tunable(1e-6, "Least that the kl schedule sets.", gt=0)
    learning_rate_max: float = tunable(1e-2, "Most that the kl schedule sets.", gt=0)


@dataclass(frozen=True, slots=True)
class Steps:
    """What minibatches are cut from, `[T, N, ...]`: without memory every step is a column of its own."""

    obs: Tensor
    last_action: Tensor
    last_reward: Tensor
    first: Tensor
    memory: Tensor
    action: Tensor
    behaviour: Tensor
    """Logits of the policy that acted."""
    value: Tensor
    """Before this batch."""
    advantage: Tensor
    target: Tensor
    """Of the value."""
    anchor: Tensor
    """`log(mu / pi_target)` clipped from above: 0 without a target network."""

    def columns(self, index: Tensor) -> Steps:
        """These columns only."""
        parts = (getattr(self, name) for name in self.__slots__)
        return Steps(*(part[index] if part is self.memory else _taken(part, index) for part in parts))

    def flattened(self) -> Steps:
        """Steps `[T, B]` as `[1, T B]`: without memory each stands for itself."""
        parts = []
        for name in self.__slots__:
            part: Tensor = getattr(self, name)
            memory = part.new_zeros(self.action.numel(), 0)
            parts.append(memory if name == "memory" else part.flatten(0, 1)[None])
        return Steps(*parts)


def _taken(part: Tensor, index: Tensor) -> Tensor:
    """`part[:, index]`; of images stored channels-last whole rows are copied, and stay so."""
    if part.ndim < 5:
        return part.index_select(1, index)
    return part.movedim(2, -1).index_select(1, index).movedim(-1, 2)


class LearningRate:
    """The step size of an optimiser, as `agent.learning_rate_schedule` says."""

    def __init__(self, config: PassesConfig, optimizer: torch.optim.Optimizer) -> None:
        self._config = config
        self._optimizer = optimizer

    @property
    def value(self) -> float:
        """Of the next step."""
        return float(self._optimizer.param_groups[0]["lr"])

    @value.setter
    def value(self, value: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = value

    def follow_progress(self, progress: float) -> None:
        """Sets it for a run of which the share `progress` is done, if it depends on that."""
        config = self._config
        if config.learning_rate_schedule in ("linear", "polynomial"):
            power = config.learning_rate_power if config.learning_rate_schedule == "polynomial" else 1.0
            share = max(0.0, 1.0 - progress) ** power
            self.value = (
                config.learning_rate_final + (config.learning_rate - config.learning_rate_final) * share
            )

    def follow_kl(self, kl: float) -> None:
        """Adapts it to how far a pass has moved the policy, in nats, if it depends on that."""
        config = self._config
        if config.learning_rate_schedule != "kl":
            return
        if kl > 2.0 * config.kl_target:
            self.value = max(self.value / 1.5, config.learning_rate_min)
        elif kl < 0.5 * config.kl_target:
            self.value = min(self.value * 1.5, config.learning_rate_max)


class Minibatches:
    """Which columns of a batch `[T, N]` each minibatch takes."""

    def __init__(self, config: PassesConfig, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self._steps = config.minibatch_steps
        self._mode = config.batch_mode
        self._order = torch.arange(0)

    def of_pass(self, epoch: int, steps: int, columns: int) -> Iterator[Tensor]:
        """Indices `[n]` of each minibatch of pass number `epoch` over T `steps` and N `columns`."""
        size = max(1, self._steps // steps) if self._steps else columns
        if self._mode == "repeat" or size >= columns:
            yield torch.arange(columns)
            return
        if epoch == 0 or self._mode == "shuffle":
            self._order = torch.randperm(columns, generator=self.generator)
        # Equal parts: a small last one would move the policy as far as a whole one.
        yield from self._order.tensor_split(max(1, round(columns / size)))


def faster_dtype(wanted: str, device: torch.device, step: Callable[[torch.dtype], object]) -> torch.dtype:
    """The number format to compute in: what was `wanted`, or for `auto` what a trial of `step` finds faster.

    Processors without units for bfloat16 emulate it, many times slower, and say nothing: so it is measured.

    Args:
      wanted: a value of `agent.compute_dtype`.
      device: where it is computed. On a GPU `auto` is float32, which there may use the units for TF32.
      step: a minibatch forward and backward, with arithmetic in this format; it must change nothing.
    """
    if wanted != "auto" or device.type != "cpu":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        step(dtype)  # the first time is slower: kernels are chosen, memory is taken
        times = []
        for _ in range(_TRIALS):
            began_s = time.perf_counter()
            step(dtype)
            times.append(time.perf_counter() - began_s)
        seconds[dtype] = min(times)
    exact, short = seconds[torch.float32], seconds[torch.bfloat16]
    chosen = torch.bfloat16 if short < _WORTH * exact else torch.float32
    log.info(
        "learning computes in %s: a minibatch takes %.1f ms in float32 and %.1f ms in bfloat16",
        *(str(chosen).removeprefix("torch."), 1000 * exact, 1000 * short),
    )
    return chosen
