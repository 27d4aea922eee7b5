"""Engines that step all slots in one call: anything with the interface of `gymnasium.vector.VectorEnv`.

Gymnasium has three ways to go on after the end of an episode, and an engine says which one in
`metadata["autoreset_mode"]`. All become the protocol of `troupe.common.envs.base.Step`:

* `SameStep`: the step that ends an episode returns the first observation of the next one, and the last one
  of the old in `info["final_obs"]`.
* `Disabled`: the engine waits for `reset(options={"reset_mask": mask})`.
* `NextStep`: the next step of that slot would be none: it resets and ignores the action. Slots step together
  here, so the slot is reset before that, by the same call as with `Disabled`.

An engine that knows no mask would reset every slot in the midst of its episode. It is refused when it does.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.data.schema import LARGEST_FLOAT
from troupe.common.envs.base import (
    KEPT_FAILURES,
    EnvSpec,
    Failure,
    GameTracker,
    Rebuilder,
    Seed,
    Step,
    VectorEnv,
    cause_of,
    clip_rewards,
    told_in,
)
from troupe.common.envs.calls import MAKING, RESET, STEP, Calls
from troupe.common.envs.observed import View
from troupe.common.envs.returned import (
    BadReturn,
    check_outcome,
    check_step,
    finite_error,
    not_finite,
    reset_result,
    taken_for,
)
from troupe.common.envs.spectator import picture_of
from troupe.common.errors import ConfigError, TroupeError, caught

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

SAME_STEP = "SameStep"
MODES = (SAME_STEP, "NextStep", "Disabled")


class EngineVector(VectorEnv):
    """One engine of `S` slots. When it fails it is made again, and the episodes of all its slots are void."""

    def __init__(
        self,
        config: EnvConfig,
        spec: EnvSpec,
        make: Callable[[], Any],
        num_slots: int,
        seed: int,
        *,
        evaluation: bool,
    ) -> None:
        """`make` returns an engine of `num_slots` environments, which is reset with a seed at first."""
        self.spec = spec
        self.num_slots = num_slots
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(num_slots, whole=True)
        self._config, self._make = config, make
        self._clip = "none" if evaluation else config.reward_clip
        self._seed: Seed | None = seed  # of the next reset
        self._seeds = np.random.SeedSequence(seed)  # of engines that take the place of one that failed
        self._rebuilder = Rebuilder()
        self._games = GameTracker(num_slots)
        self._steps_of_a_game = math.ceil(config.max_episode_frames / spec.frames_per_step)
        self._engine: Any = None
        self._build()

    def _build(self) -> None:
        """A new engine in the place of the old one, which is closed."""
        self.calls.enter(0, MAKING)
        self._shut()
        self._engine = engine = self._make()
        self.calls.leave(0)
        mode = getattr(engine, "metadata", {}).get("autoreset_mode")
        self._mode = getattr(mode, "value", mode)
        if self._mode not in MODES:
            raise ConfigError(
                f"{self._config.id} should say how it goes on after an episode: its metadata has the "
                f"autoreset_mode {self._mode!r}, none of {', '.join(MODES)}"
            )
        if engine.num_envs != self.num_slots:
            raise ConfigError(f"{self._config.id} made {engine.num_envs} environments, not {self.num_slots}")
        self._space = engine.single_observation_space
        self._views: list[View] = []  # none where all observations are converted in one go
        self._shown = np.zeros(self.num_slots, np.int64)  # observations of each slot's episode so far
        # Stacks that the engine makes itself are what the network gets.
        if self.spec.stack and self._space.shape == self.spec.obs_shape:
            return
        views = [View(self._config, self.spec, self._space) for _ in range(self.num_slots)]
        if not views[0].plain:
            self._views = views

    def _shut(self) -> None:
        if self._engine is not None:
            try:
                self._engine.close()
            except caught():  # not `suppress`, which would look whether Ctrl-C has come before it does
                pass  # it has done its work, or has failed already

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """New episodes everywhere, `[S, *obs_shape]`."""
        seed, self._seed = self._seed if seed is None else seed, None
        self._games = GameTracker(self.num_slots)
        try:
            return self._begin(None if seed is None else _one(seed))
        except TroupeError:
            raise
        except caught() as error:
            return self._recover(error, 0)

    def _begin(self, seed: int | None) -> np.ndarray:
        """First observations of all slots."""
        self.calls.enter(0, RESET)
        # Before the call, for who looks while it hangs.
        if seed is not None:
            self.calls.seeded(0, seed)
        raw = reset_result(self._engine.reset(seed=seed))
        self.calls.leave(0)
        return self._seen(raw, range(self.num_slots), first=True)

    def step(self, actions: np.ndarray) -> Step:
        """One call of the engine."""
        number = self._games.longest() + 1
        try:
            return self._step(actions)
        except TroupeError:
            raise
        except caught() as error:
            zeros, obs = np.zeros(self.num_slots, bool), self._recover(error, number)
            reward = np.zeros(self.num_slots, np.float32)
            return Step(obs, reward, zeros, zeros.copy(), discarded=list(range(self.num_slots)))

    def _step(self, actions: np.ndarray) -> Step:
        games = self._games
        self.calls.enter(0, STEP, games.longest() + 1)
        result = self._engine.step(self._native(actions))
        self.calls.leave(0)
        check_step(result)
        raw, reward, terminated, truncated, info = result
        reward, terminated, truncated = self._outcome(reward, terminated, truncated)
        ended = terminated | truncated
        same_step = self._mode == SAME_STEP and ended.any()
        last = self._with_final(raw, info, np.flatnonzero(ended)) if same_step else raw
        obs = self._seen(last, range(self.num_slots))
        # Only now: what fails before this has made no step.
        games.add(reward)
        steps = np.array([games.length(slot) for slot in range(self.num_slots)])
        # Termination wins: a game that ends in its last permitted step has no value after it.
        too_long = (steps >= self._steps_of_a_game) & ~ended
        truncated |= too_long
        step = Step(obs, clip_rewards(reward, self._clip), terminated, truncated)
        over = np.flatnonzero(ended | too_long).tolist()
        for slot in over:
            step.final_obs[slot] = obs[slot].copy()
        if same_step:
            begun = np.flatnonzero(ended).tolist()
            obs[begun] = self._seen(rows_of(raw, begun), begun, first=True)
        waiting = too_long if self._mode == SAME_STEP else ended | too_long
        if waiting.any():
            slots = np.flatnonzero(waiting).tolist()
            obs[slots] = self._restart(waiting, raw)
        for slot in over:
            told = _told(info, slot, same_step and bool(ended[slot]))
            frames = games.length(slot) * self.spec.frames_per_step
            step.episodes.append(games.finish(slot, frames, told=told))
        self._rebuilder.succeeded()
        return step

    def _native(self, actions: np.ndarray) -> Any:
        """Actions in the engine's form, a batch of its space."""
        from gymnasium.vector.utils import concatenate, create_empty_array

        space: Any = self._engine.single_action_space
        batch: Any = create_empty_array(space, self.num_slots)
        return concatenate(space, self.spec.actions.natives(actions), batch)

    def _outcome(
        self, reward: Any, terminated: Any, truncated: Any
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Raw rewards float64 `[S]`; terminated and truncated, bool `[S]`, never both."""
        shape = (self.num_slots,)
        rewards, *ends = (np.array(each) for each in (reward, terminated, truncated))
        for name, array in zip(("reward", "terminated", "truncated"), (rewards, *ends), strict=True):
            if array.shape != shape:
                raise BadReturn(f"returned {name} of shape {list(array.shape)}, not {list(shape)}")
        if rewards.dtype.kind not in "buif" or not (np.abs(rewards) <= LARGEST_FLOAT).all():
            for each in rewards.tolist():  # says what is wrong with the first of them
                check_outcome(each, False, False)
        for name, array in zip(("terminated", "truncated"), ends, strict=True):
            if array.dtype.kind not in "bui":
                raise BadReturn(f"returned {name} of {array.dtype} instead of bool")
        over, cut = (array.astype(bool) for array in ends)
        return rewards.astype(np.float64), over, cut

    # ------------------------------------------------------------ observations

    def _seen(self, raw: Any, slots: Sequence[int], *, first: bool = False) -> np.ndarray:
        """What the network gets of the batch `raw` of these slots, a new array `[N, *obs_shape]`."""
        if self._views:
            views = [self._views[slot] for slot in slots]
            rows = (_row(raw, place) for place in range(len(slots)))
            if first:
                for view in views:
                    view.begin()
            return np.stack([view.of(row) for view, row in zip(views, rows, strict=True)])
        space, array = self._space, np.array(raw)
        if array.shape != (len(slots), *space.shape) or not taken_for(array, space):
            wanted = f"{space.dtype} {[len(slots), *space.shape]}"
            raise BadReturn(f"returned observations {array.dtype} {list(array.shape)} instead of {wanted}")
        obs = array.astype(self.spec.obs_dtype, copy=False).reshape(len(slots), *self.spec.obs_shape)
        for place in not_finite(obs):
            raise finite_error(obs[place])
        if self.spec.stack:
            self._blacken(obs, slots, first=first)
        return obs

    def _blacken(self, obs: np.ndarray, slots: Sequence[int], *, first: bool) -> None:
        """Set to zero what the engine's stacks `[N, stack, ...]` show of before the episode.

        EnvPool repeats the first frame there. Unrolls store each frame once, and the learner would see frames
        of the episode before.
        """
        stack, at = self.spec.stack, list(slots)
        self._shown[at] = 1 if first else np.minimum(self._shown[at] + 1, stack)
        for place in np.flatnonzero(self._shown[at] < stack).tolist():
            obs[place, : stack - self._shown[at[place]]] = 0

    def _with_final(self, raw: Any, info: Any, ended: Iterable[int]) -> Any:
        """Observations with the last one of each episode in the place of the first of the next."""
        if "final_obs" not in info:
            raise ConfigError(
                f"{self._config.id} has the autoreset_mode SameStep, but no final_obs in its info"
            )
        last = copy.deepcopy(raw)
        for slot in ended:
            _put(last, slot, _row(info["final_obs"], slot))
        return last

    def _restart(self, mask: np.ndarray, raw: Any) -> np.ndarray:
        """Begin anew in the slots of `mask` only; their first observations, `[N, *obs_shape]`."""
        slots = np.flatnonzero(mask).tolist()
        before = copy.deepcopy(raw)  # the engine may write over its own
        self.calls.enter(0, RESET)
        after = reset_result(self._engine.reset(options={"reset_mask": mask.copy()}))
        self.calls.leave(0)
        if _length(after) == len(slots) < self.num_slots:  # of these slots alone
            return self._seen(after, slots, first=True)
        others = np.flatnonzero(~mask).tolist()
        if others and not _same(rows_of(before, others), rows_of(after, others)):
            raise ConfigError(
                f"{self._config.id} reset all of its environments where one had ended: it does not know "
                f"options={{'reset_mask': ...}}, which its autoreset_mode {self._mode} needs here; give it "
                "the mode SameStep, or play a copy for each slot, with an id without vector:"
            )
        return self._seen(rows_of(after, slots), slots, first=True)

    # ---------------------------------------------------------------- failures

    def _recover(self, error: BaseException, step: int) -> np.ndarray:
        """Make the engine again until a reset succeeds, or until the rebuilder gives up."""
        while True:
            self.calls.leave(0)
            failure = Failure(self._config.id, cause_of(error), None, step, self.calls.seed_of(0))
            self._count_failure(failure, self._rebuilder)
            self._games = GameTracker(self.num_slots)
            try:
                self._build()
                # Another seed than before: a crash that the old one leads to would only come again.
                return self._begin(_one(int(self._seeds.spawn(1)[0].generate_state(1)[0])))
            except TroupeError:
                raise
            except caught() as again:
                error, step = again, 0

    def render_frame(self, slot: int) -> np.ndarray:
        """The engine's own picture of a slot."""

        def draw() -> Any:
            frames = self._engine.render()
            return None if frames is None else frames[slot]

        return picture_of(self.spec.id, draw)

    def close(self) -> None:
        """Close the engine."""
        self._shut()
        super().close()


def _one(seed: Seed) -> int:
    """One seed for all slots of an engine, which fits a C int."""
    return int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0] >> 1)


