"""`troupe.load`: the policy of a checkpoint, without an environment."""

import dataclasses

import numpy as np
import pytest

import troupe
from troupe.common.agents import Inputs, make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec, make_vector
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.runtime.checkpoint import save_checkpoint


def saved(tmp_path, preset, **overrides):
    """A checkpoint of an agent that has learned nothing; returns the run directory, config and agent."""
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    config = load_config(preset, None, fields, {})
    spec = make_spec(config.env)
    agent = make_agent(config.agent, spec, seed=3)
    arrays, meta = agent.state()
    whole = {"steps": 1, "config": config.to_dict(), "agent": meta, "spec": dataclasses.asdict(spec)}
    save_checkpoint(tmp_path / "checkpoints", arrays, whole)
    return tmp_path, config, agent


def played(config, agent, slots, steps):
    """Greedy play as an actor does it: observations, the rewards and ends that led there, what was done."""
    vector = make_vector(config.env, slots, 5)
    obs = vector.reset()
    inputs = Inputs.start(obs, agent.memory_size, agent.spec.actions)
    reward, ended = np.zeros(slots), np.zeros(slots, bool)
    for _ in range(steps):
        act = agent.act(inputs, np.zeros(slots, np.float32), np.random.default_rng(0))
        yield obs, reward, ended, act
        step = vector.step(act.action)
        obs, reward, ended = step.obs, step.reward, step.terminated | step.truncated
        inputs = inputs.after(act, obs, reward, ended)
    vector.close()


@pytest.mark.parametrize("preset", ["cartpole-apex", "memory-r2d2", "memory-sac", "cartpole-ppo"])
def test_it_acts_as_the_agent_does_in_a_batch_and_one_by_one(tmp_path, preset):
    run_dir, config, agent = saved(tmp_path, preset)
    batched = troupe.load(run_dir, epsilon=0)
    singles = [troupe.load(run_dir, epsilon=0) for _ in range(3)]
    ends = 0
    for obs, reward, ended, act in played(config, agent, 3, 120):
        batched.reset(ended)
        np.testing.assert_array_equal(batched.act(obs, reward), act.action)
        if agent.memory_size:
            np.testing.assert_array_equal(batched._last[1].memory, act.memory)
        for slot, policy in enumerate(singles):
            if ended[slot]:
                policy.reset()
            chosen = policy.act(obs[slot], reward[slot])
            assert type(chosen) is int
            assert chosen == act.action[slot]
        ends += ended.sum()
    assert ends > 3


def test_what_a_recurrent_policy_remembers_matters_and_is_forgotten_at_a_reset(tmp_path):
    run_dir, *_ = saved(tmp_path, "memory-r2d2")
    policy = troupe.load(run_dir)
    obs = np.random.default_rng(0).normal(size=(4, *policy.spec.obs_shape)).astype(np.float32)

    def memory():
        return policy._last[1].memory.copy()

    policy.act(obs)
    first = memory()
    policy.act(obs, np.ones(4))
    second = memory()
    assert not np.allclose(first, second)
    policy.reset([True, False, True, False])
    policy.act(obs, np.ones(4))
    np.testing.assert_allclose(memory()[[0, 2]], first[[0, 2]], rtol=1e-5)
    assert not np.allclose(memory()[[1, 3]], first[[1, 3]])
    policy.reset()
    policy.act(obs[:2])
    np.testing.assert_allclose(memory(), first[:2], rtol=1e-5)

    with pytest.raises(ConfigError, match=r"give act.. the reward"):
        policy.act(obs[:2])
    with pytest.raises(ConfigError, match="4 observations after 2"):
        policy.act(obs, np.ones(4))
    with pytest.raises(ConfigError, match="flags"):
        policy.reset([True])


def test_what_a_caller_makes_of_its_actions_is_not_what_was_done(tmp_path):
    run_dir, *_ = saved(tmp_path, "memory-r2d2")
    policy = troupe.load(run_dir, epsilon=0)
    obs = np.zeros((3, *policy.spec.obs_shape), np.float32)
    actions = policy.act(obs)
    done = actions.copy()
    actions += 1
    policy.act(obs, np.zeros(3))
    np.testing.assert_array_equal(policy._last[0].last_action, done)


