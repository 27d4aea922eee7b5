"""Keeps what happens in whole games, step by step, for a data set."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from troupe.common.datasets.trajectory import Trajectory
from troupe.common.envs import Step


class Tape:
    """Gathers the steps of every slot, and hands each game on when it ends."""

    def __init__(self, on_trajectory: Callable[[Trajectory], None]) -> None:
        self._on_trajectory = on_trajectory
        self._obs: list[list[np.ndarray]] = []
        self._actions: list[list[np.ndarray]] = []
        self._rewards: list[list[float]] = []

    def begin(self, obs: np.ndarray) -> None:
        """Every slot begins a game at `obs` `[S, ...]`."""
        self._obs = [[each.copy()] for each in obs]
        self._actions = [[] for _ in obs]
        self._rewards = [[] for _ in obs]

    def add(self, actions: np.ndarray, step: Step, slots: Collection[int]) -> None:
        """Take one step of these slots, whose games count."""
        for slot in slots:
            # Its environment failed, or its agent was away: nothing leads on from what was.
            if slot in step.discarded or slot in step.idle:
                self._restart(slot, step.obs[slot])
                continue
            ended = bool(step.terminated[slot] or step.truncated[slot])
            self._actions[slot].append(actions[slot].copy())
            self._rewards[slot].append(float(step.reward[slot]))
            self._obs[slot].append((step.final_obs[slot] if ended else step.obs[slot]).copy())
            if ended:
                self._on_trajectory(
                    Trajectory(
                        np.stack(self._obs[slot]),
                        np.stack(self._actions[slot]),
                        np.array(self._rewards[slot], np.float64),
                        bool(step.terminated[slot]),
                    )
                )
                self._restart(slot, step.obs[slot])

    def _restart(self, slot: int, obs: np.ndarray) -> None:
        self._obs[slot], self._actions[slot], self._rewards[slot] = [obs.copy()], [], []
