"""Environments that are one object for each copy, put together to one auto-resetting `VectorEnv`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from common.envs.base import (
    KEPT_FAILURES,
    EnvSpec,
    Failure,
    GameTracker,
    Rebuilder,
    Step,
    VectorEnv,
    cause_of,
    clip_rewards,
    slot_seeds,
)
from common.envs.calls import MAKING, RESET, STEP, Calls
from common.envs.returned import BadReturn, check_array, check_finite, finite_error, not_finite
from common.envs.spectator import NoPictureError, spectator_view

if TYPE_CHECKING:
    from common.config.schema import EnvConfig


Outcome = tuple[np.ndarray, float, bool, bool]
"""Next observation, raw reward, terminated, truncated."""
_NOTHING: Any = (None, 0.0, False, False)
"""In the place of an outcome that is none."""
_CAUGHT = (Exception, SystemExit)
"""What an environment may raise without ending the process: it may also call `exit()`."""


class Slot(Protocol):
    """One copy of an environment, with its observation as the agent sees it."""

    obs: np.ndarray
    """The newest observation."""

    def reset(self, seed: int | None = None) -> np.ndarray:
        """First observation of a new episode; the first one after building is seeded in any case."""

    def step(self, action: Any) -> Outcome:
        """One row of actions, a list or an int; does not reset."""

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
    ) -> None:
        """`slots` are stepped one after the other, or in `threads` threads."""
        self.spec = spec
        self.num_slots = len(slots)
        self._config = config
        self._clip = "none" if evaluation else config.reward_clip
        self._seeds = np.random.SeedSequence(seed)
        self._slots = slots
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(self.num_slots)
        self._blank = np.zeros(spec.obs_shape, spec.obs_dtype)
        self._rebuilders = [Rebuilder() for _ in slots]
        self._games = GameTracker(self.num_slots)
        for slot, slot_seed in enumerate(slot_seeds(seed, self.num_slots).tolist()):
            self.calls.seeded(slot, slot_seed)  # what every family gives its copies
        self._pool = ThreadPoolExecutor(threads, "env") if threads > 1 else None

    def reset(self, seed: int | None = None) -> np.ndarray:
        """New episodes everywhere, `[S, *obs_shape]`."""
        self._games = GameTracker(self.num_slots)
        seeds: list[int] | None = None if seed is None else slot_seeds(seed, self.num_slots).tolist()
        for slot in range(self.num_slots):
            self._reset_slot(slot, None if seeds is None else seeds[slot])
        return np.stack([s.obs for s in self._slots])

    def step(self, actions: np.ndarray) -> Step:
        """One step of every copy."""
        outcomes = self._outcomes(actions.tolist())
        obs = self._checked(outcomes)
        failed = {slot: each for slot, each in enumerate(outcomes) if isinstance(each, BaseException)}
        whole = [_NOTHING if isinstance(each, BaseException) else each for each in outcomes]
        _, rewards, terminated, truncated = zip(*whole, strict=True)
        reward = np.array(rewards, np.float64)
        step = Step(obs, np.empty(0), np.array(terminated, bool), np.array(truncated, bool))
        self._games.add(reward)
        frames = self._games.steps * self.spec.frames_per_step
        step.truncated |= (frames >= self._config.max_episode_frames) & ~step.terminated
        for slot, rebuilder in enumerate(self._rebuilders):
            if slot not in failed:
                rebuilder.succeeded()
        for slot, error in failed.items():
            step.terminated[slot] = step.truncated[slot] = False
            step.discarded.append(slot)
            self._recover(slot, error, int(self._games.steps[slot]))
            obs[slot] = self._slots[slot].obs
        for slot in np.flatnonzero(step.terminated | step.truncated).tolist():
            step.final_obs[slot] = obs[slot].copy()
            step.episodes.append(self._games.finish(slot, int(frames[slot]), self._task(slot)))
            self._reset_slot(slot)
            obs[slot] = self._slots[slot].obs
        step.reward = clip_rewards(reward, self._clip)
        return step

    def _task(self, slot: int) -> str:
        """See `Episode.task`, of the episode that the slot is in."""
        return ""

    def _outcomes(self, actions: list[Any]) -> list[Outcome | BaseException]:
        """What each copy returned, or the exception that it raised."""
        calls, steps = self.calls, self._games.steps.tolist()

        def attempt(slot: int) -> Outcome | BaseException:
            calls.enter(slot, STEP, steps[slot] + 1)
            try:
                return self._slots[slot].step(actions[slot])
            except _CAUGHT as error:
                return error
            finally:
                calls.leave(slot)

        slots = range(self.num_slots)
        return list(self._pool.map(attempt, slots) if self._pool else map(attempt, slots))

    def _checked(self, outcomes: list[Outcome | BaseException]) -> np.ndarray:
        """The observations `[S, *obs_shape]`; an outcome that is not one becomes its error.

        All are looked at together, and one by one only where something is wrong.
        """
        obs = self._stacked(outcomes)
        if obs is None:
            for slot, outcome in enumerate(outcomes):
                if not isinstance(outcome, BaseException):
                    try:
                        check_array(outcome[0], self._blank)
                    except BadReturn as error:
                        outcomes[slot] = error
            obs = self._stacked(outcomes)
            assert obs is not None
        for slot in not_finite(obs):
            outcomes[slot] = finite_error(obs[slot])
        return obs

    def _stacked(self, outcomes: list[Outcome | BaseException]) -> np.ndarray | None:
        """The observations in one array; None where they do not all have the announced shape and type."""
        try:
            obs = np.stack([self._blank if isinstance(o, BaseException) else o[0] for o in outcomes])
        except (ValueError, TypeError):
            return None
        right = obs.shape[1:] == self._blank.shape and obs.dtype == self._blank.dtype
        return obs if right else None

    def _reset_slot(self, slot: int, seed: int | None = None) -> None:
        try:
            self._begin(slot, seed)
        except _CAUGHT as error:
            self._recover(slot, error, 0)

    def _begin(self, slot: int, seed: int | None = None) -> None:
        """The first observation of an episode, checked."""
        if seed is not None:
            self.calls.seeded(slot, seed)
        self.calls.enter(slot, RESET)
        obs = self._slots[slot].reset(seed)
        self.calls.leave(slot)
        check_array(obs, self._blank)
        check_finite(obs)

    def _recover(self, slot: int, error: BaseException, step: int) -> None:
        """Rebuild until a reset succeeds, or until the rebuilder gives up."""
        self._games.clear(slot)
        while True:
            self.calls.leave(slot)
            failure = Failure(self._config.id, cause_of(error), slot, step, self.calls.seed_of(slot))
            self.restarts_total += 1
            self.failures.append(failure)
            self._rebuilders[slot].failed(failure)
            try:
                self.calls.enter(slot, MAKING)
                again_seed = int(self._seeds.spawn(1)[0].generate_state(1)[0] >> 1)
                self.calls.seeded(slot, again_seed)
                self._slots[slot].rebuild(again_seed)
                self._begin(slot)
                return
            except _CAUGHT as again:
                error, step = again, 0

    def render_frame(self, slot: int) -> np.ndarray:
        """The environment's own picture."""
        try:
            return spectator_view(self.spec.id, self._slots[slot].render())
        except NoPictureError:
            raise
        except _CAUGHT as error:
            raise NoPictureError(f"{self.spec.id} cannot draw itself: {cause_of(error)}") from error

    def close(self) -> None:
        """Close every copy."""
        if self._pool:
            self._pool.shutdown()
        for slot in self._slots:
            slot.close()
        super().close()
