from __future__ import annotations

import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import VectorEnv, make_vector
from troupe.common.envs.transfer import TransferError, pack_start, pack_step, unpack_start, unpack_step

COUNTING = "tests.envs.counting:Counting-v0"
COLOUR = "tests.envs.counting:Colour-v0"


def check_steps(env: VectorEnv, steps: int) -> tuple[int, int]:
    """Every step arrives as it was; how many episodes ended, and how many slots were discarded."""
    rng, spec = np.random.default_rng(0), env.spec
    obs = env.reset(seed=1)
    there = unpack_start(pack_start(obs), env.num_slots, spec)
    ended = discarded = 0
    for _ in range(steps):
        step = env.step(rng.integers(0, spec.actions.count, env.num_slots))
        arrays = pack_step(step, spec.stack)
        if spec.stack:
            assert arrays["obs"].shape == (env.num_slots, *spec.obs_shape[1:])
        got = unpack_step({name: array.copy() for name, array in arrays.items()}, there, spec)
        np.testing.assert_array_equal(got.obs, step.obs)
        np.testing.assert_array_equal(got.reward, step.reward)
        np.testing.assert_array_equal(got.terminated, step.terminated)
        np.testing.assert_array_equal(got.truncated, step.truncated & ~step.terminated)
        assert got.discarded == sorted(step.discarded)
        assert got.final_obs.keys() == step.final_obs.keys()
        for slot, last in step.final_obs.items():
            np.testing.assert_array_equal(got.final_obs[slot], last)
        there = got.obs
        ended += len(step.final_obs)
        discarded += len(step.discarded)
    env.close()
    return ended, discarded


@pytest.mark.parametrize("ends_by", ["termination", "truncation"])
def test_vectors(ends_by: str) -> None:
    kwargs = {"length": 4, "ends_by": ends_by, "fail_at": (2, 1)}
    ended, discarded = check_steps(make_vector(EnvConfig(id=COUNTING, kwargs=kwargs), 3, 1), 30)
    assert ended >= 15
    assert discarded >= 3


def test_pictures_that_are_stacked_here() -> None:
    pytest.importorskip("cv2")
    assert check_steps(make_vector(EnvConfig(id=COLOUR), 2, 1), 20)[0] == 6


@pytest.mark.parametrize("episodic_life", [True, False])
def test_games_with_lives_and_time_limits(episodic_life: bool) -> None:
    pytest.importorskip("ale_py")
    config = EnvConfig(
        id="atari:breakout", frame_skip=12, max_episode_frames=1200, episodic_life=episodic_life
    )
    assert check_steps(make_vector(config, 3, 1), 250)[0] > 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"reward": np.zeros(3, np.float32)},
        {"reward": np.zeros(2)},
        {"reward": np.array([0, np.nan], np.float32)},
        {"obs": np.full((2, 2), np.inf, np.float32)},
        {"obs": np.zeros((2, 3), np.float32)},
        {"ended": np.array([0, 4], np.uint8)},
        {"first": np.zeros((1, 2), np.float32)},
        {"ended": np.ones(2, np.uint8)},
    ],
)
def test_what_is_no_step_is_refused(wrong: dict[str, np.ndarray]) -> None:
    env = make_vector(EnvConfig(id=COUNTING), 2, 1)
    obs = env.reset()
    arrays = pack_step(env.step(np.zeros(2, np.int64)), 0)
    unpack_step(arrays, obs, env.spec)
    with pytest.raises(TransferError):
        unpack_step({**arrays, **wrong}, obs, env.spec)
    for name in arrays:
        with pytest.raises(TransferError):
            unpack_step({k: v for k, v in arrays.items() if k != name}, obs, env.spec)
    with pytest.raises(TransferError):
        unpack_start({"first": obs}, 3, env.spec)
