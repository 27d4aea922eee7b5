"""What an algorithm must provide, and nothing about any one of them.

The services move chunks, parameters and metrics; whatever differs between algorithms is behind these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from common.data.fields import Chunk, FieldSpec


@dataclass(frozen=True, slots=True)
class Act:
    """Result of one batched forward over `S` slots."""

    action: np.ndarray
    """`[S]` int64."""
    value_taken: np.ndarray
    """`[S]` float32, value of the chosen action."""
    value_max: np.ndarray
    """`[S]` float32, value of the best action."""


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one learning step on a batch of `B` items."""

    priorities: np.ndarray
    """`[B]` float64, finite and above 0."""
    metrics: dict[str, float]
    """Scalars for the log; empty unless they were asked for."""


class Accumulator(Protocol):
    """Turns the steps of one slot into chunks."""

    def start(self, obs: np.ndarray) -> None:
        """Begins an episode at `obs`."""

    def add(
        self,
        action: int,
        reward: float,
        value_taken: float,
        value_max: float,
        next_obs: np.ndarray,
        terminated: bool,
        truncated: bool,
        final_value: float = 0.0,
        version: int = 0,
    ) -> list[Chunk]:
        """Appends a step and returns the chunks that it completed."""

    def flush(self) -> list[Chunk]:
        """Returns what can be inserted of the running episode."""


class Agent(Protocol):
    """One algorithm: how it acts, what it stores and how it learns."""

    fields: tuple[FieldSpec, ...]
    """What a chunk holds."""
    eval_epsilon: float
    """Exploration of the evaluator."""

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Exploration `[S]` float32 of the slots with these indices among all `total_slots` of the run."""

    def act(self, obs: np.ndarray, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Chooses actions for observations `[S, *obs_shape]`, at random with chance `epsilon` `[S]`."""

    def values(self, obs: np.ndarray) -> np.ndarray:
        """The best value `[S]` float32 at observations `[S, *obs_shape]`, for truncated episodes' ends."""

    def accumulator(self, chunk_steps: int) -> Accumulator:
        """A new accumulator for one slot with chunks of `chunk_steps` steps."""

    def params(self) -> dict[str, np.ndarray]:
        """What acting needs, by name; the arrays may be views of live weights."""

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        """Takes over what `params` gave; `ConfigError` if names or shapes differ."""

    def update(self, batch: dict[str, np.ndarray], weights: np.ndarray, want_metrics: bool = True) -> Update:
        """Learns from fields `[B, window, ...]` with importance weights `[B]` float32."""

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Everything that resuming needs: arrays, and values that JSON can hold."""

    def load_state(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Takes over what `state` gave; `CheckpointError` if it does not fit."""
