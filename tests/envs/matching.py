"""What is shown is to be done: tasks of one step, for every kind of action and observation.

Everything is scored in the environment's own terms, so that an agent gets nowhere if a part of its actions or
of what it sees is lost, swapped or scaled on the way.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTIONS: dict[str, spaces.Space] = {
    "box": spaces.Box(np.array([-2.0, 10.0], np.float32), np.array([2.0, 30.0], np.float32)),
    "multi": spaces.MultiDiscrete([3, 4]),
    "tuple": spaces.Tuple(
        [
            spaces.Discrete(3, start=-1),
            spaces.Box(np.array([0.0, -5.0]), np.array([1.0, 5.0]), dtype=np.float64),
        ]
    ),
    "dict": spaces.Dict({"go": spaces.MultiBinary(2), "far": spaces.Box(-np.inf, np.inf, (1,), np.float32)}),
}
SHOWN = spaces.Dict(
    {
        "column": spaces.Box(0, 255, (36, 36, 1), np.uint8),
        "pair": spaces.Tuple([spaces.Discrete(3, start=2), spaces.MultiBinary(2)]),
        "height": spaces.Box(-100.0, 100.0, (1,), np.float64),
    }
)


def score(space: spaces.Space, done: Any, wanted: Any) -> float:
    """From 0 to 1, the mean over parts: whether a choice was right, how near a number was."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        assert type(done) is type(wanted) or isinstance(wanted, dict)
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        return float(np.mean([score(space[key], done[key], wanted[key]) for key in keys]))
    assert space.contains(done), (space, done)
    if isinstance(space, spaces.Box):
        half = np.where(space.bounded_below, (space.high - space.low) / 2.0, 2.0)
        return float(np.mean(np.maximum(0.0, 1.0 - np.abs(done - wanted) / half)))
    return float(np.mean(np.asarray(done) == np.asarray(wanted)))


class MatchEnv(gymnasium.Env):
    """Shows an action, drawn at random and written as numbers from -1 to 1; doing it earns 1."""

    def __init__(self, actions: str) -> None:
        self.action_space = ACTIONS[actions]
        self.action_space.seed(0)
        size = spaces.flatdim(self.action_space)
        self.observation_space = spaces.Box(-10.0, 10.0, (size,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Another action."""
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self._wanted = self.action_space.sample()
        return np.array(self._shown(self.action_space, self._wanted), np.float32), {}

    def _shown(self, space: spaces.Space, wanted: Any) -> list[float]:
        if isinstance(space, spaces.Tuple | spaces.Dict):
            keys = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
            return [number for key in keys for number in self._shown(space[key], wanted[key])]
        if isinstance(space, spaces.Box) and space.is_bounded():
            return list((wanted - space.low) / (space.high - space.low) * 2.0 - 1.0)
        return list(spaces.flatten(space, wanted))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """The episode is over."""
        reward = score(self.action_space, action, self._wanted)
        return np.zeros(self.observation_space.shape, np.float32), reward, True, False, {}


class ReadEnv(gymnasium.Env):
    """Shows a nest of parts of every kind; to be said is what each of them holds, a quarter for each.

    Which third of the picture is bright, the symbol, whether both bits differ, whether the number is high.
    """

    def __init__(self) -> None:
        self.observation_space = SHOWN
        self.action_space = spaces.MultiDiscrete([3, 3, 2, 2])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        """Other things to see."""
        super().reset(seed=seed)
        third, symbol = self.np_random.integers(3, size=2).tolist()
        bits = self.np_random.integers(2, size=2).astype(np.int8)
        height = self.np_random.uniform(-100.0, 100.0, 1)
        picture = self.np_random.integers(60, size=(36, 36, 1)).astype(np.uint8)
        picture[:, 12 * third : 12 * third + 12] += 150
        self._wanted = np.array([third, symbol, bits[0] != bits[1], height[0] > 0])
        return {"column": picture, "pair": (np.int64(symbol + 2), bits), "height": height}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """The episode is over."""
        reward = float(np.mean(action == self._wanted))
        return self.reset()[0], reward, True, False, {}


class ToldEnv(ReadEnv):
    """The same things to see; of the answers only the symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        """The episode is over."""
        return super().step(np.array([0, action, 0, 0]))


gymnasium.register("Told-v0", entry_point=ToldEnv)
gymnasium.register("Match-v0", entry_point=MatchEnv)
gymnasium.register("Read-v0", entry_point=ReadEnv)
