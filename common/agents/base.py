"""What an algorithm must provide, and nothing about any one of them.

The services move chunks, parameters and metrics; whatever differs between algorithms is behind these classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from troupe.common.data.schema import Chunk, FieldSpec, SlotStep
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec

if TYPE_CHECKING:
    from torch import Tensor

    from troupe.common.envs import EnvSpec


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the network may look at in `S` slots, to act or to value; kept by what steps them."""

    obs: np.ndarray
    """`[S, *obs_shape]`."""
    last_action: np.ndarray
    """`[S, *actions.shape]`, done just before; arbitrary where `first`."""
    last_reward: np.ndarray
    """`[S]` float32, got just before; arbitrary where `first`."""
    first: np.ndarray
    """`[S]` bool, an episode begins with this observation: the agent forgets its memory."""
    memory: np.ndarray
    """`[S, memory_size]` float32, the agent's recurrent state; only the agent knows what is in it."""

    @classmethod
    def start(cls, obs: np.ndarray, memory_size: int, actions: ActionSpec) -> Inputs:
        """Inputs of slots that all begin an episode at `obs` `[S, *obs_shape]`."""
        slots = len(obs)
        return cls(
            obs,
            actions.zeros(slots),
            np.zeros(slots, np.float32),
            np.ones(slots, bool),
            np.zeros((slots, memory_size), np.float32),
        )

    def after(self, act: Act, obs: np.ndarray, reward: np.ndarray, ended: np.ndarray) -> Inputs:
        """Inputs after a step.

        Args:
            act: what was done.
            obs: `[S, *obs_shape]`, where it led; the first observation of the next episode where one `ended`.
            reward: `[S]` float32.
            ended: `[S]` bool.
        """
        # Not reset where an episode ended: `first` tells the network to, in acting and in learning alike.
        memory = self.memory if act.memory is None else act.memory
        return Inputs(obs, act.action, reward, ended, memory)

    def rows(self, slots: Sequence[int] | np.ndarray) -> Inputs:
        """The inputs of these slots only."""
        return Inputs(*(part[slots] for part in self._parts()))

    @staticmethod
    def joined(several: Sequence[Inputs]) -> Inputs:
        """The slots of all of these, in their order."""
        # Central inference joins groups for every forward; with one group there is nothing to copy.
        if len(several) == 1:
            return several[0]
        return Inputs(*map(np.concatenate, zip(*(inputs._parts() for inputs in several), strict=True)))

    def _parts(self) -> tuple[np.ndarray, ...]:
        return self.obs, self.last_action, self.last_reward, self.first, self.memory


@dataclass(frozen=True, slots=True)
class Act:
    """Result of one batched forward over `S` slots."""

    action: np.ndarray
    """`[S, *actions.shape]`: rows of `troupe.common.spaces.ActionSpec`."""
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What the agent's accumulator also wants to know about each slot's step: arrays `[S, ...]`."""
    memory: np.ndarray | None = None
    """`[S, memory_size]` float32, the recurrent state after the step; None where it has not changed."""

    def rows(self, slots: slice) -> Act:
        """What was chosen in these slots only; shares memory."""
        extras = {name: array[slots] for name, array in self.extras.items()}
        return Act(self.action[slots], extras, None if self.memory is None else self.memory[slots])

    def extras_by_slot(self) -> list[dict[str, Any]]:
        """The extras of each slot: a Python number of each array `[S]`, a row of every other."""
        # `tolist` makes Python numbers of a whole column at once; indexing `[slot]` costs a numpy scalar each
        # time.
        columns = [array.tolist() if array.ndim == 1 else list(array) for array in self.extras.values()]
        if not columns:
            return [{} for _ in range(len(self.action))]
        return [dict(zip(self.extras, row, strict=True)) for row in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class Batch:
    """What an update learns from: `B` items, and what it may want to know of them."""

    fields: dict[str, np.ndarray]
    """By name, `[B, window, ...]`."""
    weights: np.ndarray
    """`[B]` float32, importance weights."""
    lengths: np.ndarray | None = None
    """`[B]`, steps of each item: behind them a window repeats its last entry. None: all fill the window."""
    replayed: np.ndarray | None = None
    """`[B]` bool, the rows of tables that give an item more than once, where batches mix these with a queue;
    None: no row is. Only algorithms whose configuration says `TableNeeds.replays` get such batches."""
    progress: float = 0.0
    """The share of the run that is done, 0 to 1, for what decays: by the steps that were learned from before,
    or, where a table gives steps again or a queue drops some, by all that were made."""
    measure: bool = True
    """Whether metrics are wanted: reading one from a GPU waits for everything before it."""
    placed: Mapping[str, Tensor] = field(default_factory=dict)
    """Fields that are on the learner's device already, as a copy, or come there before what is computed
    next."""


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one learning step on a batch of `B` items."""

    priorities: np.ndarray | None
    """`[B]` float64, finite and above 0; None where the algorithm gives no priorities."""
    metrics: dict[str, float]
    """Scalars for the log by name, `learner/...`; empty unless they were asked for."""

    def settled(self) -> Update:
        """See `Pending`: there is nothing to wait for."""
        return self


