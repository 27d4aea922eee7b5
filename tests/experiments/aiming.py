"""An environment that is learned at a pace which the learning rate decides, and shows it without chance."""

from __future__ import annotations

import gymnasium
import numpy as np

SPOTS = (-0.4, 0.2, 0.4, -0.2)


class AimingEnv(gymnasium.Env):
    """An episode is one action in -1 to 1 at each of four places.

    It pays 1 on the spot and less with the squared distance: on average 0 for the action 0, -4 and less for
    those at the ends.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (len(SPOTS),), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._place = 0

    def _obs(self) -> np.ndarray:
        return np.eye(len(SPOTS), dtype=np.float32)[self._place % len(SPOTS)]

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place = 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = 1.0 - (float(action[0]) - SPOTS[self._place]) ** 2 / float(np.mean(np.square(SPOTS)))
        self._place += 1
        return self._obs(), reward, self._place == len(SPOTS), False, {}


gymnasium.register("Aiming-v0", AimingEnv, disable_env_checker=True)
