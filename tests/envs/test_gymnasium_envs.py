from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import EnvError, base, make_spec, make_vector
from troupe.common.errors import ConfigError

COUNTING = "tests.envs.counting:Counting-v0"


def config(env_id: str = COUNTING, **fields: object) -> EnvConfig:
    return EnvConfig(id=env_id, **{"reward_clip": "sign", **fields})  # type: ignore[arg-type]


def actions(n: int) -> np.ndarray:
    return np.zeros(n, np.int64)


def test_cartpole_spec_and_steps() -> None:
    spec = make_spec(config("gym:CartPole-v1"))
    assert (spec.obs_shape, spec.obs_dtype, spec.actions.count) == ((4,), "float32", 2)
    assert (spec.stack, spec.pixels, spec.frames_per_step) == (0, False, 1)
    env = make_vector(config("gym:CartPole-v1"), 3, seed=7)
    obs = env.reset()
    assert obs.shape == (3, 4)
    assert obs.dtype == np.float32
    assert not np.array_equal(obs[0], obs[1])  # every slot has its own seed
    step = env.step(actions(3))
    assert step.obs.shape == (3, 4)
    assert step.reward.dtype == np.float32
    again = make_vector(config("gym:CartPole-v1"), 3, seed=7)
    np.testing.assert_array_equal(obs, again.reset())


@pytest.mark.parametrize("ends_by", ["termination", "truncation"])
@pytest.mark.parametrize("threads", [1, 2])
def test_final_observation_is_of_the_old_episode(ends_by: str, threads: int) -> None:
    env = make_vector(config(kwargs={"length": 5, "ends_by": ends_by}), 2, seed=1, threads=threads)
    np.testing.assert_array_equal(env.reset(), [[0, 0], [0, 0]])
    for episode in range(3):
        for t in range(1, 5):
            step = env.step(actions(2))
            np.testing.assert_array_equal(step.obs, [[episode, t]] * 2)
            assert not step.final_obs
            assert not step.episodes
        step = env.step(actions(2))
        np.testing.assert_array_equal(step.obs, [[episode + 1, 0]] * 2)
        np.testing.assert_array_equal(step.final_obs[0], [episode, 5])
        np.testing.assert_array_equal(step.final_obs[1], [episode, 5])
        assert step.terminated.tolist() == [ends_by == "termination"] * 2
        assert step.truncated.tolist() == [ends_by == "truncation"] * 2
        assert [(e.slot, e.return_raw, e.steps) for e in step.episodes] == [(0, 12.5, 5), (1, 12.5, 5)]
        np.testing.assert_array_equal(step.reward, [1, 1])  # clipped for learning, not for the return


def test_evaluation_does_not_clip() -> None:
    env = make_vector(config(), 1, seed=1, evaluation=True)
    env.reset()
    assert env.step(actions(1)).reward[0] == 2.5


def test_frame_cap_truncates() -> None:
    env = make_vector(config(max_episode_frames=3, kwargs={"length": 100}), 1, seed=1)
    env.reset()
    steps = [env.step(actions(1)) for _ in range(3)]
    assert [bool(s.truncated[0]) for s in steps] == [False, False, True]
    assert not steps[-1].terminated[0]
    np.testing.assert_array_equal(steps[-1].final_obs[0], [0, 3])
    np.testing.assert_array_equal(steps[-1].obs[0], [1, 0])


def test_first_action_number_is_added() -> None:
    env = make_vector(config(kwargs={"start": 4}), 1, seed=1)
    env.reset()
    env.step(actions(1))  # the environment asserts that the action is one of its own
    assert env.restarts_total == 0


def test_failure_discards_the_episode_and_rebuilds() -> None:
    env = make_vector(config(kwargs={"fail_at": (0, 2)}), 2, seed=1)
    env.reset()
    env.step(actions(2))
    env.step(actions(2))
    step = env.step(actions(2))
    assert step.discarded == [0, 1]
    assert not step.terminated.any()
    assert not step.episodes
    assert env.restarts_total == 2
    np.testing.assert_array_equal(step.obs, [[0, 0], [0, 0]])  # a new object counts from its first episode


