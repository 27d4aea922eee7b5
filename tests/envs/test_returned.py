"""What environments return wrongly is refused where it comes from: what, at which step, in which copy."""

from __future__ import annotations

import json
import signal
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from tests.envs import broken
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import EnvSpec, VectorEnv, make_vector
from troupe.common.envs.base import cause_of, slot_seeds
from troupe.common.envs.calls import MAKING, RESET, STEP, Calls
from troupe.common.envs.engine import EngineVector
from troupe.common.envs.returned import BadReturn, check_observation, check_outcome
from troupe.common.envs.slots import SlotVector
from troupe.common.runtime import run_main
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.common.spaces import ActionSpec

BROKEN = "tests.envs.broken:Broken-v0"
CAUSES = {
    "nan": "returned an observation with nan (2 of its 3 numbers)",
    "inf": "returned an observation with inf (1 of its 3 numbers)",
    "shape": "returned an observation float32 [4] instead of float32 [3]",
    "scalar": "returned an observation float64 [] instead of float32 [3]",
    "dtype": "returned an observation <U1 [3] instead of float32 [3]",
    "none": "returned an observation None instead of float32 [3]",
    "nan reward": "returned the reward nan",
    "inf reward": "returned the reward -inf",
    "none reward": "returned the reward None, which is no number",
    "text reward": "returned the reward 'much', which is no number",
    "list reward": "returned the reward [1.0, 2.0], which is no number",
    "none terminated": "returned terminated None instead of True or False",
    "old interface": "returned 4 values from step(), not (observation, reward, terminated, truncated, info); "
    "Gym's old interface is understood where env.id begins with old_gym:",
    "raise": "raised RuntimeError: the physics exploded (broken.py:68)",
    "exit": "raised SystemExit: 3 (broken.py:70)",
}


def make(env_id: str = BROKEN, slots: int = 3, threads: int = 1, **kwargs: object) -> VectorEnv:
    if "copy" in kwargs:  # counted from the copies of this vector, of which the first only tells the shapes
        kwargs["copy"] = next(broken.COPIES) + 2 + int(str(kwargs["copy"]))
    return make_vector(EnvConfig(id=env_id, reward_clip="none", kwargs=kwargs), slots, 1, threads)


@pytest.mark.parametrize("fails", [lambda: json.loads("{"), lambda: np.zeros(2).reshape(3)])
def test_a_cause_names_the_line_that_called_a_library_and_none_of_the_librarys(fails: Any) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # whatever they say
        fails()
    line = fails.__code__.co_firstlineno
    assert cause_of(raised.value).endswith(f" (test_returned.py:{line})")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("how", "cause"), CAUSES.items())
def test_what_a_step_must_not_return_discards_the_episode_of_that_copy(
    how: str, cause: str, threads: int
) -> None:
    env = make(how=how, at=3, copy=1, threads=threads)
    env.reset()
    for _ in range(2):
        assert not env.step(np.zeros(3, np.int64)).discarded
    step = env.step(np.zeros(3, np.int64))
    seed = slot_seeds(1, 3)[1]
    assert [str(failure) for failure in env.failures] == [f"{BROKEN} {cause} at step 3, slot 1, seed {seed}"]
    assert step.discarded == [1]
    assert step.reward.tolist() == [1, 0, 1]
    np.testing.assert_allclose(step.obs[:, 0], [0.03, 0, 0.03])
    assert not step.terminated.any()
    assert not step.truncated.any()
    assert env.restarts_total == 1
    env.close()


def test_where_ctrl_c_raises_nothing_the_environment_did() -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        env = make(how="interrupt", at=1, copy=1)
        env.reset()
        with pytest.raises(KeyboardInterrupt):
            env.step(np.zeros(3, np.int64))
        signal.signal(signal.SIGINT, lambda *_: None)  # a service's
        env = make(how="interrupt", at=1, copy=1)
        env.reset()
        assert env.step(np.zeros(3, np.int64)).discarded == [1]
    finally:
        signal.signal(signal.SIGINT, former)
    assert "raised KeyboardInterrupt (broken.py:80) at step 1, slot 1" in str(env.failures[0])


