from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.atari import game_of
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError

ale_py = pytest.importorskip("ale_py")
PLAIN = {"noop_max": 0, "fire_reset": False, "episodic_life": False, "reward_clip": "none"}


def config(game: str, **fields: object) -> EnvConfig:
    return EnvConfig(id=f"atari:{game}", **fields)  # type: ignore[arg-type]


def oracle(game: str) -> gymnasium.Env:
    """The same preprocessing made of Gymnasium's own wrappers."""
    gymnasium.register_envs(ale_py)
    env = gymnasium.make(game, frameskip=1, repeat_action_probability=0.0)
    env = gymnasium.wrappers.AtariPreprocessing(env, noop_max=0, frame_skip=4, screen_size=84)
    return gymnasium.wrappers.FrameStackObservation(env, 4, padding_type="zero")


@pytest.mark.parametrize(("game", "gym_id"), [("pong", "ALE/Pong-v5"), ("breakout", "ALE/Breakout-v5")])
def test_bit_identical_to_gymnasium_wrappers(game: str, gym_id: str) -> None:
    env = make_vector(config(game, **PLAIN), 2, seed=5)
    obs = env.reset()
    references = [oracle(gym_id) for _ in range(2)]
    expected = [reference.reset(seed=1)[0] for reference in references]
    rng = np.random.default_rng(3)
    scores = np.zeros(2)
    games = 0
    for _ in range(500):
        np.testing.assert_array_equal(obs, np.stack(expected))
        actions = rng.integers(0, env.spec.actions.count, 2)
        step = env.step(actions)
        obs = step.obs
        for i, reference in enumerate(references):
            expected[i], reward, terminated, truncated, _ = reference.step(int(actions[i]))
            scores[i] += float(reward)
            assert step.reward[i] == reward
            assert (step.terminated[i], step.truncated[i]) == (terminated, truncated)
            if terminated or truncated:
                np.testing.assert_array_equal(step.final_obs[i], expected[i])
                (episode,) = [e for e in step.episodes if e.slot == i]
                assert episode.return_raw == scores[i]
                expected[i], _ = reference.reset()
                scores[i] = 0
                games += 1
    assert games > 0 or game == "pong"


def test_spec_of_action_sets() -> None:
    assert make_spec(config("pong")).actions.count == 6
    spec = make_spec(config("pong", full_action_space=True, frame_skip=3, frame_stack=2, frame_size=64))
    assert (spec.actions.count, spec.frames_per_step, spec.obs_shape) == (18, 3, (2, 64, 64))
    env = make_vector(config("pong", full_action_space=True), 2, seed=1)
    assert env.reset().shape == (2, 4, 84, 84)
    env.step(np.array([17, 16]))


def play(env_config: EnvConfig, steps: int, *, evaluation: bool = False, slots: int = 4) -> list:
    env = make_vector(env_config, slots, seed=11, evaluation=evaluation)
    env.reset()
    rng = np.random.default_rng(0)
    return [env.step(rng.integers(0, env.spec.actions.count, slots)) for _ in range(steps)]


def test_lost_lives_terminate_but_the_game_goes_on() -> None:
    steps = play(config("breakout"), 350)
    lost = sum(int(s.terminated.sum()) for s in steps)
    games = sum(len(s.episodes) for s in steps)
    assert games >= 2
    assert lost >= 5 * games  # five lives in each finished game
    for step in steps:
        over = {e.slot for e in step.episodes}
        assert set(step.final_obs) == set(np.flatnonzero(step.terminated | step.truncated).tolist())
        for slot in set(step.final_obs) - over:
            np.testing.assert_array_equal(step.final_obs[slot], step.obs[slot])
        for slot in over:
            assert not step.obs[slot][:3].any()  # a real reset: an empty stack with one frame
            assert step.final_obs[slot][:3].any()


def test_evaluation_plays_full_games() -> None:
    steps = play(config("breakout"), 350, evaluation=True)
    games = sum(len(s.episodes) for s in steps)
    assert games >= 2
    assert sum(int(s.terminated.sum()) for s in steps) == games