@pytest.mark.parametrize("slots", [1, 3])
def test_endless_failure_gives_up_in_one_line(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(base.Rebuilder.__init__, "__defaults__", (pauses.append, lambda: sum(pauses)))
    env = make_vector(config(kwargs={"fail_always": True}), slots, seed=1)
    env.reset()
    for _ in range(8):
        assert env.step(actions(slots)).discarded == list(range(slots))
    with pytest.raises(EnvError, match="failed 9 times in a row") as error:
        env.step(actions(slots))
    assert "\n" not in str(error.value)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30]  # of all copies together


def test_pixels_are_grey_resized_and_stacked() -> None:
    cfg = config("tests.envs.counting:Colour-v0")
    spec = make_spec(cfg)
    assert (spec.obs_shape, spec.obs_dtype, spec.stack, spec.pixels) == ((4, 84, 84), "uint8", 4, True)
    env = make_vector(cfg, 2, seed=1, evaluation=True)
    obs = env.reset()
    assert obs[:, :, 40, 40].tolist() == [[0, 0, 0, 10]] * 2
    for _ in range(5):
        step = env.step(actions(2))
    assert step.obs[:, :, 5, 5].tolist() == [[12, 13, 14, 15]] * 2
    step = env.step(actions(2))
    assert step.final_obs[1][:, 0, 0].tolist() == [13, 14, 15, 16]
    assert step.obs[:, :, 0, 0].tolist() == [[0, 0, 0, 10]] * 2
    frame = env.render_frame(1)
    assert frame is not None
    assert frame.shape == (96, 64, 3)


def test_colour_frames_are_channel_first() -> None:
    cfg = config("tests.envs.counting:Colour-v0", grayscale=False)
    assert make_spec(cfg).obs_shape == (4, 3, 84, 84)
    assert make_vector(cfg, 1, seed=1).reset().shape == (1, 4, 3, 84, 84)


def test_flattened_symbols_become_one_hot() -> None:
    env = make_vector(config("gym:FrozenLake-v1", flatten=True), 1, seed=1)
    assert env.spec.obs_shape == (16,)
    assert env.reset()[0].tolist() == [1.0] + [0.0] * 15


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("gym:CartPol-v1", "did you mean gym:CartPole-v1"),
        ("gym:CartPole-v7", "gym:CartPole-v1"),
        ("gym:cartpole", "did you mean gym:CartPole-v1"),
        ("gym:Nope-v5", "'gym:Nope-v5': Environment `Nope` doesn't exist"),
        ("no_such_package.envs:Thing-v0", "PYTHONPATH"),
        ("tests.envs.counting:Countin-v0", "did you mean tests.envs.counting:Counting-v0"),
        ("tests.envs.said:Wolf-v0", "the module registers Said-v0"),
        ("old_gym:tests.envs.said:Wolf-v0", "the module registers Said-v0"),
        ("tests.envs.said:Sayd-v0", "did you mean tests.envs.said:Said-v0"),
        ("tests.envs.crowd:Crowdd", r"did you mean tests.envs.crowd:Crowd\?"),
        ("json:Wolf-v0", "the module registers no environment of its own"),
        ("CartPole-v1", "has no family: did you mean gym:CartPole-v1"),
        ("CartPol-v1", "has no family: did you mean gym:CartPole-v1"),
        ("Plain-v0", "has no family: write atari:GAME, .*dm_control:.* or package.module:ID"),
        ("gym:", "has no family"),
        ("minatarr:breakout", "neither a family nor a module minatarr; did you mean minatar:breakout"),
        ("football_:a", "did you mean football:a"),
    ],
)
def test_wrong_ids_are_one_line(env_id: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_spec(config(env_id))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "env_id",
    [
        "troupe.common.envs.gymnasium_envs:os.mkdir",
        "troupe.common.envs.gymnasium_envs:import_module",
        "troupe.common.envs.in_process:hold",
        "tests.envs.reaching:os.mkdir",
        "tests.envs.reaching:mkdir",
        "tests.envs.reaching:Reaching.step.__globals__.get",
    ],
)
def test_nothing_is_called_but_what_the_module_itself_defines(env_id: str, tmp_path: Path) -> None:
    kwargs = {"path": str(tmp_path / "made"), "module": "this", "needed_by": "", "name": "x", "make": "y"}
    for chosen in (["path"], ["module", "needed_by"], ["name", "make"], []):
        with pytest.raises(ConfigError, match=r"unknown environment|was in the process that trained"):
            make_spec(config(env_id, kwargs={name: kwargs[name] for name in chosen}))
    assert not (tmp_path / "made").exists()


