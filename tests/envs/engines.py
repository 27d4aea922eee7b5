"""Stand-ins for engines that are not installed."""

import sys
import types
from typing import ClassVar

import numpy as np
import pytest

EPISODE_STEPS = 5


class FakeLab:
    """`deepmind_lab.Lab`: strict about types, and silent once an episode is over."""

    made: ClassVar[list] = []

    def __init__(self, level, observations, config=None, renderer="software", level_cache=None):
        assert type(observations) is list
        assert type(config) is dict
        assert all(type(text) is str for pair in config.items() for text in pair)
        self.level, self.names, self.config, self.cache = level, observations, config, level_cache
        self.seeds, self.left, self.drawn, self.closed = [], 0, 0, False
        self.last_action = None
        FakeLab.made.append(self)

    def reset(self, episode=-1, seed=None):
        if seed is not None and type(seed) is not int:
            raise ValueError(f"'seed' must be int or None, was '{type(seed).__name__}'.")
        self.seeds.append(seed)
        self.left = EPISODE_STEPS
        return True

    def step(self, action, num_steps=1):
        if action.shape != (7,) or action.dtype != np.intc:
            raise ValueError("action must have shape (7) and dtype np.intc")
        if not self.left:
            raise RuntimeError("Environment in wrong status to advance.")
        self.left -= 1
        self.last_action = action.tolist()
        return 0.5 * num_steps

    def is_running(self):
        return self.left > 0

    def observations(self):
        if not self.left:
            raise RuntimeError("Environment in wrong status for call to observations()")
        self.drawn += 1
        height, width = int(self.config["height"]), int(self.config["width"])
        picture = np.full((height, width, 3), (1, 2, self.drawn % 256), np.uint8)
        return {"RGB_INTERLEAVED": picture, "INSTR": f"find number {self.drawn}"}

    def close(self):
        self.closed = True
        return True


class FakeFootballConfig(dict):
    """`gfootball.env.config.Config`, as far as it is a dictionary."""

    def ScenarioConfig(self):
        return types.SimpleNamespace(deterministic=False)


class FakeFootball:
    """`gfootball.env.create_environment` with gym 0.25: a bare observation, four results of a step.

    Time is over after `EPISODE_STEPS` steps; with action 12, a shot, there is a goal.
    """

    made: ClassVar[list] = []

    def __init__(self, **arguments):
        self.arguments, self.steps, self._config, self.seeds = arguments, 0, FakeFootballConfig(), []
        FakeFootball.made.append(self)

    @property
    def unwrapped(self):
        return self

    def observation(self):
        return [{"steps_left": EPISODE_STEPS - self.steps}]

    def _planes(self):
        """Of each plane column 8 * steps + number."""
        width, height = self.arguments["channel_dimensions"]
        planes = np.zeros((height, width, 4), np.uint8)
        for number in range(4):
            planes[:, 8 * self.steps + number, number] = 255
        return planes

    def reset(self):
        self.steps = 0
        self.seeds.append(self._config["game_engine_random_seed"])
        assert self._config["reverse_team_processing"] == (self.seeds[-1] % 2 == 1)
        return self._planes()

    def step(self, action):
        assert 0 <= action < 19
        assert type(action) is int
        self.steps += 1
        goal = action == 12
        checkpoints = 0.25 if "checkpoints" in self.arguments["rewards"] else 0.0
        done = goal or self.steps == EPISODE_STEPS
        return self._planes(), np.float32(goal + checkpoints), done, {"score_reward": int(goal)}

    def close(self):
        pass


@pytest.fixture
def engines(monkeypatch):
    """Both stand-ins, where their packages would be imported from."""
    lab = types.ModuleType("deepmind_lab")
    lab.Lab = FakeLab
    monkeypatch.setitem(sys.modules, "deepmind_lab", lab)
    package, football = types.ModuleType("gfootball"), types.ModuleType("gfootball.env")
    package.env, football.create_environment = football, lambda **arguments: FakeFootball(**arguments)
    builder = types.ModuleType("gfootball.env.scenario_builder")
    football.scenario_builder, builder.all_scenarios = builder, lambda: ["11_vs_11_hard_stochastic", "5_vs_5"]
    monkeypatch.setitem(sys.modules, "gfootball", package)
    monkeypatch.setitem(sys.modules, "gfootball.env", football)
    monkeypatch.setitem(sys.modules, "gfootball.env.scenario_builder", builder)
    FakeLab.made, FakeFootball.made = [], []
