"""A game with Pong's picture: a small ball and paddles on a ground that is grey everywhere."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

SIDE = 42
GROUND, BALL, PADDLE = 87, 236, 147
BALL_PIXELS, PADDLE_WIDTH, PADDLE_HEIGHT = 2, 8, 3
STEPS, ROWS_PER_STEP = 10, 4


class GreyCatchEnv(gymnasium.Env):
    """Pictures uint8 `[42, 42]`. Actions: left, stay, right, six pixels at a time.

    A ball of 2 x 2 falls slantwise for ten steps and comes back from the walls; then the reward is 1 where it
    touches the paddle, else -1. What is done at random catches about one in five.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._time = self._ball = self._slant = self._paddle = 0

    def _obs(self) -> np.ndarray:
        picture = np.full((SIDE, SIDE), GROUND, np.uint8)
        picture[SIDE - PADDLE_HEIGHT :, self._paddle : self._paddle + PADDLE_WIDTH] = PADDLE
        row = ROWS_PER_STEP * self._time
        picture[row : row + BALL_PIXELS, self._ball : self._ball + BALL_PIXELS] = BALL
        return picture

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A ball somewhere at the top, the paddle in the middle below."""
        super().reset(seed=seed)
        self._time, self._paddle = 0, (SIDE - PADDLE_WIDTH) // 2
        self._ball = int(self.np_random.integers(SIDE - BALL_PIXELS + 1))
        self._slant = int(self.np_random.integers(-4, 5))
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves paddle and ball."""
        self._paddle = min(max(self._paddle + 6 * (int(action) - 1), 0), SIDE - PADDLE_WIDTH)
        if not 0 <= self._ball + self._slant <= SIDE - BALL_PIXELS:
            self._slant = -self._slant
        self._time, self._ball = self._time + 1, self._ball + self._slant
        over = self._time == STEPS
        caught = self._paddle - BALL_PIXELS < self._ball < self._paddle + PADDLE_WIDTH
        return self._obs(), (1.0 if caught else -1.0) if over else 0.0, over, False, {}


gymnasium.register("GreyCatch-v0", entry_point=GreyCatchEnv)