def _row(batch: Any, place: int) -> Any:
    """The observation of one slot; a batch is an array, or a dict or tuple of batches."""
    if isinstance(batch, dict):
        return {name: _row(part, place) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_row(part, place) for part in batch)
    return batch[place]


def rows_of(batch: Any, places: Sequence[int]) -> Any:
    """The observations of some slots, copied, in this order."""
    if isinstance(batch, dict):
        return {name: rows_of(part, places) for name, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(rows_of(part, places) for part in batch)
    return np.asarray(batch)[places]


def _put(batch: Any, place: int, row: Any) -> None:
    if isinstance(batch, dict):
        for name, part in batch.items():
            _put(part, place, row[name])
    elif isinstance(batch, tuple):
        for part, value in zip(batch, row, strict=True):
            _put(part, place, value)
    else:
        batch[place] = row


def _length(batch: Any) -> int:
    while isinstance(batch, dict | tuple):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_same(part, other[name]) for name, part in one.items())
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return np.array_equal(one, other)


def _told(info: Any, slot: int, final: bool) -> dict[str, float]:
    """See `told_in`: of the arrays in `info` those numbers that the engine marks as this slot's."""
    if final:
        info = info.get("final_info", {})
    if not isinstance(info, dict):
        return {}
    own = {}
    for name, values in info.items():
        marks = info.get(f"_{name}")
        if isinstance(values, np.ndarray) and marks is not None and marks[slot]:
            own[name] = values[slot]
    return told_in(own)
