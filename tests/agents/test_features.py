"""What the network that acted saw in each step, stored beside it, and how far today's network is from it."""

import numpy as np
import pytest
import torch

from tests.agents.unrolled import SMALL, random_batch, unrolls_of
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.accumulators.unrolls import TERMINATED
from troupe.common.data.distances import distances
from troupe.common.envs import EnvSpec, make_vector
from troupe.common.spaces import ActionSpec

CARTPOLE = EnvConfig(id="gym:CartPole-v1", reward_clip="none")
VECTOR = EnvSpec("test:vector", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)


def make(kind, lstm=0, **fields):
    spec = make_vector(CARTPOLE, 1, 0).spec
    config = ImpalaConfig(**SMALL, behaviour_features=kind, feature_units=6, lstm_units=lstm, **fields)
    return make_agent(config, spec, seed=3)


@pytest.mark.parametrize(("kind", "lstm", "width"), [("torso", 0, 11), ("torso", 5, 5), ("head", 5, 6)])
def test_nothing_is_off_policy_while_nothing_is_learned(kind, lstm, width):
    """8 units, 2 actions and a reward without memory; the memory's with it; the head's."""
    agent = make(kind, lstm, learning_rate=1e-12)
    batch = unrolls_of(agent, CARTPOLE, 2, 6)
    assert batch["features"].shape == (6, 5, width)
    assert batch["features"].dtype == np.float16
    assert (batch["ended"][:, 1:] == TERMINATED).any()
    assert batch["features"].std() > 0.01
    update = agent.update(Batch(batch, np.ones(6, np.float32)))
    assert update.metrics["learner/feature_distance"] < 0.01  # half a thousandth of each number is lost
    assert (update.priorities > 0.99).all()


@pytest.mark.parametrize("distance", ["norm", "cosine", "kl"])
def test_priorities_say_how_near_stored_features_are(distance):
    agent = make("torso", feature_distance=distance, feature_power=3.0)
    batch = unrolls_of(agent, CARTPOLE, 2, 6)
    rng = np.random.default_rng(0)
    fresh = batch["features"].astype(float)
    scales = np.linspace(0.0, 5.0, 6)[:, None, None]
    batch["features"] = (fresh + scales * rng.normal(size=fresh.shape)).astype(np.float16)
    got = agent.update(Batch(batch, np.ones(6, np.float32))).priorities
    want = 1 / (1 + distances(distance, fresh, batch["features"], 3.0))
    np.testing.assert_allclose(got, want, atol=0.01)
    assert got[0] > 0.99
    assert got[-1] < 0.9


def test_the_head_is_learned():
    agent = make_agent(ImpalaConfig(**SMALL, behaviour_features="head", optimizer="adam"), VECTOR, seed=0)
    before = agent.net.bottleneck[0].weight.detach().clone()
    agent.update(Batch(random_batch(np.random.default_rng(0), agent, 4), np.ones(4)))
    moved = (agent.net.bottleneck[0].weight.detach() - before).abs()
    assert (moved.amax(dim=1) > 0).float().mean() > 0.5  # all units that are on in any of the steps


def test_nothing_is_stored_unless_it_is_wanted():
    agent = make("none")
    assert "features" not in {field.name for field in agent.fields}
    batch = unrolls_of(agent, CARTPOLE, 2, 4)
    assert "features" not in batch
    assert agent.update(Batch(batch, np.ones(4))).priorities is None
    assert agent.net.bottleneck is None


def test_features_beyond_float16_are_cut():
    agent = make("head")
    with torch.no_grad():
        agent.net.bottleneck[0].bias.fill_(1e6)
    batch = unrolls_of(agent, CARTPOLE, 1, 1)
    assert (batch["features"] == np.finfo(np.float16).max).all()
    spec = next(field for field in agent.fields if field.name == "features")
    assert spec.bad_rows(batch["features"]) is None
