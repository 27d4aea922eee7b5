"""What agents without memory that learn from n-step transitions share: storing them, and reading a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.network import Network, NetworkAgent, NetworkConfig, OwnLearning
from troupe.common.data.accumulator import NStepAccumulator, n_step_fields

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class StoredConfig(NetworkConfig, Protocol):
    """Fields of an agent that stores transitions."""

    gamma: float


Config = TypeVar("Config", bound=StoredConfig)


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


class StoresTransitions(NetworkAgent[Config, Network, OwnLearning]):
    """The part of an `Agent` that has nothing to do with what its network says; see there.

    Its `act` gives the extras that `NStepAccumulator.add` asks for.
    """

    def __init__(self, config: Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self.memory_size = 0
        self.fields = n_step_fields(spec.obs_shape, spec.obs_dtype, spec.stack, self.n_steps, spec.actions)
        self.item_steps = (1, 1)

    @property
    def n_steps(self) -> int:
        """Steps of reward before the bootstrap."""
        return 1

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> NStepAccumulator:
        """An n-step accumulator for one slot."""
        dtype = self.spec.actions.stored_dtype
        return NStepAccumulator(self.n_steps, self.config.gamma, chunk_steps, self.spec.stack, dtype)

    def _transitions(self, batch: dict[str, np.ndarray]) -> Transitions:
        """The transitions of windows `[B, stack - 1 + 1 + n, ...]` of items."""
        data = {name: self._to_device(array) for name, array in batch.items()}
        obs, bootstrap = data["obs"], data["bootstrap_steps"][:, 0].long()
        action = data["action"][:, 0] if self.spec.actions.reals else data["action"][:, 0].long()
        outcome = action, data["reward"][:, 0], data["discount"][:, 0]
        stack, rows = self.spec.stack, torch.arange(len(obs), device=obs.device)
        if not stack:
            return Transitions(obs[:, 0], *outcome, obs[rows, bootstrap])
        places = bootstrap[:, None] + torch.arange(stack, device=obs.device)
        return Transitions(obs[:, :stack], *outcome, obs[rows[:, None], places])