def test_ctrl_c_while_an_engine_closes_ends_a_command() -> None:
    engine = SimpleNamespace(_engine=SimpleNamespace(close=lambda: signal.raise_signal(signal.SIGINT)))
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_main(lambda: EngineVector._shut(engine)) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("how", ["nan", "shape", "none", "old interface", "exit"])
def test_so_does_what_reset_must_not_return(how: str) -> None:
    env = make(how=how, at=0, copy=2)
    env.reset()
    (failure,) = env.failures
    cause = CAUSES[how]
    if how == "old interface":
        old = CAUSES[how].partition("; ")[2]
        cause = f"returned float32 [3] from reset(), not (observation, info); {old}"
    assert str(failure) == f"{BROKEN} {cause} in reset(), slot 2, seed {slot_seeds(1, 3)[2]}"
    assert not env.step(np.zeros(3, np.int64)).discarded


def test_a_wrapper_that_fails_over_the_old_interface_is_not_blamed() -> None:
    env = make("tests.envs.broken:BrokenTimed-v0", how="old interface", at=2, copy=0)
    env.reset()
    env.step(np.zeros(3, np.int64))
    env.step(np.zeros(3, np.int64))
    (failure,) = env.failures
    assert "returned another number of values from step() than five" in str(failure)
    assert "(expected 5, got 4)" in str(failure)
    assert "at step 2, slot 0" in str(failure)


SPACES = gymnasium.spaces
NESTED = SPACES.Dict(
    camera=SPACES.Box(0, 255, (2, 2), np.uint8),
    where=SPACES.Tuple([SPACES.Box(-1, 1, (2,)), SPACES.Discrete(3)]),
)


@pytest.mark.parametrize(
    ("space", "raw"),
    [
        (SPACES.Box(-1, 1, (2,), np.float32), np.array([5, 5])),  # bounds are the environment's business
        (SPACES.Box(-1, 1, (2,), np.float32), [0.1, 0.2]),
        (SPACES.Discrete(3, start=1), np.int64(3)),
        (SPACES.MultiBinary(2), np.array([0, 1], np.int8)),
        (NESTED, {"camera": np.zeros((2, 2), np.uint8), "where": (np.zeros(2), 2)}),
    ],
)
def test_what_loses_nothing_is_taken(space: gymnasium.Space, raw: object) -> None:
    check_observation(space, raw)


@pytest.mark.parametrize(
    ("space", "raw", "words"),
    [
        (
            SPACES.Box(0, 255, (2, 2), np.uint8),
            np.full((2, 2), 0.5),
            "float64 .2, 2. instead of uint8 .2, 2.",
        ),
        (SPACES.Box(0, 255, (2, 2), np.uint8), np.zeros((2, 2), np.int64), "int64"),
        (SPACES.Discrete(3), 3, "the observation 3, its space is Discrete"),
        (SPACES.Discrete(3), None, "the observation None"),
        (NESTED, {"camera": np.zeros((2, 2), np.uint8)}, "without 'where'"),
        (NESTED, {"camera": np.zeros((2, 3), np.uint8), "where": (np.zeros(2), 2)}, "uint8 .2, 3."),
        (NESTED, {"camera": np.zeros((2, 2), np.uint8), "where": (np.zeros(2),)}, "its space is Tuple"),
        (
            NESTED,
            {"camera": np.zeros((2, 2), np.uint8), "where": (np.zeros(2), 7)},
            "the observation 7 as its part 'where.1', its space is Discrete",
        ),
        (NESTED, np.zeros(4), "its space is Dict"),
    ],
)
def test_what_does_not_fit_its_space_is_refused(space: gymnasium.Space, raw: object, words: str) -> None:
    with pytest.raises(BadReturn, match=words):
        check_observation(space, raw)


class PartEnv(gymnasium.Env):
    """Shows a symbol and a place, of which one number is lost in step 2."""

    observation_space = SPACES.Dict(
        {"symbol": SPACES.Discrete(3), "at": SPACES.Tuple([SPACES.Box(-1, 1, (2,))])}
    )
    action_space = SPACES.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._t = 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        self._t += 1
        return self._seen(), 0.0, False, False, {}

    def _seen(self) -> dict[str, object]:
        return {"symbol": 1, "at": (np.array([0.0, np.nan if self._t == 2 else 0.5], np.float32),)}


gymnasium.register("Part-v0", entry_point=PartEnv)


