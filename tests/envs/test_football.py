"""Google Research Football, stepped for real, beside the engine's own environment."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.base import slot_seeds
from troupe.common.errors import ConfigError

football = pytest.importorskip(
    "gfootball.env", reason="Google Research Football is not built: see docs/environments.md"
)

IDLE, SHOT, SPRINT, RIGHT = 0, 12, 13, 5
CLOSE = "football:academy_empty_goal_close"


def config(env_id: str = CLOSE, **fields: object) -> EnvConfig:
    return EnvConfig(id=env_id, reward_clip="none", **fields)  # type: ignore[arg-type]


def pixels(packed: np.ndarray) -> np.ndarray:
    return np.unpackbits(packed, axis=-1) * np.uint8(255)


@pytest.mark.filterwarnings("ignore:.*Initializing wrapper in old step API:DeprecationWarning")
@pytest.mark.parametrize("rewards", ["scoring", "scoring,checkpoints"])
def test_games_are_the_engines_own(rewards: str) -> None:
    """Same seeds, same actions: every plane, reward and ending, across the ends of games."""
    name, seeds = "academy_3_vs_1_with_keeper", slot_seeds(3, 2).tolist()
    env = make_vector(config(f"football:{name}", kwargs={"rewards": rewards}), 2, seed=3)
    draws = [np.random.default_rng(seed) for seed in seeds]
    twins = [football.create_environment(env_name=name, stacked=True, rewards=rewards) for _ in seeds]

    def begin(slot: int) -> np.ndarray:
        seed = int(draws[slot].integers(2_000_000_000))
        twins[slot].unwrapped._config.update(
            {"game_engine_random_seed": seed, "reverse_team_processing": bool(seed % 2)}
        )
        return twins[slot].reset()

    obs, rng, games = env.reset(), np.random.default_rng(0), 0
    assert env.spec.seen_shape == (4, 4, 72, 96)
    own = [begin(slot) for slot in range(2)]
    for _ in range(250):
        for slot in range(2):
            stacked = own[slot].transpose(2, 0, 1).reshape(4, 4, 72, 96)
            seen = pixels(obs[slot])
            np.testing.assert_array_equal(seen[-1], stacked[-1])
            known = seen.any(axis=(1, 2, 3))  # before a game's first frame are zeros, gfootball's repeat it
            np.testing.assert_array_equal(seen[known], stacked[known])
        chosen = rng.integers(19, size=2)
        step = env.step(chosen)
        for slot, twin in enumerate(twins):
            own[slot], reward, done, _ = twin.step(int(chosen[slot]))
            assert step.reward[slot] == np.float32(reward)
            assert (step.terminated | step.truncated)[slot] == done
            if done:
                np.testing.assert_array_equal(
                    pixels(step.final_obs[slot])[-1], own[slot].transpose(2, 0, 1)[12:]
                )
                own[slot] = begin(slot)
        obs, games = step.obs, games + len(step.episodes)
    assert games > 2
    env.close()


def test_a_goal_terminates_and_counts_apart_from_checkpoints() -> None:
    env = make_vector(config(kwargs={"rewards": "scoring,checkpoints"}), 1, seed=1)
    env.reset()
    for action in (RIGHT, RIGHT, RIGHT, RIGHT, SPRINT, SPRINT, *[SHOT] * 40):
        step = env.step(np.array([action]))
        if step.episodes:
            break
    assert (step.terminated[0], step.truncated[0]) == (True, False)
    assert step.episodes[0].return_raw == pytest.approx(2.0)  # ten checkpoints of 0.1, and the goal
    assert step.episodes[0].score == 1.0
    env.close()


def test_the_clock_cuts_short() -> None:
    env = make_vector(config("football:1_vs_1_easy"), 1, seed=1)
    env.reset()
    steps = [env.step(np.array([IDLE])) for _ in range(501)]
    assert not any(step.terminated[0] for step in steps)
    assert [bool(step.truncated[0]) for step in steps] == [False] * 500 + [True]
    assert steps[-1].episodes[0].score == 0.0
    assert not steps[-1].obs[0, :-1].any()  # the next game's first
    env.close()


def played(env_id: str, seed: int, **fields: object) -> np.ndarray:
    env, rng = make_vector(config(env_id, **fields), 2, seed), np.random.default_rng(0)
    rows = [env.reset()] + [env.step(rng.integers(19, size=2)).obs for _ in range(60)]
    env.close()
    return np.stack(rows)


def test_a_seed_says_how_games_go_whatever_else_the_process_draws() -> None:
    name = "football:academy_3_vs_1_with_keeper"
    first = played(name, 1)
    random.seed(4)
    other = make_vector(config(), 1, 9)  # engines are used again: this one may be of the vector before
    other.reset()
    np.testing.assert_array_equal(played(name, 1), first)
    assert (played(name, 2) != first).any()
    other.close()


def test_processes_play_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    rows = played("football:academy_pass_and_shoot_with_keeper", 1, processes=2)
    assert rows.shape == (61, 2, 4, 4, 72, 12)
    assert pixels(rows[-1])[:, -1].any(axis=(-2, -1)).all()  # each plane shows somebody


def test_a_failure_is_followed_by_a_new_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that failed is not used again: gfootball keeps those that are closed."""
    env = make_vector(config(), 2, seed=1)
    env.reset()
    broken = env._fields[0]._env.unwrapped._env._env  # type: ignore[attr-defined]

    def fail(action: int) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(env._fields[0]._env, "step", fail)  # type: ignore[attr-defined]
    step = env.step(np.array([RIGHT, RIGHT]))
    assert step.discarded == [0]
    assert env._fields[0]._env.unwrapped._env._env is not broken  # type: ignore[attr-defined]
    assert not env.step(np.array([RIGHT, RIGHT])).discarded
    env.close()


def test_a_scenario_that_there_is_not_is_named_and_ends_nothing() -> None:
    with pytest.raises(ConfigError, match="did you mean football:academy_empty_goal_close"):
        make_spec(config("football:academy_empty_goal_clos"))


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    played(CLOSE, 1)
    assert os.listdir(tmp_path) == []
