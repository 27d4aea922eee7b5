"""What agents that learn from unrolls share: storing them, and reading what a batch of them holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Inputs
from troupe.common.agents.fitting import BodyConfig
from troupe.common.agents.network import NetworkAgent, NetworkConfig, OwnLearning
from troupe.common.data.unrolls import TERMINATED, TRUNCATED, UnrollAccumulator, join_memory, unroll_fields
from troupe.common.nets.frames import stacked
from troupe.common.nets.recurrent import SequenceBody
from troupe.common.rl.sequences import next_values

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class UnrollConfig(NetworkConfig, BodyConfig, Protocol):
    """Fields of an agent that learns from unrolls, besides those of its network's body."""

    unroll_steps: int

    @property
    def allowed_staleness(self) -> int | None:
        """See `troupe.common.config.fields.AgentConfig`."""


_OTHERS = ("memory", "features", "value")
"""Fields of a batch that the network is not given, or not as they are stored."""

Config = TypeVar("Config", bound=UnrollConfig)
Network = TypeVar("Network", bound=SequenceBody)


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
    """`[T, B]`."""
    memory: Tensor
    """`[B, memory_size]` before the first step."""

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


class UnrollAgent(NetworkAgent[Config, Network, OwnLearning]):
    """The part of an `Agent` that has nothing to do with what its network says; see there."""

    def __init__(self, config: Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self.memory_size = self._net.state_size
        self.fields = unroll_fields(
            spec.obs_shape,
            spec.obs_dtype,
            spec.stack,
            spec.actions,
            self.behaviour_size,
            config.unroll_steps,
            self.memory_size,
            self.feature_size,
            self.stores_values,
        )
        self.item_steps = (config.unroll_steps, config.unroll_steps)

    @property
    def behaviour_size(self) -> int:
        """P: how many parameters of a policy `act` gives as `behaviour` of a step; 0: none."""
        return 0

    @property
    def feature_size(self) -> int:
        """F: how many numbers `act` gives as `features` of a step; 0: none."""
        return 0

    @property
    def stores_values(self) -> bool:
        """Whether `act` gives the `value` of a step."""
        return False

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> UnrollAccumulator:
        """An accumulator of unrolls for one slot; their length is `agent.unroll_steps`."""
        steps = self.config.unroll_steps
        # Where a policy is to be learned from by itself, all slots begin and end with it.
        skipped = int(phase * steps) if self.config.allowed_staleness is None else 0
        return UnrollAccumulator(steps, self.spec.stack, self.memory_size, skipped, self.spec.actions)

    def _forward(
        self, inputs: Inputs, network: Callable[..., tuple[Tensor, ...]] | None = None
    ) -> tuple[Tensor, ...]:
        """One step of the network: what it says, `[1, S, ...]`, and then the memory `[S, memory_size]`.

        `network` is what is called instead of it, such as a method of its own that says more.
        """
        arrays = (inputs.obs, inputs.last_action, inputs.last_reward, inputs.first)
        said: tuple[Tensor, ...] = (network or self._net)(
            *(self._to_device(array)[None] for array in arrays), self._to_device(inputs.memory)
        )
        return said

    def _unrolls(self, batch: dict[str, np.ndarray]) -> Unrolls:
        """What `update` is given, ready for the network."""
        data = {name: self._to_device(array) for name, array in batch.items() if name not in _OTHERS}
        memory = torch.zeros(len(batch["action"]), 0, device=self._device)
        if self.memory_size:
            memory = self._to_device(join_memory(batch["memory"], self.memory_size))
        behaviour = data["reward"].T[1:, :, None][..., :0]
        if self.behaviour_size:
            behaviour = data["behaviour"].transpose(0, 1)
        return Unrolls(
            self._observations(data),
            self._actions(data["action"]),
            data["reward"].T,
            data["ended"].T,
            behaviour,
            data["final_value"].T,
            memory,
        )

    def _actions(self, stored: Tensor) -> Tensor:
        """Actions `[T + 1, B, *actions.shape]` of `[B, T + 1, ...]` in the dtype of a row."""
        rows = stored.transpose(0, 1)
        return rows if self.spec.actions.reals else rows.long()

    def _observations(self, data: dict[str, Tensor]) -> Tensor:
        """Observations `[T + 1, B, *obs_shape]`; stacks are put together from single frames."""
        if not self.spec.stack:
            return data["obs"].transpose(0, 1)
        return stacked(data["obs"].transpose(0, 1), data["frames"].T, self.spec.stack)
