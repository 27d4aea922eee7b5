"""`vector:`: engines that step all slots in one call, whatever they do at the end of an episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.envs.clocks import Clocks
from troupe.common.agents.stored.unrolls import StoredUnrolls
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.schema import SlotStep
from troupe.common.envs import (
    EnvError,
    EnvSpec,
    Step,
    VectorEnv,
    base,
    environment_module,
    make_spec,
    make_vector,
)
from troupe.common.envs.engine import EngineVector
from troupe.common.envs.gymnasium_spaces import action_spec
from troupe.common.errors import ConfigError
from troupe.common.spaces import unpacked

MODES = ["SameStep", "NextStep", "Disabled"]
SLOTS = 3


def config(name: str = "tests.envs.clocks:Clocks", **fields: Any) -> EnvConfig:
    kwargs = {key: fields.pop(key) for key in list(fields) if key not in EnvConfig.model_fields}
    return EnvConfig.model_validate(
        {"id": f"vector:{name}", "reward_clip": "none", "kwargs": kwargs, **fields}
    )


def made(seed: int = 3, **fields: Any) -> VectorEnv:
    return make_vector(config(**fields), SLOTS, seed)


def played(vector: VectorEnv, steps: int) -> tuple[list[np.ndarray], list[Step]]:
    """First observations, and steps with observations that nothing writes to any more."""
    seen, done = [vector.reset().copy()], []
    for _ in range(steps):
        done.append(vector.step(np.zeros(SLOTS, np.int64)))
        seen.append(done[-1].obs.copy())
    vector.close()
    return seen, done


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tests.envs.clocks:Clocks", "tests.envs.clocks:Clocks-v0"])
def test_no_transition_is_over_the_border_of_two_episodes(mode: str, name: str) -> None:
    seen, steps = played(make_vector(config(name, mode=mode), SLOTS, 3), 60)
    ends = 0
    for before, step in zip(seen, steps, strict=False):
        for slot in range(SLOTS):
            over = bool(step.terminated[slot] or step.truncated[slot])
            after = step.final_obs[slot] if over else step.obs[slot]
            # The same environment, episode and draw, one step on, and that step's reward.
            assert after.tolist() == [slot, before[slot][1], before[slot][2] + 1, before[slot][3]]
            assert step.reward[slot] == after[2]
            assert over == (slot in step.final_obs)
            if over:
                ends += 1
                assert step.obs[slot][1:3].tolist() == [before[slot][1] + 1, 0]
                assert step.terminated[slot] == (after[2] % 2 == 1)
                assert step.truncated[slot] == (after[2] % 2 == 0)
        for episode in step.episodes:
            length = int(step.final_obs[episode.slot][2])
            assert (episode.steps, episode.frames) == (length, length)
            assert episode.return_raw == length * (length + 1) / 2
            assert episode.told == {"length": length}
        assert len(step.episodes) == len(step.final_obs)
        assert not step.discarded
    assert ends > 20


@pytest.mark.parametrize("mode", MODES)
def test_seeds_repeat_in_every_mode_alike(mode: str) -> None:
    def obs(seed: int, mode: str, again: int | None = None) -> list[list[list[float]]]:
        vector = made(seed, mode=mode)
        if again is not None:
            played_once = vector.reset(again)
            assert played_once.shape == (SLOTS, 4)
        found = [vector.reset(again).tolist()]
        found += [vector.step(np.zeros(SLOTS, np.int64)).obs.tolist() for _ in range(20)]
        vector.close()
        return found

    assert obs(5, mode) == obs(5, "SameStep") != obs(6, mode)
    assert obs(5, mode, again=6) == obs(6, mode)


@pytest.mark.parametrize("mode", MODES)
def test_gymnasiums_own_engine_plays_what_single_environments_do(mode: str) -> None:
    vector = make_vector(config("tests.envs.clocks:sync", mode=mode), SLOTS, 7)
    envs = [gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(SLOTS)]
    seed = int(np.random.SeedSequence(7).generate_state(1)[0] >> 1)
    first = [env.reset(seed=seed + slot)[0] for slot, env in enumerate(envs)]
    np.testing.assert_array_equal(vector.reset(), first)
    rng, ends = np.random.default_rng(0), set()
    for number in range(150):
        actions = rng.integers(2, size=SLOTS)
        actions[0] = number % 2  # stays up for twenty steps
        step = vector.step(actions)
        for slot, env in enumerate(envs):
            obs, reward, terminated, truncated, _info = env.step(actions[slot])
            assert (step.reward[slot], step.terminated[slot], step.truncated[slot]) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                ends.add("terminated" if terminated else "truncated")
                np.testing.assert_array_equal(step.final_obs[slot], obs)
                obs, _info = env.reset()
            np.testing.assert_array_equal(step.obs[slot], obs)
    assert ends == {"terminated", "truncated"}
    vector.close()


class Stacks(Clocks):
    """Stacks of four frames which an episode's first frame fills, as EnvPool's are."""

    def __init__(self, mode: str) -> None:
        super().__init__(SLOTS, mode)
        self.single_observation_space = gymnasium.spaces.Box(0, 255, (4, 2, 2), np.uint8)

    def _obs(self) -> np.ndarray:
        steps = np.maximum(0, self._step[:, None] - np.arange(4)[::-1])
        frames = (1 + 10 * (self._episode[:, None] % 25) + steps).astype(np.uint8)
        return np.tile(frames[:, :, None, None], (1, 1, 2, 2))


@pytest.mark.parametrize("mode", MODES)
def test_unrolls_hold_the_stacks_of_an_engine_as_they_were_seen(mode: str) -> None:
    actions = action_spec("", Stacks(mode).single_action_space, 0, 0.0)
    spec = EnvSpec("vector:stacks", (4, 2, 2), "uint8", actions, stack=4, frames_per_step=1, pixels=True)
    vector = EngineVector(config(), spec, lambda: Stacks(mode), SLOTS, 3, evaluation=False)
    seen, steps = played(vector, 60)
    assert seen[0][0, :, 0, 0].tolist() == [0, 0, 0, 1]
    assert sum(len(step.episodes) for step in steps) > 20
    stored = StoredUnrolls(spec, 5, 0, staggered=False)
    for slot in range(SLOTS):
        accumulator, read = stored.accumulator(0), []
        accumulator.start(seen[0][slot])
        for step in steps:
            ends = bool(step.terminated[slot]), bool(step.truncated[slot])
            after = step.final_obs.get(slot, step.obs[slot])
            for chunk in accumulator.add(SlotStep(0, 0.0, {}, after, *ends)):
                read.append(stored.read({name: each[None] for name, each in chunk.fields.items()}).obs[:, 0])
            if any(ends):
                accumulator.start(step.obs[slot])
        assert len(read) == 11
        for number, obs in enumerate(read):
            np.testing.assert_array_equal(obs, np.stack(seen)[5 * number : 5 * number + 6, slot])


@pytest.mark.parametrize("mode", MODES)
def test_a_game_that_is_too_long_is_truncated(mode: str) -> None:
    seen, steps = played(made(mode=mode, endless=True, max_episode_frames=4), 9)
    assert [bool(step.truncated.all()) for step in steps] == [number % 4 == 3 for number in range(9)]
    assert not any(step.terminated.any() for step in steps)
    assert steps[3].final_obs[1][2] == 4
    assert [obs[1][1:3].tolist() for obs in seen[3:6]] == [[0, 3], [1, 0], [1, 1]]


@pytest.mark.parametrize("mode", ["NextStep", "Disabled"])
def test_an_engine_that_resets_all_at_once_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError, match=r"reset all of its environments .* autoreset_mode " + mode):
        played(made(mode=mode, masks=False), 20)
    played(made(mode="SameStep", masks=False), 20)


def test_the_engine_of_gymnasiums_cartpole_knows_no_mask() -> None:
    with pytest.raises(ConfigError, match=r"vector:CartPole-v1 reset all of its environments"):
        played(make_vector(config("CartPole-v1"), SLOTS, 1), 200)


@pytest.mark.parametrize("mode", MODES)
def test_parts_and_pictures_are_those_of_their_slot(mode: str) -> None:
    seen, steps = played(made(mode=mode, parts=True), 30)
    leaves = make_spec(config(parts=True)).obs_leaves
    ends = 0
    for before, step in zip(seen, steps, strict=False):
        for slot in range(SLOTS):
            ends += slot in step.final_obs
            old, _ = unpacked(leaves, before[slot])
            numbers, picture = unpacked(leaves, step.final_obs.get(slot, step.obs[slot]))
            assert numbers.tolist() == [slot, old[1], old[2] + 1, old[3]]
            assert (picture == numbers[2]).all()
            _, newest = unpacked(leaves, step.obs[slot])
            assert (newest == (0 if slot in step.final_obs else numbers[2])).all()
    assert ends > 10


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "raised RuntimeError: the engine stalled"),
        ("nan", "returned an observation with nan (1 of its 4 numbers)"),
        ("reward", "returned reward of shape [2], not [3]"),
    ],
)
def test_an_engine_that_fails_is_made_again(how: str, cause: str) -> None:
    vector = made(mode="SameStep", endless=True, fails_at=5, how=how)
    vector.reset()
    for _ in range(4):
        step = vector.step(np.zeros(SLOTS, np.int64))
    step = vector.step(np.zeros(SLOTS, np.int64))
    assert step.discarded == [0, 1, 2]
    assert step.obs[:, 2].tolist() == [0, 0, 0]
    assert not np.any([step.reward, step.terminated, step.truncated])
    assert not step.final_obs
    assert vector.restarts_total == 1
    [failure] = vector.failures
    if how == "raise":
        assert failure.cause.startswith(f"{cause} (")
    else:
        assert failure.cause == cause
    assert (failure.slot, failure.step) == (None, 5)
    assert failure.seed == int(np.random.SeedSequence(3).generate_state(1)[0] >> 1)
    # The new one plays on.
    assert not vector.step(np.zeros(SLOTS, np.int64)).discarded
    vector.close()


def test_one_that_keeps_failing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BACKOFF_MAX_S", 0.0)
    vector = made(fails_at=1)
    with pytest.raises(EnvError, match=r"failed 9 times in a row, .*raised RuntimeError.* all slots"):
        played(vector, 20)
    assert vector.restarts_total == 9


def test_it_is_checked_and_played_in_processes_as_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["env", "check", "vector:tests.envs.clocks:Clocks", "--env.check_timeout_s", "200"]
    assert cli.main(words) == 0
    assert "The environment works" in capsys.readouterr().out
    vector = make_vector(config(processes=2), 4, 1)
    vector.reset()
    steps = [vector.step(np.zeros(4, np.int64)) for _ in range(10)]
    assert sum(len(step.episodes) for step in steps) > 4
    vector.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("tests.envs.clocks:single", {}, "makes a .*, which is no gymnasium.vector.VectorEnv"),
        ("tests.envs.clocks:Clock", {}, r"did you mean|registers Clocks-v0"),
        ("tests.envs.clocks:Clocks", {"mod": 1}, "cannot be made with kwargs .*'mod'"),
        ("tests.envs.clocks:Clocks", {"mode": ""}, "has the autoreset_mode None, none of SameStep, NextStep"),
        ("Acrobot-v1", {}, "without a vector_entry_point, .*: play it as gym:Acrobot-v1"),
        ("Nothing-v1", {}, "no such ID is registered"),
    ],
)
def test_what_is_wrong_with_one_is_one_line(name: str, kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        make_vector(config(name, **kwargs), SLOTS, 1)
    assert "\n" not in str(error.value)


def test_its_module_needs_permission() -> None:
    assert environment_module("vector:my.module:Engine") == "my.module"
    assert environment_module("vector:CartPole-v1") == ""
