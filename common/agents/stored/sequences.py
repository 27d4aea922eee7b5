"""Sequences with the recurrent state that acting had before them, for agents with memory that replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.tensors import joined_memory, on_device
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.accumulators.sequences import BETWEEN, Layout, SequenceAccumulator, sequence_fields
from troupe.common.data.accumulators.unrolls import RUNNING, TERMINATED
from troupe.common.data.schema import FieldSpec
from troupe.common.nets.pixels import stacked
from troupe.common.rl.normalizers import ReturnScale
from troupe.common.rl.sequences import mixed_priorities

if TYPE_CHECKING:
    from troupe.common.config.fields import SequenceAgentConfig
    from troupe.common.envs import EnvSpec
    from troupe.common.nets.recurrent import SequenceBody
    from troupe.common.nets.soft_actor_critic import SoftActorCritic

ValueTargets = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Targets `[T, B]` of rewards, discounts, values of what followed, and of whether the sequence goes on."""


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
        """Arguments of the network's `remember` but the memory."""
        return self.obs, self.last_action, self.last_reward, self.first

    def outcomes(self, burn_in: int, gamma: float) -> tuple[Tensor, Tensor]:
        """Rewards of the steps behind the burn-in, and what the value after each counts, `[T, B]` float."""
        rewards = self.last_reward[burn_in + 1 :]
        return rewards, gamma * (~self.terminated[burn_in + 1 :]).to(rewards.dtype)

    def observe_rewards(self, scale: ReturnScale | None, burn_in: int, gamma: float) -> None:
        """Take the steps that are learned from into `scale`, if there is one."""
        if scale is not None:
            scale.observe(*self.outcomes(burn_in, gamma), self.counts)

    def burned_in(self, network: SequenceBody | SoftActorCritic, burn_in: int) -> tuple[Tensor, ...]:
        """Arguments of `remember` from entry `burn_in` on; no gradient flows through what is before."""
        memory = self.memory
        if burn_in:
            obs, last_action, last_reward, first = (part[:burn_in] for part in self.inputs)
            with torch.no_grad():
                # The stored state is that of an older network; running today's over the steps before makes up
                # for most of that (Kapturowski et al. 2019, section 3).
                _, memory = network.remember(obs, last_action, last_reward, first, memory)
        return (*(part[burn_in:] for part in self.inputs), memory)


