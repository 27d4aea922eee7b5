"""Agents of every algorithm, and what they learn from."""

import os

import gymnasium
import numpy as np
import pytest

from tests.agents.replayed import batch_of, windows
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config import EnvConfig
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.envs import make_spec, make_vector
from troupe.common.errors import ConfigError
from troupe.services.actor.local_inference import Rollout

ITEMS = 4


VECTORS = EnvConfig(
    id="tests.envs.counting:Counting-v0", reward_clip="none", kwargs={"length": 7, "ends_by": "truncation"}
)


PIXELS = EnvConfig(id="tests.envs.catch:Catch-v0", frame_skip=1, frame_size=42, noop_max=0, fire_reset=False)


OUTSIDE = [name for name in os.environ.get("TROUPE_CONTRACT", "").split(",") if name]
"""Algorithms outside this tree, to be tested as well."""


OPTIONS = {
    "sac, with memory": {"lstm_units": 8, "sequence_steps": 6, "sequence_period_steps": 3},
    "apex, noise": {"noise": 0.5, "quantiles": 8},
}
"""Fields that make another agent of an algorithm, whose name is before the comma."""


REALS_ONLY = {"td3"}
"""Algorithms that take no choices: in their environments a real number stands for one."""


class RealActions(gymnasium.ActionWrapper):
    """A number from -1 to 1 in place of a choice."""

    def __init__(self, env):
        super().__init__(env)
        self.choices = env.action_space.n
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def action(self, action):
        """The choice in whose part of the range a number lies."""
        return min(self.choices - 1, int((action[0] + 1) / 2 * self.choices))


def env_of(name, env=VECTORS):
    """The environment that an algorithm is tested on: `env`, with actions that it takes."""
    wrappers = [f"{__name__}:RealActions"] if name in REALS_ONLY else env.wrappers
    return env.model_copy(update={"wrappers": wrappers})


def actions_of(name):
    """Actions that an algorithm takes: one of three choices, or a real number."""
    return make_spec(env_of(name)).actions


every_algorithm = pytest.mark.parametrize("name", [*ALGORITHMS, *OPTIONS, *OUTSIDE])


def config_of(name, **fields):
    return agent_model(name.partition(",")[0])(**OPTIONS.get(name, {}), **fields)


def agent_of(name, seed=0, env=VECTORS):
    vector = make_vector(env_of(name, env), 1, 0)
    vector.close()
    config = config_of(name)
    try:
        return make_agent(config, vector.spec, seed=seed)
    except ConfigError as refused:
        # Which observations an algorithm takes is its own affair; those of this tree take all.
        if name in OUTSIDE:
            pytest.skip(str(refused))
        raise


def played(agent, env=VECTORS):
    """The first chunks that an agent's play brings: at least `ITEMS` items."""
    env = env_of(agent.config.algorithm, env)
    rollout, chunks = Rollout(agent, make_vector(env, 2, 0), 6, seed=0), []
    rollout.explore([0, 1], 2)
    while sum(len(chunk.offsets) for chunk in chunks) < ITEMS:
        assert rollout.timing.calls < 2000, "plays on and on, and nothing can be inserted"
        chunks += rollout.step(version=3)
    return chunks


def batch(agent, env=VECTORS):
    """What `update` is given, as replay hands out the first items."""
    items = windows(played(agent, env), agent.fields)[:ITEMS]
    fields, lengths = batch_of(items)
    return Batch(fields, np.ones(ITEMS, np.float32), lengths, progress=0.5)


def copied(arrays):
    return {name: array.copy() for name, array in arrays.items()}
