"""Small tasks in which learning can be made to fail."""

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from troupe import register_env

ROWS, COLUMNS = 6, 5


class Catch(gymnasium.Env):
    """A ball falls straight through 6 x 5 cells; the reward is `scale` if it is caught, else minus that.

    The reward comes `delay` steps after the ball is down, while nothing can be done; what is lit is `bright`.
    """

    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self, delay=0, scale=1.0, bright=1.0):
        self._delay, self._scale, self._bright = delay, scale, bright
        self.observation_space = gymnasium.spaces.Box(0.0, bright, (ROWS * COLUMNS + 1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps, self._paddle = 0, COLUMNS // 2
        self._ball = int(self.np_random.integers(COLUMNS))
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        if self._steps < ROWS:
            self._paddle = min(max(self._paddle + int(action) - 1, 0), COLUMNS - 1)
        over = self._steps >= ROWS - 1 + self._delay
        reward = self._scale if self._ball == self._paddle else -self._scale
        return self._observe(), reward if over else 0.0, over, False, {}

    def _observe(self):
        cells = np.zeros((ROWS, COLUMNS), np.float32)
        cells[-1, self._paddle] = self._bright
        cells[min(self._steps, ROWS - 1), self._ball] = self._bright
        left = self._bright * self._steps / (ROWS - 1 + self._delay)
        return np.append(cells.ravel(), np.float32(left))


class Timed(PendulumEnv):
    """Pendulum whose limit of 200 steps is told as the end of the task."""

    def reset(self, *, seed=None, options=None):
        self._steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        self._steps += 1
        return obs, reward, self._steps >= 200, truncated, info


register_env("Catch-v0", Catch)
register_env("Timed-v0", Timed)