class StoredSequences:
    """Stores sequences and reads batches of them. `act` gives the extras that `SequenceAccumulator` asks for.

    Args:
        config: which sequences.
        spec: of the environments.
        memory_size: width of the recurrent state.
        gamma: discount per step.
        value_targets: what the learner moves values towards, for the first priority of a sequence.
        device: where batches are read to.
        action_bounds: least and largest number of an action, where that is less than `spec.actions` allows.

    Attributes:
        fields, item_steps, memory_size: see `troupe.common.agents.base.Agent`.
    """

    def __init__(
        self,
        config: SequenceAgentConfig,
        spec: EnvSpec,
        memory_size: int,
        gamma: float,
        value_targets: ValueTargets,
        device: torch.device | str = "cpu",
        action_bounds: tuple[float, float] | None = None,
    ) -> None:
        self.memory_size = memory_size
        self.fields: tuple[FieldSpec, ...] = sequence_fields(
            spec.obs_shape,
            spec.obs_dtype,
            spec.stack,
            spec.actions,
            config.sequence_period_steps,
            memory_size,
            action_bounds,
        )
        self.item_steps = (1, config.burn_in_steps + config.sequence_steps)
        self._config = config
        self._spec = spec
        self._gamma = gamma
        self._value_targets = value_targets
        self._device = device
        self._layout = Layout(config.burn_in_steps, config.sequence_steps, config.sequence_period_steps)

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> SequenceAccumulator:
        """An accumulator of sequences for one slot."""
        return SequenceAccumulator(
            self._layout,
            chunk_steps,
            self._spec.stack,
            self.memory_size,
            self.initial_priority,
            actions=self._spec.actions,
            across_episodes=self._config.across_episodes,
        )

    @torch.inference_mode()
    def initial_priority(
        self, rewards: np.ndarray, taken: np.ndarray, best: np.ndarray, ended: np.ndarray
    ) -> float:
        """As the learner's, with the values of the network that acted in the place of the target's.

        Args:
            rewards: `[T]` float32.
            taken: `[T]`, values of the actions.
            best: `[T]`, values of what followed each step.
            ended: `[T]` uint8, how a step ended the episode, if it did.
        """
        reward, value, following, ending = (
            torch.from_numpy(each)[:, None] for each in (rewards, taken, best, ended)
        )
        discounts, counts = torch.full_like(reward, self._gamma), ending != BETWEEN
        errors = self._value_targets(reward, discounts, following, ending == RUNNING) - value
        return float(mixed_priorities(errors * counts, self._config.priority_eta, counts)) + PRIORITY_FLOOR

    def aligned(
        self, fields: Mapping[str, np.ndarray], lengths: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """How `read` aligns items with `lengths` `[B]`, see `Batch`; found on the CPU, as it says how many
        entries there are.

        Returns:
            entries: int64 `[N, B]`, which entry of its window stands where in a row; before 0 there is none.
            lengths: int64 `[B]`.
        """
        starts, window = fields["ended"][:, 0] != RUNNING, fields["action"].shape[1] - 1
        lengths = np.full(len(starts), window) if lengths is None else lengths.astype(np.int64)
        # A sequence that begins an episode has fewer steps in front: it is shifted, so that what is learned
        # from begins at one index for the whole batch, and the burn-in is one call.
        missing = self._layout.missing_burn_in(lengths, starts)
        entries = np.arange(int((missing + lengths).max()) + 1)[:, None] - missing
        return {"entries": entries, "lengths": lengths}

    def read(self, fields: Mapping[str, np.ndarray | Tensor]) -> Sequences:
        """The sequences of windows `[B, window, ...]`, with what `aligned` says of them among the fields.

        The rows are aligned: those that begin an episode have less burn-in, or none, in front.
        """
        layout, data = self._layout, {name: self._tensor(array) for name, array in fields.items()}
        entries, lengths, window = data["entries"], data["lengths"], data["action"].shape[1] - 1
        times = entries[layout.burn_in : -1]
        # Indices before 0 and behind the end read something that exists; `first` and `counts` keep it from
        # mattering.
        places = entries.clamp(0, window)
        rows = torch.arange(len(lengths), device=self._device)
        # The state is stored in pieces over a period's entries, since a field has one width for every step.
        memory = joined_memory(data["memory"][:, : layout.period], self.memory_size, self._device)
        action, ended = data["action"][rows, places], data["ended"][rows, places]
        learned = ended[layout.burn_in + 1 :]  # of the steps from these times on
        starts = data["ended"][:, 0] != RUNNING
        return Sequences(
            self._observations(data["obs"], rows, entries),
            action if self._spec.actions.reals else action.long(),
            data["reward"][rows, places],
            (entries == 0) & starts | (ended == BETWEEN) & (entries > 0),
            memory,
            ended == TERMINATED,
            (times < lengths - 1) & (learned == RUNNING),
            (times < lengths) & (learned != BETWEEN),
        )

    def _tensor(self, array: np.ndarray | Tensor) -> Tensor:
        return on_device(array, self._device)

    def _observations(self, obs: Tensor, rows: Tensor, entries: Tensor) -> Tensor:
        """Observations `[N, B, *obs_shape]` at these entries `[N, B]`, stacked from single frames."""
        stack = self._spec.stack
        if not stack:
            return obs[rows, entries.clamp(0, obs.shape[1] - 1)]
        times = torch.arange(len(entries) + stack - 1, device=obs.device)[:, None] + entries[0]
        frames = obs[rows, times.clamp(0, obs.shape[1] - 1)]
        # Nothing of another episode is among them: where one begins, its whole first stack is stored.
        whole = torch.full(entries.shape, stack, dtype=torch.uint8, device=obs.device)
        return stacked(frames, whole, stack)
