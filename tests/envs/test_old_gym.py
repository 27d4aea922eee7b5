"""Environments with Gym's interface of before Gymnasium: bare resets, four values of a step."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import environment_module, make_spec, make_vector
from troupe.common.envs.gymnasium_envs import inspect
from troupe.common.errors import ConfigError
from troupe.services.environment.check import check


class OldSpace:
    """A Box of a library that is not Gymnasium."""

    def __init__(self) -> None:
        self.low, self.high = np.full(2, -100, np.float32), np.full(2, 100, np.float32)
        self.shape, self.dtype = (2,), np.dtype(np.float32)


class OldDiscrete:
    n = 3


class OldEnv:
    """Observations are (first number, t); after `length` steps done, by a time limit if `cut`."""

    metadata: dict[str, Any] = {"render.modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(self, length: int = 4, cut: bool = False) -> None:
        self.observation_space, self.action_space = OldSpace(), OldDiscrete()
        self._length, self._cut, self._t, self._first = length, cut, 0, 0

    def seed(self, seed: int) -> list[int]:
        self._first = seed % 100
        return [seed]

    def _obs(self) -> np.ndarray:
        return np.array([self._first, self._t], np.float32)

    def reset(self) -> np.ndarray:
        self._t = 0
        return self._obs()

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        assert action in range(3)
        self._t += 1
        done = self._t == self._length
        return self._obs(), 1.0, done, {"TimeLimit.truncated": True} if done and self._cut else {}

    def render(self, mode: str = "human") -> np.ndarray:
        assert mode == "rgb_array"
        return np.full((40, 50, 3), self._t, np.uint8)


gymnasium.register("Old-v0", entry_point=OldEnv)
gymnasium.register("OldTimed-v0", entry_point=f"{__name__}:OldEnv", max_episode_steps=3)


def make(name: str, slots: int = 2, **kwargs: object) -> Any:
    return make_vector(
        EnvConfig(id=f"old_gym:{__name__}:{name}", reward_clip="none", kwargs=kwargs),
        slots,
        1,
        evaluation=True,
    )


@pytest.mark.parametrize("cut", [False, True])
def test_four_values_and_a_bare_observation_are_understood(cut: bool) -> None:
    env = make("Old-v0", cut=cut)
    assert (env.spec.obs_shape, env.spec.actions.count) == ((2,), 3)
    first = env.reset(5)
    assert first[0, 0] != first[1, 0], "each copy has a seed of its own"
    np.testing.assert_array_equal(env.reset(5), first)
    for t in range(1, 4):
        step = env.step(np.array([2, 0]))
        assert step.obs[:, 1].tolist() == [t, t]
        assert not (step.terminated | step.truncated).any()
    assert (env.render_frame(0) == 3).all()
    step = env.step(np.array([2, 0]))
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([not cut] * 2, [cut] * 2)
    assert step.final_obs[1][1] == 4
    assert step.obs[:, 1].tolist() == [0, 0]
    assert env.restarts_total == 0
    env.close()


def test_gymnasiums_checker_does_not_blame_it_for_what_is_the_adapters() -> None:
    objections = inspect(EnvConfig(id=f"old_gym:{__name__}:Old-v0"))["objections"]
    assert not [each for each in objections if "super().reset" in each or "np_random" in each]


def test_a_time_limit_of_the_registration_holds() -> None:
    env = make("OldTimed-v0")
    env.reset()
    assert [env.step(np.zeros(2, np.int64)).truncated.tolist() for _ in range(3)][1:] == [
        [False, False],
        [True, True],
    ]


def test_five_values_are_as_good() -> None:
    env = make_vector(EnvConfig(id="old_gym:tests.envs.counting:Counting-v0"), 1, 1)
    env.reset()
    for _ in range(5):
        step = env.step(np.zeros(1, np.int64))
    assert step.terminated.tolist() == [True]
    assert not env.failures


gymnasium.register("spaced/Old-v0", entry_point=OldEnv)


def test_an_id_with_a_namespace_is_found() -> None:
    env = make("spaced/Old-v0")
    assert env.reset().shape == (2, 2)
    assert not env.step(np.zeros(2, np.int64)).discarded


class NearlyOldEnv(OldEnv, gymnasium.Env):
    """Gymnasium's class and spaces with the former `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = gymnasium.spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)


gymnasium.register("NearlyOld-v0", entry_point=NearlyOldEnv)


@pytest.mark.parametrize("name", ["Old-v0", "NearlyOld-v0"])
def test_the_former_interface_without_its_family_is_told_of_it(name: str) -> None:
    with pytest.raises(ConfigError, match="begins with old_gym:"):
        check(EnvConfig(id=f"{__name__}:{name}"), timeout_s=30.0)


def test_its_module_needs_permission_and_its_name_is_looked_up() -> None:
    assert environment_module(f"old_gym:{__name__}:Old-v0") == __name__
    with pytest.raises(ConfigError, match=f"did you mean old_gym:{__name__}:Old-v0"):
        make_spec(EnvConfig(id=f"old_gym:{__name__}:Oldd-v0"))
    with pytest.raises(ConfigError, match=r"package\.module:ID"):
        make_spec(EnvConfig(id="old_gym:Nothing-like-it-v0"))


def test_environments_of_gym_itself() -> None:
    """The old library, where it is installed, with a class and a registry of its own."""
    gym = pytest.importorskip("gym")
    gym.register("OldOwn-v0", entry_point=f"{__name__}:OldEnv", max_episode_steps=2)
    env = make("OldOwn-v0", slots=1)
    env.reset()
    env.step(np.zeros(1, np.int64))
    assert env.step(np.zeros(1, np.int64)).truncated.tolist() == [True]
    assert "gym" in sys.modules
    bit = make_vector(EnvConfig(id="old_gym:CartPole-v1"), 1, 1)
    assert bit.reset().shape == (1, 4)
    assert not bit.step(np.ones(1, np.int64)).discarded


def test_a_registry_that_is_a_dictionary_is_not_asked_for_its_former_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Registry(dict[str, Any]):
        @property
        def env_specs(self) -> None:
            raise DeprecationWarning

    spec = SimpleNamespace(entry_point=OldEnv, max_episode_steps=2, kwargs={"length": 9})
    registration = SimpleNamespace(registry=Registry({"Late-v0": spec}))
    monkeypatch.setitem(sys.modules, "gym.envs.registration", registration)
    monkeypatch.setitem(sys.modules, "gym.envs", SimpleNamespace(registration=registration))
    monkeypatch.setitem(sys.modules, "gym", SimpleNamespace())
    env = make_vector(EnvConfig(id="old_gym:Late-v0"), 1, 1)
    env.reset()
    env.step(np.zeros(1, np.int64))
    assert env.step(np.zeros(1, np.int64)).truncated.tolist() == [True]