def test_returns_are_raw_and_rewards_clipped() -> None:
    steps = play(config("ms_pacman"), 600, slots=2)
    episodes = [e for s in steps for e in s.episodes]
    assert episodes
    assert all(e.return_raw >= 10 * 10 for e in episodes)  # pills give 10 points each
    assert {float(r) for s in steps for r in s.reward} <= {-1.0, 0.0, 1.0}
    raw = play(config("ms_pacman"), 600, slots=2, evaluation=True)
    assert max(float(s.reward.max()) for s in raw) >= 10
    assert sum(e.return_raw for s in raw for e in s.episodes) <= sum(float(s.reward.sum()) for s in raw)
    assert all(e.frames >= 4 * (e.steps - 1) for e in episodes)


def test_frame_cap_truncates_and_counts_frames() -> None:
    steps = play(config("pong", max_episode_frames=400, noop_max=0, fire_reset=False), 250, slots=2)
    truncations = [s for s in steps if s.truncated.any()]
    assert len(truncations) == 2
    for step in truncations:
        assert not step.terminated.any()
        assert [e.frames for e in step.episodes] == [400, 400]
        assert set(step.final_obs) == {0, 1}


def test_a_game_that_is_cut_sooner_than_the_next_begins_has_ended_all_the_same() -> None:
    steps = play(config("breakout", max_episode_frames=20), 60, slots=2)
    assert sum(step.truncated.sum() for step in steps) == 24
    for step in steps:
        assert [episode.slot for episode in step.episodes] == np.flatnonzero(step.truncated).tolist()
        assert all(episode.steps == 5 for episode in step.episodes)


def test_noop_starts_differ_and_none_does_not() -> None:
    starts = make_vector(config("pong"), 8, seed=1).reset()
    assert len({s.tobytes() for s in starts}) > 1
    same = make_vector(config("pong", noop_max=0), 8, seed=1).reset()
    assert len({s.tobytes() for s in same}) == 1


def test_sticky_actions_are_explicit() -> None:
    def trace(**fields: object) -> list[bytes]:
        env = make_vector(config("pong", noop_max=0, **fields), 2, seed=1)
        env.reset()
        return [env.step(np.array([t % 6] * 2)).obs.tobytes() for t in range(80)]

    assert trace() == trace()
    assert trace() != trace(sticky_actions=0.5)


def test_native_failure_restarts_every_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make_vector(config("pong"), 2, seed=1)
    env.reset()

    def crash(actions: np.ndarray) -> None:
        raise RuntimeError("emulator")

    monkeypatch.setattr(env._env, "step", crash)  # type: ignore[attr-defined]
    step = env.step(np.zeros(2, np.int64))
    assert step.discarded == [0, 1]
    assert env.restarts_total == 1
    assert not env.step(np.zeros(2, np.int64)).discarded


def test_names() -> None:
    assert game_of("atari:MsPacman") == "ms_pacman"
    assert game_of("atari:ms-pacman") == "ms_pacman"
    with pytest.raises(ConfigError, match="did you mean atari:pong"):
        game_of("atari:pog")


def test_a_film_shows_the_very_game_that_is_played_in_the_emulators_colours() -> None:
    import cv2

    env = make_vector(config("pong", sticky_actions=0.25), 3, seed=1, evaluation=True)
    assert env.steps_per_s == 15
    obs = env.reset()
    random = np.random.default_rng(0)
    for i in range(1200):
        if i == 900:
            obs = env.reset()
        if i % 7 == 0 or i > 1190:
            frame = env.render_frame(1)
            assert frame.shape == (210, 160, 3)
            grey = cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY)
            grey = cv2.resize(grey, (84, 84), interpolation=cv2.INTER_AREA)
            # Another place of ball or paddle makes more; so much does the larger of two frames, by colour.
            assert np.abs(grey.astype(int) - obs[1, -1]).max() <= 30
        obs = env.step(random.integers(0, 6, 3)).obs
    assert {(144, 72, 17), (92, 186, 92)} <= {tuple(colour) for colour in frame.reshape(-1, 3).tolist()}


def test_only_evaluations_are_filmed() -> None:
    env = make_vector(config("pong"), 1, seed=1)
    env.reset()
    with pytest.raises(NoPictureError, match="evaluations only"):
        env.render_frame(0)