def test_a_wrong_part_is_named() -> None:
    env = make("tests.envs.test_returned:Part-v0", slots=1)
    env.reset()
    for _ in range(2):
        env.step(np.zeros(1, np.int64))
    (failure,) = env.failures
    assert "returned an observation with nan as its part 'at.0' (1 of its 2 numbers) at step 2" in str(
        failure
    )
    env.close()


class ChangingSlot:
    """A copy of another family, whose observation changes its shape or type in step 2."""

    def __init__(self, then: Any, reward: Any = 0.0, truncated: Any = False) -> None:
        self._then, self._t = then, 0
        self._reward, self.truncated = reward, truncated
        self.obs = np.zeros(2, np.float32)

    def reset(self, seed: int | None = None) -> np.ndarray:
        self._t, self.obs = 0, np.zeros(2, np.float32)
        return self.obs

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        self._t += 1
        if self._t == 2:
            self.obs = self._then
        return self.obs, self._reward, False, self.truncated

    def rebuild(self, seed: int) -> None:
        self._then = np.zeros(2, np.float32)

    def render(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("then", [np.zeros(3, np.float32), np.zeros(2, np.complex64), np.array(0.0), None])
def test_every_family_is_held_to_what_it_announced(then: np.ndarray | None) -> None:
    spec = EnvSpec("other:thing", (2,), "float32", ActionSpec.discrete(2), 0, 1, False)
    slots = [ChangingSlot(np.zeros(2, np.float32)), ChangingSlot(then)]
    env = SlotVector(EnvConfig(id="other:thing"), spec, slots, 1, 1, evaluation=False)
    env.reset()
    assert not env.step(np.zeros(2, np.int64)).discarded
    step = env.step(np.zeros(2, np.int64))
    assert step.discarded == [1]
    assert step.obs.dtype == np.float32
    kind = None if then is None else f"{then.dtype} {list(then.shape)}"
    assert str(env.failures[0]) == (
        f"other:thing returned an observation {kind} instead of float32 [2] at step 2, slot 1, "
        f"seed {slot_seeds(1, 2)[1]}"
    )


def other(*slots: ChangingSlot, **fields: Any) -> SlotVector:
    spec = EnvSpec("other:thing", (2,), "float32", ActionSpec.discrete(2), 0, 1, False)
    config = EnvConfig(id="other:thing", reward_clip="none", **fields)
    return SlotVector(config, spec, list(slots), 1, 1, evaluation=False)


def test_unusual_types_of_rewards_and_endings_are_taken_as_they_are_meant() -> None:
    whole = np.zeros(2, np.float32)
    env = other(
        ChangingSlot(whole, 3, 0),
        ChangingSlot(whole, np.float32(2.5), np.bool_(True)),
        ChangingSlot(whole, np.array(4.0), 1),
    )
    env.reset()
    step = env.step(np.zeros(3, np.int64))
    assert not step.discarded
    assert step.truncated.tolist() == [False, True, True]
    assert [game.return_raw for game in step.episodes] == [2.5, 4.0]


@pytest.mark.parametrize("first", [np.float32, np.int64])
def test_numbers_of_unlike_types_go_into_the_one_that_was_announced(first: type) -> None:
    env = other(
        ChangingSlot(np.array([1, 2], first)),
        ChangingSlot([0.5, 1e-3]),
        ChangingSlot(np.array([4.0, 1 / 3])),
    )
    env.reset()
    for _ in range(2):
        step = env.step(np.zeros(3, np.int64))
    assert not step.discarded
    assert step.obs.dtype == np.float32
    np.testing.assert_array_equal(step.obs, np.array([[1, 2], [0.5, 1e-3], [4.0, 1 / 3]], np.float32))


def test_one_wrong_copy_costs_the_others_nothing() -> None:
    slots = [
        ChangingSlot([[1.0], [2.0, 3.0]]),  # no array at all
        ChangingSlot(np.array([4.0, 5.0])),
        ChangingSlot(np.array([np.inf, 5.0], np.float32), 2.0),
        ChangingSlot(np.array([6.0, 7.0], np.float32), 3.0),
    ]
    env = other(*slots)
    env.reset()
    assert not env.step(np.zeros(4, np.int64)).discarded
    slots[2].truncated = slots[3].truncated = True
    step = env.step(np.zeros(4, np.int64))
    assert step.discarded == [0, 2]
    assert [failure.slot for failure in env.failures] == [0, 2]
    assert env.failures[0].cause == "returned an observation [[1.0], [2.0, 3.0]] instead of float32 [2]"
    assert env.failures[1].cause == "returned an observation with inf (1 of its 2 numbers)"
    assert step.reward.tolist() == [0.0, 0.0, 0.0, 3.0]
    assert step.truncated.tolist() == [False, False, False, True]
    np.testing.assert_array_equal(step.obs, [[0, 0], [4, 5], [0, 0], [0, 0]])
    np.testing.assert_array_equal(step.final_obs[3], [6, 7])
    assert [game.slot for game in step.episodes] == [3]


class ReusingSlot(ChangingSlot):
    """A copy that always returns the same array."""

    def reset(self, seed: int | None = None) -> np.ndarray:
        self.obs[:] = 0
        return self.obs

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        self.obs += 1
        return self.obs, 0.0, self.obs[0] == 3, False


def test_an_array_that_is_used_again_shows_each_step() -> None:
    env = other(ReusingSlot(None))
    seen, last = [env.reset()], []
    for _ in range(4):
        step = env.step(np.zeros(1, np.int64))
        seen.append(step.obs)
        last += step.final_obs.values()
    assert [obs[0].tolist() for obs in seen] == [[0, 0], [1, 1], [2, 2], [0, 0], [1, 1]]
    assert [obs.tolist() for obs in last] == [[3, 3]]


def test_the_largest_numbers_that_replay_takes_are_taken() -> None:
    env = other(ChangingSlot(np.full(2, 1e9, np.float32)))
    env.reset()
    for _ in range(2):
        step = env.step(np.zeros(1, np.int64))
    assert not step.discarded
    assert step.obs[0, 0] == np.float32(1e9)


def test_numbers_that_replay_would_refuse_count_as_failures_of_the_environment() -> None:
    """Else the run stood still, and its log blamed whoever has an actor's key."""
    env = other(ChangingSlot(np.full(2, 2e9, np.float32)))
    env.reset()
    for _ in range(2):
        step = env.step(np.zeros(1, np.int64))
    assert step.discarded
    assert "2000000000.0 (2 of its 2 numbers), beyond 1e+09, which cannot be learned from" in str(
        env.failures[0]
    )
    with pytest.raises(BadReturn, match=r"the reward 2000000000\.0, beyond 1e\+09"):
        check_outcome(2e9, False, False)
    check_outcome(-1e9, False, False)


@pytest.mark.parametrize("ending", [(False, "False"), ("False", False)])
def test_an_ending_in_words_is_refused(ending) -> None:
    with pytest.raises(BadReturn, match=r"'False' instead of True or False"):
        check_outcome(0.0, *ending)


def test_every_game_is_cut_at_its_longest() -> None:
    env = other(ChangingSlot(np.zeros(2, np.float32)), max_episode_frames=4)
    env.reset()
    cut = [int(env.step(np.zeros(1, np.int64)).truncated[0]) for _ in range(9)]
    assert cut == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    env.reset()
    cut = [int(env.step(np.zeros(1, np.int64)).truncated[0]) for _ in range(5)]
    assert cut == [0, 0, 0, 1, 0]


def test_each_call_is_on_record_with_a_number_of_its_own_and_its_step() -> None:
    calls, numbers = Calls(3), set()
    for slot in range(3):
        for what in (MAKING, RESET):
            calls.enter(slot, what)
            (call,) = calls.running()
            assert (call.slot, call.call, call.step) == (slot, what, 0)
            calls.leave(slot)
    for step in (1, 2, 3):
        calls.announce_steps()
        assert calls.running() == []
        for slot in (2, 0, 1):
            if (slot, step) == (1, 3):  # its episode is over: another begins
                calls.enter(slot, RESET)
                calls.leave(slot)
                continue
            calls.current[slot] = STEP
            (call,) = calls.running()
            assert (call.slot, call.call, call.step) == (slot, STEP, step)
            numbers.add((slot, call.number))
            calls.current[slot] = 0
    calls.announce_steps()
    calls.current[1] = STEP
    (call,) = calls.running()
    assert call.step == 1
    assert len(numbers | {(1, call.number)}) == 9
