"""Environments that are one object for each copy, put together to one auto-resetting `VectorEnv`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

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
    slot_seeds,
    told_in,
)
from troupe.common.envs.calls import MAKING, RESET, STEP, Calls
from troupe.common.envs.returned import as_announced, check_outcome, finite_error, not_finite, taken_for
from troupe.common.envs.spectator import picture_of
from troupe.common.errors import caught

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig


Outcome = tuple[Any, Any, Any, Any]
"""Next observation, raw reward, terminated, truncated, as the environment gave them."""


class Slot(Protocol):
    """One copy of an environment. `SlotVector` looks at what it returns, of all copies together."""

    def reset(self, seed: int | None = None) -> Any:
        """First observation of a new episode; the first one after building is seeded in any case."""

    def step(self, action: Any) -> Outcome:
        """One action in the environment's own form (`ActionSpec.natives`); does not reset."""

    def rebuild(self, seed: int) -> None:
        """Throw the environment away and make a new one."""

    def render(self) -> Any:
        """What a spectator sees, as `spectator_view` takes it; NoPictureError where there is nothing."""

    def close(self) -> None:
        """Free what the environment holds."""


class SlotVector(VectorEnv):
    """Copies that are reset in the step in which their episode ends, and rebuilt when they fail."""

    def __init__(
        self,
        config: EnvConfig,
        spec: EnvSpec,
        slots: Sequence[Slot],
        seed: int,
        threads: int,
        *,
        evaluation: bool,
        returned: np.ndarray | None = None,
    ) -> None:
        """`slots` are stepped one after the other, or in `threads` threads.

        What they return has the shape of `returned`, and a dtype that goes into its own; those of `spec`
        where it is None. `_seen` makes the one of the other.
        """
        self.spec = spec
        self.num_slots = len(slots)
        self._config = config
        self._clip = "none" if evaluation else config.reward_clip
        self._seeds = np.random.SeedSequence(seed)
        self._slots = slots
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(self.num_slots)
        self._announced = np.zeros(spec.obs_shape, spec.obs_dtype) if returned is None else returned
        self._dtype = np.dtype(spec.obs_dtype)
        self._steps_of_a_game = math.ceil(config.max_episode_frames / spec.frames_per_step)
        self._sure_steps = 0  # for this many more, no game can reach its limit
        self._failing: set[int] = set()  # slots whose last call failed
        self._rebuilders = [Rebuilder() for _ in slots]
        self._games = GameTracker(self.num_slots)
        for slot, slot_seed in enumerate(slot_seeds(seed, self.num_slots).tolist()):
            self.calls.seeded(slot, slot_seed)  # what every family gives its copies
        self._pool = ThreadPoolExecutor(threads, "env") if threads > 1 else None

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """New episodes everywhere, `[S, *obs_shape]`."""
        self._games = GameTracker(self.num_slots)
        if seed is None:
            return self._begin(range(self.num_slots))
        seeds: list[int] = slot_seeds(seed, self.num_slots).tolist()
        for slot, slot_seed in enumerate(seeds):
            self.calls.seeded(slot, slot_seed)
        return self._begin(range(self.num_slots), seeds)

    def step(self, actions: np.ndarray) -> Step:
        """One step of every copy."""
        failed, over = dict[int, BaseException](), list[int]()
        natives = self.spec.actions.natives(actions)
        # All copies are stepped before anything is looked at: checks of one array of all take a fraction of
        # those of each.
        returned, reward, terminated, truncated = self._play(natives, failed, over)
        obs = self._observed(returned, failed)
        games = self._games
        games.add(reward)
        self._sure_steps -= 1
        if self._sure_steps <= 0:
            steps = np.array([games.length(slot) for slot in range(self.num_slots)])
            # Termination wins: a game that ends in its last permitted step has no value after it.
            truncated |= (steps >= self._steps_of_a_game) & ~terminated
            over = np.flatnonzero(terminated | truncated).tolist()
            self._sure_steps = self._steps_of_a_game - games.longest()
        step = Step(obs, clip_rewards(reward, self._clip), terminated, truncated)
        if failed or self._failing:
            self._discard(step, failed)
        if over:
            # A copy that failed in the step that ended its episode has no last observation to hand over.
            over = sorted(set(over) - failed.keys())
            for slot in over:
                step.final_obs[slot] = obs[slot].copy()
                frames = games.length(slot) * self.spec.frames_per_step
                told = told_in(getattr(self._slots[slot], "info", None))
                step.episodes.append(games.finish(slot, frames, self._task(slot), self._score(slot), told))
            # Only now, for a copy may return the same array again, with other numbers in it.
            for slot, first in zip(over, self._begin(over), strict=True):
                obs[slot] = first
        return step

    def _discard(self, step: Step, failed: dict[int, BaseException]) -> None:
        """Void the episodes of the slots that failed, and begin others."""
        for slot in self._failing - failed.keys():
            self._rebuilders[slot].succeeded()
        self._failing.clear()
        for slot, error in sorted(failed.items()):
            step.reward[slot], step.terminated[slot], step.truncated[slot] = 0.0, False, False
            step.discarded.append(slot)
            step.obs[slot] = self._recover(slot, error, self._games.length(slot))

    def _task(self, slot: int) -> str:
        """See `Episode.task`, of the episode that the slot is in."""
        return ""

    def _score(self, slot: int) -> float | None:
        """See `Episode.score`, of the episode that the slot has ended."""
        return None

    def _play(
        self, actions: Sequence[Any], failed: dict[int, BaseException], over: list[int]
    ) -> tuple[list[Any], np.ndarray, np.ndarray, np.ndarray]:
        """One step of each copy: `over` gets those whose episode it ends, `failed` the errors of others.

        Returns: observations as they came; raw rewards float64 `[S]`; terminated and truncated, bool `[S]`.
        """
        current, slots, count = self.calls.current, self._slots, self.num_slots
        returned: list[Any] = [self._announced] * count
        rewards, terminated, truncated = np.zeros(count), np.zeros(count, bool), np.zeros(count, bool)

        def run(some: Sequence[int]) -> None:
            for slot in some:
                current[slot] = STEP
                try:
                    obs, reward, ended, cut = slots[slot].step(actions[slot])
                    check_outcome(reward, ended, cut)
                    returned[slot], rewards[slot] = obs, reward
                    if ended or cut:
                        terminated[slot], truncated[slot] = bool(ended), bool(cut)
                        over.append(slot)
                except caught() as error:
                    failed[slot] = error
                current[slot] = 0

        self.calls.announce_steps()
        if self._pool:
            # `list` waits for all of them; what one raises is in `failed` already.
            list(self._pool.map(run, [(slot,) for slot in range(self.num_slots)]))
        else:
            run(range(self.num_slots))
        return returned, rewards, terminated, truncated

    def _observed(self, returned: Sequence[Any], failed: dict[int, BaseException]) -> np.ndarray:
        """What the network gets of what copies returned, a new array `[N, *obs_shape]`.

        All are looked at together, and one by one only where something is wrong; that goes to `failed`, by
        place.
        """
        announced = self._announced
        try:
            # A copy, always: a list of references to arrays that environments write to again would change
            # under the learner.
            together: np.ndarray | None = np.array(returned)
        except caught():  # they are not alike, or no arrays
            together = None
        if together is None or together.shape[1:] != announced.shape or not taken_for(together, announced):
            arrays = [announced] * len(returned)
            for place, each in enumerate(returned):
                try:
                    arrays[place] = as_announced(each, announced)
                except caught() as error:
                    failed.setdefault(place, error)
            together = np.array(arrays)
        obs = self._seen(together.astype(announced.dtype, copy=False))
        for place in not_finite(obs):
            failed.setdefault(place, finite_error(obs[place]))
        return obs

    def _seen(self, returned: np.ndarray) -> np.ndarray:
        """What the network gets, `[N, *obs_shape]`, of what the copies return; both new arrays."""
        return returned.astype(self._dtype, copy=False).reshape(len(returned), *self.spec.obs_shape)

    def _begin(self, slots: Sequence[int], seeds: Sequence[int] = ()) -> np.ndarray:
        """First observations `[N, *obs_shape]`; of a new environment where the old one fails."""
        failed = dict[int, BaseException]()
        returned: list[Any] = [self._announced] * len(slots)
        for place, slot in enumerate(slots):
            self.calls.enter(slot, RESET)
            try:
                returned[place] = self._slots[slot].reset(seeds[place] if seeds else None)
            except caught() as error:
                failed[place] = error
            self.calls.leave(slot)
        obs = self._observed(returned, failed)
        for place, why in failed.items():
            obs[place] = self._recover(slots[place], why, 0)
        return obs

    def _recover(self, slot: int, error: BaseException, step: int) -> np.ndarray:
        """Rebuild until a reset succeeds, or until the rebuilder gives up; the first observation."""
        self._games.clear(slot)
        self._failing.add(slot)
        failure = Failure(self._config.id, cause_of(error), slot, step, self.calls.seed_of(slot))
        self._count_failure(failure, self._rebuilders[slot])
        # Another seed than before: a crash that the old one leads to would only come again.
        again_seed = int(self._seeds.spawn(1)[0].generate_state(1)[0] >> 1)
        self.calls.seeded(slot, again_seed)
        self.calls.enter(slot, MAKING)
        try:
            self._slots[slot].rebuild(again_seed)
        except caught() as again:
            self.calls.leave(slot)
            # The rebuilder raises in the end, so the recursion is at most as deep as failures in a row are
            # permitted.
            return self._recover(slot, again, 0)
        first: np.ndarray = self._begin([slot])[0]
        return first

    def render_frame(self, slot: int) -> np.ndarray:
        """The environment's own picture."""
        return picture_of(self.spec.id, self._slots[slot].render)

    def close(self) -> None:
        """Close every copy."""
        if self._pool:
            self._pool.shutdown()
        for slot in self._slots:
            slot.close()
        super().close()
