"""Environments whose observation says which episode and step it belongs to, and that fail when told to."""

from __future__ import annotations

import itertools
import os
from typing import Any, ClassVar

import gymnasium
import numpy as np

_COPIES = itertools.count()


class CountingEnv(gymnasium.Env):
    """Observation is (episode, t). Ends after `length` steps, by `ends_by` termination or truncation.

    With `signed` the observation says as well which process and which copy made it: (episode, t, pid, copy).
    """

    def __init__(
        self,
        length: int = 5,
        ends_by: str = "termination",
        reward: float = 2.5,
        fail_at: tuple[int, int] | None = None,
        fail_always: bool = False,
        start: int = 0,
        signed: bool = False,
    ) -> None:
        self._signature = [os.getpid(), next(_COPIES)] if signed else []
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (2 + len(self._signature),), np.float64)
        self.action_space = gymnasium.spaces.Discrete(3, start=start)
        self._length, self._ends_by, self._reward = length, ends_by, reward
        self._fail_at, self._fail_always = fail_at, fail_always
        self._episode, self._t = -1, 0

    def _obs(self) -> np.ndarray:
        return np.array([self._episode, self._t, *self._signature], np.float64)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._episode += 1
        self._t = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        if self._fail_always or (self._episode, self._t) == self._fail_at:
            raise RuntimeError("the emulator\ncrashed")
        self._t += 1
        over = self._t >= self._length
        terminated, truncated = (
            over and self._ends_by == "termination",
            over and self._ends_by == "truncation",
        )
        return self._obs(), self._reward, terminated, truncated, {}


class ColourEnv(gymnasium.Env):
    """Pictures 96 x 64 whose grey level is the time step."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Box(0, 255, (96, 64, 3), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._t = 0

    def _obs(self) -> np.ndarray:
        return np.full((96, 64, 3), 10 + self._t, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._t = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._t += 1
        return self._obs(), 1.0, self._t >= 6, False, {}

    def render(self) -> np.ndarray:
        return self._obs()


gymnasium.register("Counting-v0", entry_point=CountingEnv, disable_env_checker=True, order_enforce=False)
gymnasium.register("Colour-v0", entry_point=ColourEnv, disable_env_checker=True)
