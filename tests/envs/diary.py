"""Episodes of random lengths, rewards and endings, in which every observation says which one it is."""

from __future__ import annotations

import itertools

import gymnasium
import numpy as np

_COPIES = itertools.count()


class DiaryEnv(gymnasium.Env):
    """Observation is (copy, count of its observations over all episodes). `ends` is a chance per step."""

    def __init__(self, ends: float = 0.25) -> None:
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._copy, self._number, self._ends = next(_COPIES), -1, ends

    def _obs(self) -> np.ndarray:
        self._number += 1
        return np.array([self._copy, self._number], np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """Another episode."""
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """A reward of a normal distribution; a termination as often as a truncation."""
        ended, terminated = self.np_random.random(2) < (self._ends, 0.5)
        reward = float(self.np_random.normal())
        return self._obs(), reward, bool(ended and terminated), bool(ended and not terminated), {}


gymnasium.register("Diary-v0", entry_point=DiaryEnv, disable_env_checker=True, order_enforce=False)
