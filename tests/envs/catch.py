"""A ball falls slantwise through a picture, and a paddle below has to be where it comes down."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

CELLS = 7
CELL_PIXELS = 6
SIDE = CELLS * CELL_PIXELS


class CatchEnv(gymnasium.Env):
    """Pictures uint8 `[42, 42]` of 7 x 7 cells. Actions: left, stay, right.

    An episode is one ball: six steps without reward, then 1 if it is caught, else -1. Where it will come down
    shows in its movement only, so in no single picture. What is done at random catches about one in four.
    """

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (SIDE, SIDE), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._row = self._column = self._slant = self._paddle = 0

    def _obs(self) -> np.ndarray:
        cells = np.zeros((CELLS, CELLS), np.uint8)
        cells[self._row, self._column] = 255
        cells[-1, self._paddle] = 128
        return cells.repeat(CELL_PIXELS, 0).repeat(CELL_PIXELS, 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A ball somewhere in the top row, the paddle in the middle of the bottom."""
        super().reset(seed=seed)
        self._row, self._paddle = 0, CELLS // 2
        self._column = int(self.np_random.integers(CELLS))
        self._slant = int(self.np_random.choice([-1, 0, 1]))
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Moves paddle and ball by a cell; the ball comes back from the walls."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), CELLS - 1)
        if not 0 <= self._column + self._slant < CELLS:
            self._slant = -self._slant
        self._row, self._column = self._row + 1, self._column + self._slant
        over = self._row == CELLS - 1
        reward = (1.0 if self._column == self._paddle else -1.0) if over else 0.0
        return self._obs(), reward, over, False, {}


gymnasium.register("Catch-v0", entry_point=CatchEnv)