def test_rewards_reach_it_as_training_counts_them(tmp_path):
    run_dir, *_ = saved(tmp_path, "memory-r2d2", env__reward_clip="sign")
    policy = troupe.load(run_dir)
    obs = np.zeros(policy.spec.obs_shape, np.float32)
    policy.act(obs)
    policy.act(obs, 7.5)
    assert policy._last[0].last_reward.tolist() == [1.0]


def test_no_environment_is_made_and_none_of_its_modules_is_needed(tmp_path, monkeypatch):
    run_dir, config, _ = saved(tmp_path, "cartpole-apex")
    monkeypatch.setattr("troupe.common.policies.make_spec", None)
    values = config.to_dict() | {"env": {"id": "no_such_module:Env-v0"}}
    policy = troupe.load(run_dir)
    arrays, meta = policy.agent.state()
    whole = {"steps": 2, "config": values, "agent": meta, "spec": dataclasses.asdict(policy.spec)}
    path = save_checkpoint(tmp_path / "checkpoints", arrays, whole)
    again = troupe.load(path)
    obs = np.random.default_rng(0).normal(size=(50, 4))
    np.testing.assert_array_equal(again.act(obs.astype(np.float32)), policy.act(obs.astype(np.float32)))


def test_an_algorithm_is_imported_only_where_its_module_is_permitted(tmp_path):
    _, config, agent = saved(tmp_path, "cartpole-apex")
    values = config.to_dict() | {"agent": {"algorithm": "xml.dom.pulldom"}}
    save_checkpoint(tmp_path / "checkpoints", agent.state()[0], {"steps": 2, "config": values, "agent": {}})
    with pytest.raises(ConfigError, match=r"would run xml.dom.pulldom"):
        troupe.load(tmp_path)
    with pytest.raises(ConfigError, match="registers no algorithm"):
        troupe.load(tmp_path, modules=["xml"])


def test_epsilon_explores(tmp_path):
    run_dir, *_ = saved(tmp_path, "cartpole-apex")
    obs = np.zeros((200, 4), np.float32)
    assert len(np.unique(troupe.load(run_dir, epsilon=0).act(obs))) == 1
    first, same, other = (troupe.load(run_dir, epsilon=1, seed=seed).act(obs) for seed in (1, 1, 2))
    assert 60 < first.sum() < 140
    assert (first == same).all()
    assert (first != other).any()


def test_what_does_not_fit_is_one_line(tmp_path):
    run_dir, _, agent = saved(tmp_path, "cartpole-apex")
    policy = troupe.load(run_dir)
    for obs in (np.zeros(5), np.zeros((2, 2, 4)), np.zeros(4, complex), np.zeros((0, 4)), 3.0):
        with pytest.raises(ConfigError, match=r"takes float32 \[4\], or a batch|no observations"):
            policy.act(obs)
    for obs in (np.array([0, np.nan, 0, 0]), np.full((2, 4), 1e300)):
        with pytest.raises(
            ConfigError, match=r"CartPole-v1 returned an observation with (nan|inf) \((1 of its 4|8)"
        ):
            policy.act(obs)
    assert policy.act([0.0, 0.1, 0.0, 0.0]) in (0, 1)
    for reward in (np.nan, 1e300):
        with pytest.raises(ConfigError, match=r"a reward is not finite: (nan|1e\+300)"):
            policy.act([0.0, 0.1, 0.0, 0.0], reward)
    assert policy.act(np.zeros((3, 4))).shape == (3,), "without a memory another number is fine"
    with pytest.raises(ConfigError, match="epsilon"):
        troupe.load(run_dir, epsilon=2)
    with pytest.raises(ConfigError, match="not a directory"):
        troupe.load(tmp_path / "absent")
    arrays, meta = agent.state()
    config = load_config("cartpole-apex", None, {}, {}).to_dict()
    for spec, says in ((None, "no 'spec'"), ({"id": 3}, r"spec\.id"), ([], "spec")):
        whole = {"steps": 3, "config": config, "agent": meta} | ({} if spec is None else {"spec": spec})
        path = save_checkpoint(tmp_path / "checkpoints", arrays, whole)
        with pytest.raises(CheckpointError, match=says):
            troupe.load(path)
