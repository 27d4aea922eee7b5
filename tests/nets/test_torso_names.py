"""Every algorithm takes every torso by its name."""

import typing
from dataclasses import replace

import numpy as np
import pytest

from tests.agents.contract import actions_of
from troupe.common.agents import make_agent
from troupe.common.agents.base import Inputs
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.config.fields import Torso
from troupe.common.envs.base import EnvSpec
from troupe.common.nets.torsos import PIXEL_TORSOS
from troupe.common.spaces import ActionSpec

PICTURES = EnvSpec(
    "pictures", (4, 44, 44), "uint8", ActionSpec.discrete(3), stack=4, frames_per_step=1, pixels=True
)


def test_the_names_are_those_of_the_networks():
    assert set(typing.get_args(Torso)) == {"auto", "mlp", *PIXEL_TORSOS}


@pytest.mark.parametrize("torso", PIXEL_TORSOS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_acts_with_each(algorithm, torso):
    spec = replace(PICTURES, actions=actions_of(algorithm))
    agent = make_agent(agent_model(algorithm)(torso=torso), spec)
    obs = np.zeros((2, *PICTURES.obs_shape), np.uint8)
    inputs = Inputs.start(obs, agent.memory_size, spec.actions)
    act = agent.act(inputs, np.zeros(2, np.float32), np.random.default_rng(0))
    assert act.action.shape == (2, *spec.actions.shape)
