"""What agents with memory that learn from replayed sequences share: storing them, and reading a batch."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.network import NetworkAgent, NetworkConfig, OwnLearning
from troupe.common.data.accumulator import PRIORITY_FLOOR
from troupe.common.data.sequences import BETWEEN, Layout, SequenceAccumulator, sequence_fields
from troupe.common.data.unrolls import RUNNING, TERMINATED, join_memory
from troupe.common.nets.frames import stacked
from troupe.common.rl.sequences import mixed_priorities


class StoredConfig(NetworkConfig, Protocol):
    """Fields of `troupe.common.config.fields.SequenceAgentConfig`."""

    sequence_steps: int
    burn_in_steps: int
    sequence_period_steps: int
    across_episodes: bool
    priority_eta: float
    gamma: float


class Remembers(Protocol):
    """A network with memory."""

    @property
    def state_size(self) -> int:
        """Width of its recurrent state."""

    def remember(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `troupe.common.nets.recurrent.SequenceBody`."""


Config = TypeVar("Config", bound=StoredConfig)
Network = TypeVar("Network", bound=torch.nn.Module)


class Sequences(NamedTuple):
    """A batch, time-major, on the device; `N` entries, of which the first `burn_in` are not learned from.

    The rows are aligned so that all are learned from as of entry `burn_in`. Where an episode began, a row has
    anything in front of its first entry: the network forgets it there. Behind a row's end it repeats itself.
    """

    obs: Tensor
    """`[N, B, *obs_shape]`."""
    last_action: Tensor
    """`[N, B, *actions.shape]` int64 or float32, what led to each observation."""
    last_reward: Tensor
    """`[N, B]` float."""
    first: Tensor
    """`[N, B]` bool, an episode begins with this observation."""
    memory: Tensor
    """`[B, memory_size]`, the state that the actor had before the first entry."""
    terminated: Tensor
    """`[N, B]` bool, the episode terminated with the step that led to the observation."""
    goes_on: Tensor
    """`[N - burn_in - 1, B]` bool, the step is followed by another of its episode and sequence."""
    counts: Tensor
    """`[N - burn_in - 1, B]` bool, the step is learned from; False for padding, and between two episodes."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of `Remembers.remember` but the memory."""
        return self.obs, self.last_action, self.last_reward, self.first

    def burned_in(self, network: Remembers, burn_in: int) -> tuple[Tensor, ...]:
        """Arguments of `remember` from entry `burn_in` on; no gradient flows through what is before."""
        memory = self.memory
        if burn_in:
            obs, last_action, last_reward, first = (part[:burn_in] for part in self.inputs)
            with torch.no_grad():
                _, memory = network.remember(obs, last_action, last_reward, first, memory)
        return (*(part[burn_in:] for part in self.inputs), memory)


class StoresSequences(NetworkAgent[Config, Network, OwnLearning]):
    """The part of an `Agent` that has nothing to do with what its network says; see there.

    Its network is one that `Remembers`, and its `act` gives the extras that `SequenceAccumulator.add` asks
    for.
    """

    def _begin_storing(self) -> None:
        """Set what depends on the network; to be called when there is one."""
        config, spec = self.config, self.spec
        self._layout = Layout(config.burn_in_steps, config.sequence_steps, config.sequence_period_steps)
        self.memory_size = int(self._net.state_size)  # type: ignore[arg-type]
        self.fields = sequence_fields(
            *(spec.obs_shape, spec.obs_dtype, spec.stack, spec.actions),
            *(config.sequence_period_steps, self.memory_size),
        )
        self.item_steps = (1, config.burn_in_steps + config.sequence_steps)

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> SequenceAccumulator:
        """An accumulator of sequences for one slot."""
        return SequenceAccumulator(
            *(self._layout, chunk_steps, self.spec.stack, self.memory_size, self._initial_priority),
            actions=self.spec.actions,
            across_episodes=self.config.across_episodes,
        )

    @abstractmethod
    def _value_targets(self, rewards: Tensor, discounts: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
        """Targets `[T, B]`, `values` being of what followed; see `troupe.common.rl.sequences`."""

    @torch.inference_mode()
    def _initial_priority(
        self, rewards: np.ndarray, taken: np.ndarray, best: np.ndarray, ended: np.ndarray
    ) -> float:
        """As the learner's, with the values of the network that acted in the place of the target's."""
        reward, value, following, ending = (
            torch.from_numpy(each)[:, None] for each in (rewards, taken, best, ended)
        )
        discounts, counts = torch.full_like(reward, self.config.gamma), ending != BETWEEN
        errors = self._value_targets(reward, discounts, following, ending == RUNNING) - value
        return float(mixed_priorities(errors * counts, self.config.priority_eta, counts)) + PRIORITY_FLOOR

    def _sequences(self, batch: dict[str, np.ndarray], lengths: np.ndarray | None) -> Sequences:
        """Align the rows: those that begin an episode have less burn-in, or none, in front."""
        layout, starts = self._layout, batch["ended"][:, 0] != RUNNING
        size, window = len(starts), batch["action"].shape[1] - 1
        lengths = np.full(size, window) if lengths is None else lengths.astype(np.int64)
        missing = layout.missing_burn_in(lengths, starts)
        entries = np.arange(int((missing + lengths).max()) + 1)[:, None] - missing
        times = entries[layout.burn_in : -1]
        data = {name: self._to_device(array) for name, array in batch.items() if name != "memory"}
        places = self._to_device(entries.clip(0, window))
        rows = torch.arange(size, device=self._device)
        memory = self._to_device(join_memory(batch["memory"][:, : layout.period], self.memory_size))
        action, ended = data["action"][rows, places], data["ended"][rows, places]
        learned = ended[layout.burn_in + 1 :]  # of the steps from these times on
        return Sequences(
            self._observations(data["obs"], rows, entries),
            action if self.spec.actions.reals else action.long(),
            data["reward"][rows, places],
            self._to_device((entries == 0) & starts) | (ended == BETWEEN) & self._to_device(entries > 0),
            memory,
            ended == TERMINATED,
            self._to_device(times < lengths - 1) & (learned == RUNNING),
            self._to_device(times < lengths) & (learned != BETWEEN),
        )

    def _observations(self, obs: Tensor, rows: Tensor, entries: np.ndarray) -> Tensor:
        """Observations `[N, B, *obs_shape]` at these entries `[N, B]`, stacked from single frames."""
        stack = self.spec.stack
        if not stack:
            return obs[rows, self._to_device(entries.clip(0, obs.shape[1] - 1))]
        times = np.arange(len(entries) + stack - 1)[:, None] + entries[0]
        frames = obs[rows, self._to_device(times.clip(0, obs.shape[1] - 1))]
        # Nothing of another episode is among them: where one begins, its whole first stack is stored.
        whole = torch.full(entries.shape, stack, dtype=torch.uint8, device=obs.device)
        return stacked(frames, whole, stack)
