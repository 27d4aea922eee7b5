"""What is shown in parts reaches the network whole, and is learned from."""

import dataclasses

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import troupe
from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.agents.replayed import batch_of, windows
from tests.envs.matching import SHOWN
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.gymnasium_spaces import observation_leaves
from troupe.common.errors import ConfigError
from troupe.common.nets.parts import PartInputs
from troupe.common.runtime.checkpoint import save_checkpoint
from troupe.common.spaces import packed, unpacked
from troupe.services.actor.local_inference import Rollout

READ = EnvConfig(id="tests.envs.matching:Read-v0", reward_clip="none")
LAKE = EnvConfig(id="gym:FrozenLake-v1", reward_clip="none")
SMALL = {"mlp_units": (8,), "hidden_units": 8}
AGENTS = {
    "apex": ApexConfig(**SMALL),
    "impala": ImpalaConfig(**SMALL, unroll_steps=5, lstm_units=4),
    "ppo": PolicyGradientConfig(**SMALL, unroll_steps=5, shared_torso=False, normalize_vectors=True),
    "r2d2": R2d2Config(
        **SMALL, lstm_units=4, head_units=8, sequence_steps=6, sequence_period_steps=3, burn_in_steps=2
    ),
}


def test_every_part_keeps_its_dtype_and_comes_back():
    leaves = observation_leaves(SHOWN)
    assert {leaf.path: leaf.dtype for leaf in leaves} == {
        ("column",): "uint8", ("height",): "float32", ("pair", 0): "int64", ("pair", 1): "int8",
    }  # fmt: skip
    sample = SHOWN.sample()
    row = packed(leaves, sample)
    assert (row.dtype, row.shape) == (np.uint8, make_spec(READ).obs_shape)
    found = {leaf.path: array for leaf, array in zip(leaves, unpacked(leaves, row), strict=True)}
    np.testing.assert_array_equal(found["column",], sample["column"])
    np.testing.assert_allclose(found["height",], sample["height"], rtol=1e-6)
    assert found["pair", 0] == sample["pair"][0]
    np.testing.assert_array_equal(found["pair", 1], sample["pair"][1])


def test_floats_stand_for_whole_numbers_where_they_are_whole():
    """Gymnasium's MultiBinary contains 0.0 and 1.0, and environments return them."""
    leaves, sample = observation_leaves(SHOWN), SHOWN.sample()
    number, bits = sample["pair"]
    np.testing.assert_array_equal(
        packed(leaves, {**sample, "pair": (number, bits.astype(float))}), packed(leaves, sample)
    )
    for wrong in (0.5, np.nan, np.inf):
        with pytest.raises(TypeError, match=r"float64 instead of int8 at \['pair', 1\]"):
            packed(leaves, {**sample, "pair": (number, np.full(bits.shape, wrong))})


@pytest.mark.parametrize("axes", ["hw", "hwc", "chw"])
def test_the_network_sees_each_part_as_numbers(axes):
    picture = {"hw": (33, 40), "hwc": (33, 40, 3), "chw": (3, 33, 40)}[axes]
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, picture, np.uint8),
            "which": spaces.MultiDiscrete([2, 3], start=[5, -1]),
            "where": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "count": spaces.Box(0, 60_000, (1,), np.uint16),
        }
    )
    leaves = observation_leaves(space)
    inputs = PartInputs(leaves, pixels=False)
    nest = {
        "camera": np.arange(np.prod(picture)).reshape(picture).astype(np.uint8), "which": np.array([6, -1]),
        "where": np.array([2.5, -1e300]), "count": np.array([50_000], np.uint16),
    }  # fmt: skip
    row = torch.from_numpy(packed(leaves, nest))
    for batch in (row[None], torch.stack([row, row])):
        seen = dict(
            zip([leaf.path[0] for leaf in leaves], inputs(batch)[-1].split(inputs.widths), strict=True)
        )
        image = nest["camera"][None] if axes == "hw" else nest["camera"]
        image = np.moveaxis(image, -1, 0) if axes == "hwc" else image
        np.testing.assert_allclose(seen["camera"], image.ravel() / 255.0, atol=1e-6)
        assert seen["which"].tolist() == [0, 1, 1, 0, 0]
        np.testing.assert_allclose(seen["where"], [2.5, -1e9])
        assert seen["count"].item() == 50_000
    statistics = PartInputs(leaves, vectors=True)
    statistics.observe(torch.stack([row] * 3)[:, None])
    assert statistics(row[None]).abs().max() <= 10.0


