"""Tasks of the DeepMind Control Suite, stepped for real, beside the suite's own."""

import sys

import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.base import slot_seeds
from troupe.common.errors import ConfigError, MissingEngineError

suite = pytest.importorskip("dm_control.suite")


def config(task="cartpole-swingup", **fields):
    return EnvConfig(id=f"dm_control:{task}", reward_clip="none", **fields)


def flat(step):
    return np.concatenate([np.ravel(each) for each in step.observation.values()]).astype(np.float32)


def test_a_task_is_the_suites_own():
    """Same seed, same actions, beyond the end of an episode, which its time limit cuts."""
    cfg = config(kwargs={"time_limit": 0.3})
    env = make_vector(cfg, 2, seed=4)
    assert (env.spec.obs_shape, env.spec.obs_dtype, env.spec.actions.reals) == ((5,), "float32", 1)
    twins = [
        suite.load("cartpole", "swingup", {"time_limit": 0.3, "random": seed})
        for seed in slot_seeds(4, 2).tolist()
    ]
    states = [twin.reset() for twin in twins]
    obs, rng, cut = env.reset(), np.random.default_rng(0), 0
    for _ in range(70):
        np.testing.assert_array_equal(obs, [flat(state) for state in states])
        actions = rng.uniform(-1, 1, (2, 1)).astype(np.float32)
        step = env.step(actions)
        for slot, twin in enumerate(twins):
            states[slot] = twin.step(actions[slot])
            assert step.reward[slot] == np.float32(states[slot].reward)
            assert not step.terminated[slot]
            assert step.truncated[slot] == states[slot].last()
            if states[slot].last():
                np.testing.assert_array_equal(step.final_obs[slot], flat(states[slot]))
                states[slot], cut = twin.reset(), cut + 1
        obs = step.obs
    assert cut == 4
    assert env.steps_per_s == 100.0


def test_a_seed_determines_an_episode():
    env = make_vector(config(), 2, seed=1)
    first = env.reset(3)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(env.reset(), first)
    np.testing.assert_array_equal(env.reset(3), first)


def test_what_is_not_there_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="did you mean dm_control:walker-walk"):
        make_spec(config("walker-wlk"))
    with pytest.raises(ConfigError, match=r"cannot be made with kwargs .*nonsense"):
        make_spec(config(kwargs={"nonsense": 1}))
    monkeypatch.setitem(sys.modules, "mujoco", None)  # as if it were not installed
    with pytest.raises(MissingEngineError, match=r"needs the module mujoco.*\[dm-control\]"):
        make_spec(config())
