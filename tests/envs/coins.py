"""A game of two: who reaches a coin on a line first earns it, and another one is thrown."""

from __future__ import annotations

import gymnasium
import numpy as np

CELLS, STEPS = 9, 30


class Coins:
    """Players `player_0` and `player_1` see how far the coin and the other player are, in cells.

    Moves are left, stay, right. Who comes to the coin alone earns 1; if both come, each earns 0.5. With
    `first_wins`, `player_0` earns 100 more at the end, whatever happens.
    """

    def __init__(self, first_wins: bool = False) -> None:
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        self._first_wins, self._rng = first_wins, np.random.default_rng(0)

    def observation_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Box(-CELLS, CELLS, (2,), np.float32)

    def action_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Discrete(3)

    def _see(self) -> dict[str, np.ndarray]:
        rows = zip(self._coin - self._at, self._at[::-1] - self._at, strict=True)
        return {name: np.array(row, np.float32) for name, row in zip(self.possible_agents, rows, strict=True)}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._t = list(self.possible_agents), 0
        self._at, self._coin = self._rng.integers(CELLS, size=2), int(self._rng.integers(CELLS))
        return self._see(), {}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        moves = np.array([actions[name] - 1 for name in self.possible_agents])
        self._at, self._t = np.clip(self._at + moves, 0, CELLS - 1), self._t + 1
        here = self._at == self._coin
        rewards = here / max(1, here.sum())
        if here.any():
            self._coin = int(self._rng.integers(CELLS))
        over = self._t == STEPS
        rewards[0] += 100 * (self._first_wins and over)
        self.agents = [] if over else self.agents
        names = self.possible_agents
        earned = dict(zip(names, rewards.tolist(), strict=True))
        return self._see(), earned, dict.fromkeys(names, over), dict.fromkeys(names, False), {}

    def close(self) -> None:
        pass
