"""Networks that do not suit the observations say so."""

import pytest

from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec
from troupe.common.errors import ConfigError
from troupe.common.nets.q_network import PixelTorso


@pytest.mark.parametrize("shape", [(4,), (84, 84)])
def test_convolutions_need_pictures(shape):
    with pytest.raises(ValueError, match="the nature torso needs pictures"):
        PixelTorso("nature", shape)


def test_convolutions_on_a_vector_are_a_config_error():
    config = load_config("cartpole-apex", None, {"agent.torso": "nature"}, {})
    with pytest.raises(ConfigError, match=r"'nature' does not suit gym:CartPole-v1.*--agent.torso mlp"):
        make_agent(config.agent, make_spec(config.env), seed=0)
