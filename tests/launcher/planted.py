"""An environment whose cost and pictures are chosen, for runs with a planted bottleneck."""

import os
import time

import gymnasium
import numpy as np

from troupe import register_env


class Planted(gymnasium.Env):
    """Pays 1 for the action that its first number names; a step may sleep, and its picture may be noise."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, picture=0, noise_share=0.0, sleep_ms=0.0, episode_steps=100):
        self._sleep_s = float(os.environ.get("PLANTED_SLEEP_MS", sleep_ms)) / 1000
        self._picture, self._noise_share, self._episode_steps = picture, noise_share, episode_steps
        if picture:
            self.observation_space = gymnasium.spaces.Box(0, 255, (picture, picture, 1), np.uint8)
        else:
            self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action):
        if self._sleep_s:
            time.sleep(self._sleep_s)
        self._steps += 1
        reward = float(action == self._wanted)
        return self._observe(), reward, self._steps >= self._episode_steps, False, {}

    def _observe(self):
        if not self._picture:
            shown = self.np_random.uniform(-1, 1, 4).astype(np.float32)
            self._wanted = int(shown[0] > 0)
            return shown
        self._wanted = 0
        shown = np.zeros((self._picture, self._picture, 1), np.uint8)
        noise = self.np_random.integers(0, 256, shown.shape, np.uint8)
        rows = round(self._noise_share * self._picture)
        shown[:rows] = noise[:rows]
        return shown


register_env("Planted-v0", Planted)
