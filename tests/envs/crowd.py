"""Games of several agents with PettingZoo's parallel interface, which need no package."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np

Stay = tuple[int, int, str]
"""From which step to which step of the game an agent is in it, and how it leaves."""
GAMES: tuple[tuple[Stay, ...], ...] = (
    ((0, 5, "terminated"), (0, 2, "terminated"), (1, 7, "truncated")),
    ((0, 4, "terminated"), (0, 4, "terminated"), (0, 4, "truncated")),
    ((2, 3, "truncated"), (0, 9, "terminated"), (0, 1, "terminated")),
)
"""Agents that leave before others and together, and that come later."""


class Crowd:
    """Agents `a_0`, `a_1`, `b_0` of three games that take turns; what happened is in `Crowd.seen`.

    An observation is (copy, game, step, agent, last action or -1, 0): no two are alike. With `fail_at`, a
    step of a game of the first copy raises.
    """

    copies: ClassVar[int] = 0
    seen: ClassVar[list[tuple[Any, ...]]] = []
    """Observation, action, reward, next observation, terminated, truncated, of every step of an agent."""
    metadata: ClassVar[dict[str, Any]] = {"render_fps": 7}

    def __init__(self, fail_at: tuple[int, int] | None = None, short: int = 0, copy: int = -1) -> None:
        self.possible_agents = ["a_0", "a_1", "b_0"]
        self.agents: list[str] = []
        self._copy, Crowd.copies = (Crowd.copies if copy < 0 else copy), Crowd.copies + 1
        self._game, self._fail_at, self._short = -1, fail_at if self._copy == 0 else None, short

    def observation_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Box(-9e9, 9e9, (6 - self._short * (agent == "b_0"),), np.float32)

    def action_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Discrete(4)

    def _observations(self) -> dict[str, np.ndarray]:
        found = {}
        for place, name in enumerate(self.possible_agents):
            row = [self._copy, self._game, self._t, place, self._last.get(name, -1), 0]
            found[name] = np.array(row, np.float32)[: self.observation_space(name).shape[0]]
        return found

    def _present(self) -> list[str]:
        stays = GAMES[self._game % len(GAMES)]
        return [
            name
            for name, (come, leave, _) in zip(self.possible_agents, stays, strict=True)
            if come <= self._t < leave
        ]

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        self._game, self._t = self._game + 1, 0
        self._last: dict[str, int] = {}
        self.agents = self._present()
        self._shown = self._observations()
        return {name: self._shown[name] for name in self.agents}, {name: {} for name in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        assert set(actions) == set(self.agents), "who is not in the game does not act"
        assert all(0 <= action < 4 for action in actions.values())
        if (self._game, self._t) == self._fail_at:
            raise RuntimeError("the game crashed")
        before, acted = self._shown, self.agents
        self._t += 1
        self._last = {name: int(action) for name, action in actions.items()}
        self._shown = self._observations()
        stays = dict(zip(self.possible_agents, GAMES[self._game % len(GAMES)], strict=True))
        self.agents = self._present()
        told: tuple[dict, ...] = ({}, {}, {}, {}, {})
        for name in acted:
            over = stays[name][1] == self._t
            ends = [over and stays[name][2] == how for how in ("terminated", "truncated")]
            reward = float(self._t + 10 * self.possible_agents.index(name) + 100 * self._last[name])
            values = (self._shown[name], reward, *ends, {"left_at": self._t})
            for table, value in zip(told, values, strict=True):
                table[name] = value
            row = (before[name], self._last[name], reward, self._shown[name], *ends)
            Crowd.seen.append(tuple(tuple(x.tolist()) if isinstance(x, np.ndarray) else x for x in row))
        for name in self.agents:
            told[0].setdefault(name, self._shown[name])  # who comes only sees
        return told  # type: ignore[return-value]

    def close(self) -> None:
        pass


class Pair:
    """Two agents see a cue, which the first should answer with and the second should not.

    Both earn the share of right answers. The second leaves after 1 to 4 of 6 steps, the first answers on.
    """

    def __init__(self) -> None:
        self.possible_agents = ["first", "second"]
        self.agents: list[str] = []
        self._rng = np.random.default_rng(0)

    def observation_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Box(0, 1, (4,), np.float32)

    def action_space(self, agent: str) -> gymnasium.Space:
        return gymnasium.spaces.Discrete(2)

    def _see(self) -> dict[str, np.ndarray]:
        self._cue = int(self._rng.integers(2))
        rows = np.eye(4, dtype=np.float32)
        return {name: rows[2 * (name == "second") + self._cue] for name in self.possible_agents}

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self.agents, self._t = list(self.possible_agents), 0
        self._leaves = int(self._rng.integers(1, 5))
        return self._see(), {}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        acted, self._t = self.agents, self._t + 1
        right = [actions[name] == (self._cue + (name == "second")) % 2 for name in acted]
        ends = {name: self._t == (6 if name == "first" else self._leaves) for name in acted}
        self.agents = [name for name in acted if not ends[name]]
        seen = self._see()
        return (
            {name: seen[name] for name in acted},
            dict.fromkeys(acted, sum(right) / len(right)),
            ends,
            dict.fromkeys(acted, False),
            {},
        )

    def close(self) -> None:
        pass