@pytest.mark.parametrize("env", [READ, LAKE], ids=["nest", "symbol"])
@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_learns_from_what_it_stores_of_parts(name, env):
    if env is READ and name in ("apex", "r2d2"):
        env = EnvConfig(id="tests.envs.matching:Told-v0", reward_clip="none")
    vector = make_vector(env, 2, 0)
    agent = make_agent(AGENTS[name], vector.spec, seed=0)
    rollout, chunks = Rollout(agent, vector, 6, seed=0), []
    rollout.explore([0, 1], 2)
    while sum(len(chunk.offsets) for chunk in chunks) < 4:
        chunks += rollout.step(1)
    vector.close()
    fields, lengths = batch_of(windows(chunks, agent.fields)[:4])
    before = {key: array.copy() for key, array in agent.params().items()}
    update = agent.update(Batch(fields, np.ones(4, np.float32), lengths=lengths))
    assert np.isfinite(list(update.metrics.values())).all()
    assert any("encoders" in key for key in before)
    # A stranger may have stored any bytes: NaN, and symbols that are not there.
    fields["obs"] = np.full_like(fields["obs"], 255)
    agent.update(Batch(fields, np.ones(4, np.float32), lengths=lengths))
    assert all(np.isfinite(array).all() for array in agent.params().values())


@pytest.mark.slow
def test_ppo_learns_what_every_part_says():
    """Any answer alike scores 0.42, and whoever does not see one part 0.88 at most."""
    config = PolicyGradientConfig(
        hidden_units=32, mlp_units=(64, 64), unroll_steps=16, gamma=0.0, epochs=6, minibatch_steps=128,
        learning_rate=2e-3, learning_rate_schedule="linear", entropy_cost=0.0, eval_epsilon=0.0,
        normalize_vectors=True,
    )  # fmt: skip
    agent, _ = learn_through_a_queue(config, READ, slots=32, batch=32, steps=25_000, seed=1)
    assert evaluate(agent, READ, episodes=200) > 0.95


def test_a_loaded_policy_takes_the_environment_s_own_observations_and_gives_its_actions(tmp_path):
    config = load_config("cartpole-ppo", overrides={"env.id": READ.id, "agent.torso": "auto"})
    spec = make_spec(config.env)
    agent = make_agent(config.agent, spec, seed=3)
    arrays, meta = agent.state()
    whole = {"steps": 1, "config": config.to_dict(), "agent": meta, "spec": dataclasses.asdict(spec)}
    save_checkpoint(tmp_path / "checkpoints", arrays, whole)
    policy = troupe.load(tmp_path, modules=["tests.envs.matching"])
    assert policy.spec == spec
    env = gymnasium.make("Read-v0").unwrapped
    nests = [env.reset(seed=seed)[0] for seed in range(5)]
    one_by_one = [policy.act(nest) for nest in nests]
    assert all(env.action_space.contains(action) for action in one_by_one)
    policy.reset()
    np.testing.assert_array_equal(policy.act(nests), one_by_one)
    policy.reset()
    rows = np.stack([packed(spec.obs_leaves, nest) for nest in nests])
    np.testing.assert_array_equal(policy.act(rows), one_by_one)
    with pytest.raises(ConfigError, match="observation"):
        policy.act({"column": nests[0]["column"]})
    # In the environment's space it might be from 0 to 1, which training makes pixels of.
    with pytest.raises(ConfigError, match=r"float64 instead of uint8: pixels from 0 to 255 at \['column'\]"):
        policy.act({**nests[0], "column": nests[0]["column"] / 255})
    broken = {**nests[0], "height": np.full_like(nests[0]["height"], np.nan)}
    with pytest.raises(ConfigError, match=r"an observation with nan as its part 'height' \("):
        policy.act([*nests, broken])
