"""EnvPool's environments against EnvPool itself; without it only the refusal. `pip install envpool`."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import Step, make_spec, make_vector
from troupe.common.envs.envpool import evaluation_options
from troupe.common.errors import ConfigError, MissingEngineError

IS_HERE = importlib.util.find_spec("envpool") is not None
needs_envpool = pytest.mark.skipif(not IS_HERE, reason="envpool is not installed: it is 300 MB")


def config(task: str = "CartPole-v1", **kwargs: Any) -> EnvConfig:
    return EnvConfig.model_validate({"id": f"envpool:{task}", "reward_clip": "none", "kwargs": kwargs})


def played(task: str, seed: int, actions: np.ndarray, **kwargs: Any) -> tuple[list[np.ndarray], list[Step]]:
    vector = make_vector(config(task, **kwargs), actions.shape[1], seed, threads=2)
    seen, steps = [vector.reset().copy()], []
    for each in actions:
        steps.append(vector.step(each))
        seen.append(steps[-1].obs.copy())
    vector.close()
    return seen, steps


@pytest.mark.skipif(IS_HERE, reason="envpool is installed")
def test_it_is_refused_where_the_package_is_missing() -> None:
    with pytest.raises(MissingEngineError, match=r"needs the package envpool: pip install .*envpool"):
        make_spec(config())


def test_evaluations_play_whole_games_with_rewards_as_they_are() -> None:
    trained = {"episodic_life": True, "reward_clip": True, "noop_max": 10}
    whole = {"episodic_life": False, "reward_clip": False}
    assert evaluation_options(trained) == trained | whole | {"render_mode": "rgb_array"}
    assert evaluation_options({}) == {"render_mode": "rgb_array"}  # CartPole knows no others


@needs_envpool
@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # EnvPool's own bounds
def test_steps_are_those_of_the_pool_without_the_ones_that_only_reset() -> None:
    import envpool

    slots = 4
    actions = np.random.default_rng(0).integers(2, size=(200, slots))
    actions[:, 0] = np.arange(200) % 2  # up until its time is over
    seen, steps = played("CartPole-v1", 5, actions, max_episode_steps=25)
    # Every slot alone, in a pool of one: there, steps that only reset are left out by hand.
    first = int(np.random.SeedSequence(5).generate_state(1)[0] >> 1)
    ends = {"terminated": 0, "truncated": 0}
    for slot in range(slots):
        pool = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=first + slot, max_episode_steps=25)
        obs, _ = pool.reset()
        np.testing.assert_array_equal(seen[0][slot], obs[0])
        for action, step in zip(actions[:, slot], steps, strict=True):
            obs, reward, terminated, truncated, _ = pool.step(np.array([action]))
            assert step.reward[slot] == reward[0]
            assert (step.terminated[slot], step.truncated[slot]) == (terminated[0], truncated[0])
            if terminated[0] or truncated[0]:
                np.testing.assert_array_equal(step.final_obs[slot], obs[0])
                ends["terminated" if terminated[0] else "truncated"] += 1
                obs, *_ = pool.step(np.array([action]))
            np.testing.assert_array_equal(step.obs[slot], obs[0])
    assert min(ends.values()) > 3
    lengths = [episode.steps for step in steps for episode in step.episodes]
    assert max(lengths) == 25
    assert all(episode.return_raw == episode.steps for step in steps for episode in step.episodes)


@needs_envpool
def test_pixels_are_stacks_of_frames_and_seeds_repeat() -> None:
    spec = make_spec(config("Pong-v5"))
    assert (spec.obs_shape, spec.obs_dtype, spec.stack, spec.frames_per_step) == ((4, 84, 84), "uint8", 4, 4)
    assert spec.pixels
    actions = np.random.default_rng(0).integers(6, size=(30, 2))
    (seen, steps), (again, _), (other, _) = (played("Pong-v5", seed, actions) for seed in (1, 1, 2))
    assert not seen[0][:, :3].any()  # where EnvPool repeats the first frame
    np.testing.assert_array_equal(seen, again)
    assert not np.array_equal(seen, other)
    for before, step in zip(seen, steps, strict=False):
        np.testing.assert_array_equal(step.obs[:, :3], before[:, 1:])


@needs_envpool
def test_it_draws_what_a_spectator_sees_and_takes_real_numbers() -> None:
    vector = make_vector(config("Pendulum-v1"), 2, 1, evaluation=True)
    vector.reset()
    step = vector.step(vector.spec.actions.random(np.random.default_rng(0), 2))
    assert (step.reward < 0).all()
    first, second = vector.render_frame(0), vector.render_frame(1)
    assert first.dtype == np.uint8
    assert first.shape[2] == 3
    assert not np.array_equal(first, second)
    vector.close()


@needs_envpool
@pytest.mark.parametrize(
    ("task", "kwargs", "says"),
    [
        ("CartPol-v1", {}, "EnvPool has no 'CartPol-v1': did you mean envpool:CartPole-v1"),
        ("CartPole-v1", {"foo": 1}, "cannot be made with kwargs .*foo"),
        ("CartPole-v1", {"num_envs": 3}, "num_envs of envpool:CartPole-v1 is set by Troupe"),
    ],
)
def test_what_cannot_be_made_is_one_line(task: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        make_spec(config(task, **kwargs))
    assert "\n" not in str(error.value)
