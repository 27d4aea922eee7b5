"""n-step transitions, for agents without memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.tensors import on_device
from troupe.common.data.accumulators.n_step import NStepAccumulator, n_step_fields
from troupe.common.data.schema import FieldSpec
from troupe.common.rl.normalizers import ReturnScale

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class Transitions(NamedTuple):
    """A batch of n-step transitions, on the device."""

    obs: Tensor
    """`[B, *obs_shape]`."""
    action: Tensor
    """`[B, *actions.shape]`, int64 or float32."""
    reward: Tensor
    """`[B]` float32, the discounted sum of the n steps."""
    discount: Tensor
    """`[B]` float32, what the value of `next_obs` counts; 0 where the episode terminated."""
    next_obs: Tensor
    """`[B, *obs_shape]`, n steps later, or the episode's last."""


def scaled(transitions: Transitions, scale: ReturnScale | None) -> Transitions:
    """The transitions, taken into the scale, with their rewards divided by it; as they are without one."""
    if scale is None:
        return transitions
    # Before anything is made of them: the first batch would else fit the network to another unit.
    scale.observe(transitions.reward, transitions.discount)
    return transitions._replace(reward=scale(transitions.reward))


class StoredTransitions:
    """Stores transitions and reads batches of them. `act` gives the extras that `NStepAccumulator` asks for.

    Args:
        spec: of the environments.
        n_steps: steps of reward before the bootstrap.
        gamma: discount per step.
        device: where batches are read to.
        action_bounds: least and largest number of an action, where that is less than `spec.actions` allows.

    Attributes:
        fields, item_steps, memory_size: see `troupe.common.agents.base.Agent`.
    """

    memory_size = 0
    item_steps = (1, 1)

    def __init__(
        self,
        spec: EnvSpec,
        n_steps: int,
        gamma: float,
        device: torch.device | str = "cpu",
        action_bounds: tuple[float, float] | None = None,
    ) -> None:
        self.fields: tuple[FieldSpec, ...] = n_step_fields(
            spec.obs_shape, spec.obs_dtype, spec.stack, n_steps, spec.actions, action_bounds
        )
        self._spec = spec
        self._n_steps = n_steps
        self._gamma = gamma
        self._device = device

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> NStepAccumulator:
        """An n-step accumulator for one slot."""
        spec = self._spec
        return NStepAccumulator(
            self._n_steps, self._gamma, chunk_steps, spec.stack, spec.actions.stored_dtype
        )

    def read(self, fields: Mapping[str, np.ndarray | Tensor]) -> Transitions:
        """The transitions of windows `[B, stack - 1 + 1 + n, ...]` of items."""
        data = {spec.name: on_device(fields[spec.name], self._device) for spec in self.fields}
        obs, bootstrap = data["obs"], data["bootstrap_steps"][:, 0].long()
        action = data["action"][:, 0] if self._spec.actions.reals else data["action"][:, 0].long()
        outcome = action, data["reward"][:, 0], data["discount"][:, 0]
        stack, rows = self._spec.stack, torch.arange(len(obs), device=obs.device)
        if not stack:
            return Transitions(obs[:, 0], *outcome, obs[rows, bootstrap])
        # Frames are stored once: both stacks are cut out of the window.
        places = bootstrap[:, None] + torch.arange(stack, device=obs.device)
        return Transitions(obs[:, :stack], *outcome, obs[rows[:, None], places])
