"""A number is said once and asked for later: what a policy of real numbers can do only with memory."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from troupe.common.envs.registration import register_env

SAID = 0.7


class SaidEnv(gymnasium.Env):
    """Three steps: 0.7 or -0.7 is shown, then nothing, then it is asked for; an error costs its square.

    Who has forgotten sees the same either way, and earns -0.49 at best, the variance of what was said.
    """

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Say a number."""
        super().reset(seed=seed)
        self._said, self._time = SAID * self.np_random.choice([-1, 1]), 0
        return np.array([self._said, 0.0], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        """The last of three is judged."""
        self._time += 1
        reward = -float((action[0] - self._said) ** 2) if self._time == 3 else 0.0
        return np.array([0.0, self._time == 2], np.float32), reward, self._time == 3, False, {}


register_env("Said-v0", SaidEnv)