class Pending(Protocol):
    """An `Update` that a GPU may be at. The state of the agent is that after it: whoever reads it waits."""

    def settled(self) -> Update:
        """Waits for it, with what it found."""


def check_returned(agent: Agent, method: str, result: object, kind: type[Act | Update]) -> None:
    """Refuse what a method of an algorithm of somebody's own must not return."""
    if not isinstance(result, kind):
        module, name = type(agent).__module__, type(agent).__qualname__
        raise ConfigError(
            f"{module}.{name}.{method} returned a {type(result).__name__}, and not a "
            f"{kind.__module__}.{kind.__name__}"
        )


class Featured(Protocol):
    """An agent that stores features of each step, and can say what they would be now."""

    def features(self, fields: Mapping[str, np.ndarray | Tensor]) -> np.ndarray:
        """What the present network makes of the steps of items `[B, window, ...]`: `[B, T, F]` float32."""

    def distances(self, stored: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """How far `stored` features `[B, T, F]` are from `fresh` ones: `[B]` float64, 0 for the same."""


class Accumulator(Protocol):
    """Turns the steps of one slot into chunks."""

    def start(self, obs: np.ndarray) -> None:
        """Begins an episode at `obs`."""

    def add(self, step: SlotStep) -> list[Chunk]:
        """Appends a step and returns the chunks that it completed."""

    def discard(self) -> list[Chunk]:
        """Forgets what must not be linked to what comes next; returns what is complete. `start` follows."""

    def flush(self) -> list[Chunk]:
        """Returns what can be inserted of the running episode."""


class Agent(Protocol):
    """One algorithm: how it acts, what it stores, how it learns. Its `AgentConfig` says from which table.

    The generators of the process, torch's and numpy's, are left as they are: other agents live in it.
    """

    spec: EnvSpec
    """Of the environments that it is for."""
    fields: tuple[FieldSpec, ...]
    """What a chunk holds, and within which bounds `update` can learn from it."""
    item_steps: tuple[int, int]
    """Steps of the shortest and of the longest item that `update` can learn from."""
    memory_size: int
    """Width of the recurrent state; 0 without one."""
    eval_epsilon: float
    """Exploration of the evaluator."""

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Exploration `[S]` float32 of the slots with these indices among all `total_slots` of the run."""

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Chooses actions; explores with chance `epsilon` `[S]`, else does what it thinks best.

        What exploring means is up to the algorithm: any action alike, or one drawn from its policy.
        """

    def values(self, inputs: Inputs) -> np.ndarray:
        """The best value `[S]` float32 of these inputs, for truncated episodes' ends."""

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> Accumulator:
        """A new accumulator for one slot with chunks of `chunk_steps` steps, if the algorithm has no say.

        `phase` in [0, 1) is the share of a chunk by which this slot's should lie behind those of a slot with
        phase 0. It counts where chunks are learned from as they come: were all complete in the same step,
        most would wait, and be old. What is replayed may ignore it.
        """

    def params(self) -> dict[str, np.ndarray]:
        """What acting needs, by name; the arrays may be views of live weights."""

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        """Takes over what `params` gave; `ConfigError` if names or shapes differ."""

    def update(self, batch: Batch) -> Update:
        """Learns from a batch.

        `B` may change from one update to the next: items that do not keep to `fields` and `item_steps` are
        left out before. What is drawn comes from a generator of the agent's own, which is part of `state`.
        """

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything that resuming needs: arrays, which are copies, and values that JSON can hold."""

    def load_state(
        self, arrays: dict[str, np.ndarray], meta: dict[str, Any], *, to_learn: bool = True
    ) -> None:
        """Takes over what `state` gave, or only what acting needs; `CheckpointError` if it does not fit."""
