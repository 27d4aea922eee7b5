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


class PictureEnv(gymnasium.Env):
    """Pictures in any form: a bright left half and a dark right half, and a top row at the highest value."""

    def __init__(
        self, shape: tuple[int, ...] = (40, 48, 3), dtype: str = "uint8", high: float = 255, nested: str = ""
    ) -> None:
        self._box = gymnasium.spaces.Box(0, high, tuple(shape), np.dtype(dtype).type)
        self._nested = nested
        self.observation_space = self._box
        if nested == "dict":
            self.observation_space = gymnasium.spaces.Dict(
                camera=self._box, speed=gymnasium.spaces.Discrete(3)
            )
        elif nested == "tuple":
            self.observation_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3), self._box])
        self.action_space = gymnasium.spaces.Discrete(2)

    def _obs(self) -> Any:
        high, shape = self._box.high.flat[0], self._box.shape
        picture = np.zeros(shape, self._box.dtype)
        first = len(shape) == 3 and shape[2] not in (1, 3)
        rows, columns = (1, 2) if first else (0, 1)
        left = [slice(None)] * len(shape)
        left[columns] = slice(shape[columns] // 2)
        picture[tuple(left)] = high * 0.8
        top = [slice(None)] * len(shape)
        top[rows] = slice(8)
        picture[tuple(top)] = high
        return {"dict": {"camera": picture, "speed": 1}, "tuple": (1, picture)}.get(self._nested, picture)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        return self._obs(), 1.0, False, False, {}


gymnasium.register("Picture-v0", entry_point=PictureEnv)
