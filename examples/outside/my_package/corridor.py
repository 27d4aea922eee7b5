"""An environment of one's own: `my_package.corridor:Corridor-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from troupe import register_env


class CorridorEnv(gymnasium.Env):
    """A corridor of `length` places, entered on the left; each step costs, and the right end pays 1.

    An observation is float32 `[length]`, one-hot: the place. Actions: 0 goes left, 1 right.
    """

    def __init__(self, length: int = 8) -> None:
        if length < 2:
            raise ValueError("length should be at least 2")
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._length, self._place = length, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Enters the corridor."""
        super().reset(seed=seed)
        self._place = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Goes one place; the episode terminates at the right end."""
        self._place = max(0, self._place + (1 if action else -1))
        over = self._place == self._length - 1
        return self._obs(), 1.0 if over else -0.01, over, False, {}

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self._length, np.float32)
        obs[self._place] = 1.0
        return obs


register_env("Corridor-v0", CorridorEnv, max_episode_steps=100)
