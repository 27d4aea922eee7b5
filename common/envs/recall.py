"""A memory task: a cue is seen once, and asked for again and again.

`troupe.common.envs.recall:Recall-v0`, registered with Gymnasium when this module is imported. Without memory
nothing is better than always giving the same answer: a mean return of one over the number of cues.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from troupe.common.envs.registration import register_env

ID = "Recall-v0"


class RecallEnv(gymnasium.Env):
    """Episodes of `1 + questions * (delay + 1)` steps: the cue; `delay` blanks and a question, repeatedly.

    An observation is float32 `[cues + 1]`: the cue, one-hot, in the first step only, and a flag that is 1
    where the answer is asked for. The answer is the action with the number of the cue; a right one earns
    `1 / questions`, so that the best return is 1. What is done at other times makes no difference.
    """

    def __init__(self, cues: int = 4, delay: int = 6, questions: int = 3) -> None:
        if min(cues, questions) < 1 or delay < 0:
            raise ValueError("cues and questions should be at least 1, delay at least 0")
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(cues)
        self._cues, self._delay, self._questions = cues, delay, questions
        self._cue = self._time = 0

    def _asks(self) -> bool:
        return self._time > 0 and self._time % (self._delay + 1) == 0

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self._cues + 1, np.float32)
        if self._time == 0:
            obs[self._cue] = 1.0
        obs[-1] = self._asks()
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Draw a cue and show it."""
        super().reset(seed=seed)
        self._cue, self._time = int(self.np_random.integers(self._cues)), 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Rewards a right answer; terminates with the last question."""
        reward = float(self._asks() and action == self._cue) / self._questions
        over = self._time == self._questions * (self._delay + 1)
        self._time += 1
        return self._obs(), reward, over, False, {}


register_env(ID, RecallEnv)