def test_wrong_kwargs_are_one_line() -> None:
    with pytest.raises(ConfigError, match="cannot be made with kwargs"):
        make_spec(config(kwargs={"colour": "red"}))


@pytest.mark.parametrize("raised", ["ZeroDivisionError('no\\nway')", "SyntaxError('no way')"])
def test_a_module_that_fails_in_its_own_code_is_one_line(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_games.py").write_text(f"raise {raised}")
    monkeypatch.syspath_prepend(tmp_path)
    kind = raised.partition("(")[0]
    said = rf"importing their_games failed: {kind}: no way \(their_games.py:1\)$"
    with pytest.raises(ConfigError, match=said) as error:
        make_spec(config("their_games:Maze-v0"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_an_environment_that_fails_in_its_own_constructor_is_one_line(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def constructor(**_: object) -> None:
        raise error("no licence\nfound")

    monkeypatch.setitem(
        gymnasium.registry, "Broken-v0", gymnasium.envs.registration.EnvSpec("Broken-v0", constructor)
    )
    line = constructor.__code__.co_firstlineno + 1
    said = rf"cannot be made .*: {error.__name__}: no licence found \(test_gymnasium_envs.py:{line}\)$"
    with pytest.raises(ConfigError, match=f"^gym:Broken-v0 {said}"):
        make_spec(config("gym:Broken-v0"))


def test_an_environment_without_a_space_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"Spaceless cannot be made .* no attribute 'observation_space'"):
        make_spec(config("tests.envs.test_gymnasium_envs:Spaceless"))
    with pytest.raises(ConfigError, match=r"has observations Box.* without a number"):
        make_spec(config("tests.envs.test_gymnasium_envs:Numberless"))


def test_wrappers_go_round_the_environment_the_first_one_innermost() -> None:
    wrappers = ["tests.envs.test_gymnasium_envs:Doubled", "tests.envs.test_gymnasium_envs:Shifted"]
    env = make_vector(config(reward_clip="none", wrappers=wrappers), 1, seed=1)
    assert env.spec.obs_shape == (3,)
    assert env.reset().tolist() == [[0, 0, 7]]
    assert env.step(actions(1)).reward.tolist() == [2 * 2.5 + 1]
    with pytest.raises(ConfigError, match="has no Missing to call"):
        make_spec(config(wrappers=["tests.envs.test_gymnasium_envs:Missing"]))
    with pytest.raises(ConfigError, match=r"env.wrappers of .* needs the module no_such_package"):
        make_spec(config(wrappers=["no_such_package:Wrap"]))


class Spaceless(gymnasium.Env):  # type: ignore[type-arg]
    action_space = gymnasium.spaces.Discrete(2)


class Numberless(Spaceless):
    observation_space = gymnasium.spaces.Box(0, 1, (0,))


class Doubled(gymnasium.RewardWrapper):
    def reward(self, reward: Any) -> float:
        return 2 * float(reward)


class Shifted(gymnasium.ObservationWrapper):
    """Another reward, and one more number to see."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(-1e9, 1e9, (3,), np.float64)

    def observation(self, observation: Any) -> np.ndarray:
        return np.append(observation, 7.0)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, float(reward) + 1, *rest
