"""Unrolls: as many steps in a row as are learned from together, without gaps, across episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.tensors import joined_memory, on_device
from troupe.common.data.accumulators.unrolls import (
    TERMINATED,
    TRUNCATED,
    UnrollAccumulator,
    unroll_fields,
)
from troupe.common.data.schema import FieldSpec
from troupe.common.nets.pixels import stacked
from troupe.common.rl.sequences import next_values, without_old_ends

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

# Fields that the network is not given, or not as they are stored.
_NOT_READ = ("memory", "features", "value")


class Unrolls(NamedTuple):
    """A batch, time-major, on the device. Entry t of `[T + 1]` belongs to observation t, or led to it."""

    obs: Tensor
    """`[T + 1, B, *obs_shape]`."""
    last_action: Tensor
    """`[T + 1, B, *actions.shape]`, int64 or float."""
    last_reward: Tensor
    """`[T + 1, B]` float."""
    ended: Tensor
    """`[T + 1, B]` uint8: how the step that led to the observation ended the episode, if it did."""
    behaviour: Tensor
    """`[T, B, P]`, parameters of the policy that acted; P is 0 where there is none."""
    final_value: Tensor
    """`[T, B]`, of an episode's last observation where step t truncated it, by the network that acted."""
    memory: Tensor
    """`[B, memory_size]` before the first step."""
    replayed: Tensor | None = None
    """`[B]` bool, the rows that are not fresh; None: all are."""

    def outcomes(self, values: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
        """What `troupe.common.rl.sequences` wants to know of the steps, given values `[T + 1, B]` of
        observations.

        Returns:
            discounts, values of the observations that truly followed, and continues, `[T, B]` each.
        """
        ended = self.ended[1:]
        discounts = gamma * (ended != TERMINATED).to(values.dtype)
        following = next_values(values, ended == TRUNCATED, self.final_value)
        return discounts, following, (ended == 0).to(values.dtype)

    def outcomes_with(
        self, rewards: Tensor, values: Tensor, gamma: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rewards `[T, B]` and `outcomes`, also of what is `replayed`; see `without_old_ends`."""
        discounts, following, continues = self.outcomes(values, gamma)
        if self.replayed is not None:
            cut = self.ended[1:] == TRUNCATED
            rewards, discounts = without_old_ends(rewards, discounts, values[:-1], cut, self.replayed)
        return rewards, discounts, following, continues


class StoredUnrolls:
    """Stores unrolls and reads batches of them. `act` gives the extras that `UnrollAccumulator` asks for.

    Args:
        spec: of the environments.
        unroll_steps: T.
        memory_size: width of the recurrent state; 0 without one.
        staggered: slots that step together complete their unrolls one after the other, and not all at once.
        behaviour_size: P, how many parameters of a policy `act` gives as `behaviour` of a step.
        feature_size: F, how many numbers `act` gives as `features` of a step.
        values: whether `act` gives the `value` of a step.
        device: where batches are read to.

    Attributes:
        fields, item_steps, memory_size: see `troupe.common.agents.base.Agent`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        unroll_steps: int,
        memory_size: int,
        *,
        staggered: bool,
        behaviour_size: int = 0,
        feature_size: int = 0,
        values: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.memory_size = memory_size
        self.fields: tuple[FieldSpec, ...] = unroll_fields(
            spec.obs_shape,
            spec.obs_dtype,
            spec.stack,
            spec.actions,
            behaviour_size,
            unroll_steps,
            memory_size,
            feature_size,
            values,
        )
        self.item_steps = (unroll_steps, unroll_steps)
        self._spec = spec
        self._staggered = staggered
        self._behaviour_size = behaviour_size
        self._device = device

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> UnrollAccumulator:
        """An accumulator of unrolls for one slot; `chunk_steps` has no say in their length."""
        steps = self.item_steps[0]
        # Skipped once, at the first unroll. With limited staleness all slots complete together: the learner
        # waits for all of them.
        skipped = int(phase * steps) if self._staggered else 0
        return UnrollAccumulator(steps, self._spec.stack, self.memory_size, skipped, self._spec.actions)

    def read(self, fields: Mapping[str, np.ndarray | Tensor]) -> Unrolls:
        """The unrolls of items `[B, T, ...]`, some of them `replayed` `[B]`, ready for the network."""
        names = [spec.name for spec in self.fields if spec.name not in _NOT_READ]
        data = {name: on_device(fields[name], self._device) for name in names}
        memory = torch.zeros(len(fields["action"]), 0, device=self._device)
        if self.memory_size:
            memory = joined_memory(fields["memory"], self.memory_size, self._device)
        # An empty tensor of the right shape and device, so that Q learners need no case of their own.
        behaviour = data["reward"].T[1:, :, None][..., :0]
        if self._behaviour_size:
            behaviour = data["behaviour"].transpose(0, 1)
        actions, obs = data["action"].transpose(0, 1), data["obs"].transpose(0, 1)
        return Unrolls(
            stacked(obs, data["frames"].T, self._spec.stack) if self._spec.stack else obs,
            actions if self._spec.actions.reals else actions.long(),
            data["reward"].T,
            data["ended"].T,
            behaviour,
            data["final_value"].T,
            memory,
            None if "replayed" not in fields else on_device(fields["replayed"], self._device),
        )
