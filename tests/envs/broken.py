"""An environment that breaks in the way and at the step that it is told."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np

COPIES = itertools.count()
NAN = float("nan")


class BrokenEnv(gymnasium.Env):
    """Three numbers, two actions, episodes of `length` steps; in step `at` of an episode it does `how`.

    With `copy` only that copy of the process breaks. `at` 0 is `reset`. With `chance` it is that part of all
    steps instead. `how` may have several words, separated by spaces: the first time is the first one's, and
    so on, over all copies in all processes that share the file `record`; the last one's are all others.
    """

    OBSERVATIONS: ClassVar[dict[str, Any]] = {
        "nan": np.array([0, NAN, NAN], np.float32),
        "inf": np.array([0, 1, np.inf], np.float32),
        "shape": np.zeros(4, np.float32),
        "scalar": 3.0,
        "dtype": np.array(["a", "b", "c"]),
        "none": None,
    }
    REWARDS: ClassVar[dict[str, Any]] = {
        "nan reward": NAN,
        "inf reward": np.float32(-np.inf),
        "none reward": None,
        "text reward": "much",
        "list reward": [1.0, 2.0],
    }

    def __init__(
        self,
        how: str = "",
        at: int = 3,
        length: int = 20,
        copy: int | None = None,
        chance: float = 0.0,
        record: str = "",
    ) -> None:
        self.observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        mine = next(COPIES)
        self._how = how if copy is None or copy == mine else ""
        self._at, self._length, self._t = at, length, 0
        self._record = record
        # Not the seed of reset(), with which a copy would fail at the same step after each of them.
        self._chance, self._random = chance, np.random.default_rng(mine)

    def _breaks(self) -> str:
        if self._chance:
            if not self._t or self._random.random() >= self._chance:
                return ""
        elif self._t != self._at:
            return ""
        how = self._turn() if self._record else self._how
        if how == "raise":
            raise RuntimeError("the physics\nexploded")
        if how == "exit":
            raise SystemExit(3)
        if how == "_exit":
            os._exit(3)
        if how == "abort":
            os.abort()
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "hang":
            time.sleep(10_000)
        if how == "interrupt":
            raise KeyboardInterrupt
        return how

    def _turn(self) -> str:
        # Unbuffered, to append and to know where is one step: two processes may break at the same moment.
        with open(self._record, "ab", buffering=0) as file:
            file.write(b".")
            before = file.tell() - 1
        words = self._how.split()
        return words[min(before, len(words) - 1)]

    def close(self) -> None:
        if self._how == "close":
            raise RuntimeError("the viewer\nhas gone")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        how = self._breaks()
        obs = self.OBSERVATIONS.get(how, np.zeros(3, np.float32))
        return obs if how == "old interface" else (obs, {})

    def step(self, action: int) -> Any:
        self._t += 1
        how = self._breaks()
        obs = self.OBSERVATIONS.get(how, np.full(3, self._t / 100, np.float64))
        terminated = None if how == "none terminated" else self._t >= self._length
        if how == "old interface":
            return obs, 1.0, terminated, {}
        return obs, self.REWARDS.get(how, 1.0), terminated, False, {}


gymnasium.register("Broken-v0", entry_point=BrokenEnv)
gymnasium.register("BrokenTimed-v0", entry_point=BrokenEnv, max_episode_steps=100)
