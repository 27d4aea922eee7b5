"""An environment in which who never tries another action takes little and misses much."""

from __future__ import annotations

import gymnasium
import numpy as np


class LureEnv(gymnasium.Env):
    """A way of `length` places. Action 0 pays 0.1 and ends the episode, 1 goes on; the last place pays 1."""

    def __init__(self, length: int = 4) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._place = length, 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        if action == 0:
            return self._obs(), 0.1, True, False, {}
        self._place += 1
        there = self._place == self._length
        return self._obs(), float(there), there, False, {}

    def _obs(self) -> np.ndarray:
        return np.eye(self._length, dtype=np.float32)[min(self._place, self._length - 1)]


gymnasium.register("Lure-v0", LureEnv, disable_env_checker=True)
