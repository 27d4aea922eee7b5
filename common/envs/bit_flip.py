"""Bits to be flipped until they are as they should be: what hindsight is for.

`troupe.common.envs.bit_flip:BitFlip-v0`, registered with Gymnasium when this module is imported.
Andrychowicz et al. 2017, section 3.1.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from troupe.common.envs.registration import register_env

ID = "BitFlip-v0"


class BitFlipEnv(gymnasium.Env):
    """`bits` bits, of which an action flips one; each step costs 1 until all are as in the goal.

    An episode terminates there, without the cost of that step, and is truncated after `bits` steps. State and
    goal are drawn anew and differ. The best policy returns `1 - d` for `d` wrong bits.
    """

    def __init__(self, bits: int = 10) -> None:
        if bits < 1:
            raise ValueError("bits should be at least 1")
        parts = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict({name: spaces.MultiBinary(bits) for name in parts})
        self.action_space = spaces.Discrete(bits)
        self._bits, self._time = bits, 0
        self._state, self._goal = np.zeros(bits, np.int8), np.ones(bits, np.int8)

    def compute_reward(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict) -> float:
        """0 where the goal is reached, else -1."""
        return 0.0 if self.compute_terminated(achieved_goal, desired_goal, info) else -1.0

    def compute_terminated(self, achieved_goal: np.ndarray, desired_goal: np.ndarray, info: dict) -> bool:
        """Whether the goal is reached."""
        return bool((achieved_goal == desired_goal).all())

    def _obs(self) -> dict[str, np.ndarray]:
        shown = {"observation": self._state, "achieved_goal": self._state, "desired_goal": self._goal}
        return {name: array.copy() for name, array in shown.items()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draw a state, and a goal that is another."""
        super().reset(seed=seed)
        self._time = 0
        self._state = self.np_random.integers(2, size=self._bits).astype(np.int8)
        self._goal = self._state
        while (self._goal == self._state).all():
            self._goal = self.np_random.integers(2, size=self._bits).astype(np.int8)
        return self._obs(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Flip a bit."""
        # The array was handed out with the observation before.
        self._state = self._state.copy()
        self._state[action] ^= 1
        self._time += 1
        over = self.compute_terminated(self._state, self._goal, {})
        reward = self.compute_reward(self._state, self._goal, {})
        return self._obs(), reward, over, self._time == self._bits and not over, {}


register_env(ID, BitFlipEnv)
