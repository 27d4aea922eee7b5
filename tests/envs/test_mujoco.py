"""MuJoCo's tasks, stepped for real, beside Gymnasium's own environments."""

import logging
import sys

import gymnasium
import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.base import slot_seeds
from troupe.common.errors import ConfigError, MissingEngineError

mujoco = pytest.importorskip("mujoco")


def config(task="HalfCheetah-v5", **fields):
    return EnvConfig(id=f"mujoco:{task}", reward_clip="none", **fields)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_task_is_gymnasiums_own(threads):
    env = make_vector(config("Hopper-v5"), 2, seed=5, threads=threads)
    assert (env.spec.obs_shape, env.spec.obs_dtype, env.spec.actions.reals) == ((11,), "float32", 3)
    twins = [gymnasium.make("Hopper-v5") for _ in range(2)]
    states = [twin.reset(seed=seed)[0] for twin, seed in zip(twins, slot_seeds(5, 2).tolist(), strict=True)]
    obs, rng, games = env.reset(), np.random.default_rng(0), 0
    for _ in range(200):  # at random it falls after some tens of steps
        np.testing.assert_array_equal(obs, np.array(states, np.float32))
        actions = rng.uniform(-1, 1, (2, 3)).astype(np.float32)
        step = env.step(actions)
        for slot, twin in enumerate(twins):
            state, reward, over, cut, _ = twin.step(actions[slot])
            assert step.reward[slot] == np.float32(reward)
            assert (step.terminated[slot], step.truncated[slot]) == (over, cut)
            if over:
                np.testing.assert_array_equal(step.final_obs[slot], state.astype(np.float32))
                state, games = twin.reset()[0], games + 1
            states[slot] = state
        obs = step.obs
    assert games
    assert env.restarts_total == 0


def test_warnings_of_the_engine_are_logged_and_leave_no_file(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.WARNING)
    env = make_vector(config("Hopper-v5"), 1, seed=1)
    env.reset()
    data = env._slots[0].env.unwrapped.data
    data.qvel[:] = 1e30
    step = env.step(np.zeros((1, 3), np.float32))
    assert np.isfinite(step.obs).all()
    assert "MuJoCo: " in caplog.text
    assert "unstable" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "meant"),
    [("HalfCheetah", "HalfCheetah-v5"), ("halfcheetah-v2", "HalfCheetah-v5"), ("Hoper-v5", "Hopper-v5")],
)
def test_a_wrong_name_gets_the_nearest(name, meant):
    with pytest.raises(ConfigError, match=f"did you mean mujoco:{meant}"):
        make_spec(config(name))


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)  # as if it were not installed
    with pytest.raises(
        MissingEngineError, match=r"mujoco:HalfCheetah-v5 needs the module mujoco.*\[mujoco\]"
    ):
        make_spec(config())


def test_without_what_gymnasium_draws_with_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio", None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        MissingEngineError, match=r"mujoco:HalfCheetah-v5 needs the module imageio.*\[mujoco\]"
    ):
        make_spec(config())
