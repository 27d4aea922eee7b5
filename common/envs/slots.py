"""Environments that are one object for each copy, put together to one auto-resetting `VectorEnv`."""

from __future__ import annotations

import math
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
from common.envs.calls import MAKING, RESET, Calls
from common.envs.returned import (
    BadReturn,
    check_array,
    check_finite,
    check_outcome,
    finite_error,
    not_finite,
)
from common.envs.spectator import NoPictureError, spectator_view

if TYPE_CHECKING:
    from common.config.schema import EnvConfig


Outcome = tuple[Any, Any, Any, Any]
"""Next observation, raw reward, terminated, truncated, as the environment gave them."""
_CAUGHT = (Exception, SystemExit)
"""What an environment may raise without ending the process: it may also call `exit()`."""


_Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Observations `[S, *obs_shape]`, raw rewards float64 `[S]`, terminated and truncated bool `[S]`."""


class Slot(Protocol):
    """One copy of an environment. `SlotVector` looks at what it returns, of all copies together."""

    def reset(self, seed: int | None = None) -> np.ndarray:
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

        What they return is an array of the shape and dtype of `returned`, those of `spec` where it is None;
        `_seen` makes the one of the other.
        """
        self.spec = spec
        self.num_slots = len(slots)
        self._config = config
        self._clip = "none" if evaluation else config.reward_clip
        self._seeds = np.random.SeedSequence(seed)
        self._slots = slots
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(self.num_slots)
        self._blank = np.zeros(spec.obs_shape, spec.obs_dtype) if returned is None else returned
        self._dtype = np.dtype(spec.obs_dtype)
        self._steps_of_a_game = math.ceil(config.max_episode_frames / spec.frames_per_step)
        self._sure_steps = 0  # so many more, and no game has as many as it may
        self._failing: set[int] = set()  # slots whose last call failed
        self._rebuilders = [Rebuilder() for _ in slots]
        self._games = GameTracker(self.num_slots)
        for slot, slot_seed in enumerate(slot_seeds(seed, self.num_slots).tolist()):
            self.calls.seeded(slot, slot_seed)  # what every family gives its copies
        self._pool = ThreadPoolExecutor(threads, "env") if threads > 1 else None

    def reset(self, seed: int | None = None) -> np.ndarray:
        """New episodes everywhere, `[S, *obs_shape]`."""
        self._games = GameTracker(self.num_slots)
        seeds: list[int] | None = None if seed is None else slot_seeds(seed, self.num_slots).tolist()
        return np.stack(
            [self._reset_slot(slot, None if seeds is None else seeds[slot]) for slot in range(self.num_slots)]
        )

    def step(self, actions: np.ndarray) -> Step:
        """One step of every copy."""
        failed: dict[int, BaseException] = {}
        outcomes = self._outcomes(self.spec.actions.natives(actions), failed)
        obs, reward, terminated, truncated = self._checked(outcomes, failed)
        games = self._games
        games.add(reward)
        self._sure_steps -= 1
        if self._sure_steps <= 0:
            truncated |= (games.steps >= self._steps_of_a_game) & ~terminated
            self._sure_steps = self._steps_of_a_game - int(games.steps.max())
        step = Step(obs, clip_rewards(reward, self._clip), terminated, truncated)
        if self._failing:
            for slot in self._failing - failed.keys():
                self._rebuilders[slot].succeeded()
            self._failing.clear()
        for slot, error in sorted(failed.items()):
            terminated[slot] = truncated[slot] = False
            step.discarded.append(slot)
            obs[slot] = self._recover(slot, error, int(games.steps[slot]))
        for slot, ended in enumerate((terminated | truncated).tolist()):
            if not ended:
                continue
            step.final_obs[slot] = obs[slot].copy()
            frames = int(games.steps[slot]) * self.spec.frames_per_step
            step.episodes.append(games.finish(slot, frames, self._task(slot)))
            obs[slot] = self._reset_slot(slot)
        return step

    def _task(self, slot: int) -> str:
        """See `Episode.task`, of the episode that the slot is in."""
        return ""

    def _outcomes(self, actions: Sequence[Any], failed: dict[int, BaseException]) -> list[Outcome]:
        """What each copy returned; of one that raised an exception nothing, and that in `failed`."""
        calls, slots = self.calls, self._slots
        outcomes: list[Outcome] = [(self._blank, 0.0, False, False)] * self.num_slots

        def run(some: Sequence[int]) -> None:
            for slot in some:
                calls.enter_step(slot)
                try:
                    outcomes[slot] = slots[slot].step(actions[slot])
                except _CAUGHT as error:
                    failed[slot] = error
                finally:
                    calls.leave(slot)

        calls.announce_steps()
        if self._pool:
            list(self._pool.map(run, [(slot,) for slot in range(self.num_slots)]))
        else:
            run(range(self.num_slots))
        return outcomes

    def _checked(self, outcomes: list[Outcome], failed: dict[int, BaseException]) -> _Arrays:
        """Observations, rewards and endings of all copies; an outcome that is wrong goes to `failed`.

        All are looked at together, and one by one only where something is wrong.
        """
        arrays = self._together(outcomes)
        if arrays is None:
            for slot, (obs, *rest) in enumerate(outcomes):
                try:
                    check_array(obs, self._blank)
                    outcomes[slot] = (obs, *check_outcome(*rest))
                except BadReturn as error:
                    failed[slot] = error
                    outcomes[slot] = (self._blank, 0.0, False, False)
            arrays = self._together(outcomes)
            assert arrays is not None
        obs, reward, _, _ = arrays
        for slot in not_finite(obs):
            failed[slot] = finite_error(obs[slot])
            reward[slot] = 0.0
        return arrays

    def _together(self, outcomes: list[Outcome]) -> _Arrays | None:
        """The outcomes as arrays; None unless each of them is of the types that it should be, and finite."""
        returned, rewards, terminated, truncated = zip(*outcomes, strict=True)
        try:
            obs, reward = np.array(returned), np.array(rewards, np.float64)
            endings = np.array((terminated, truncated))
        except (ValueError, TypeError):
            return None
        right = (
            obs.shape[1:] == self._blank.shape
            and obs.dtype == self._blank.dtype
            and reward.shape == (len(outcomes),)
            and all(map(math.isfinite, reward.tolist()))  # half of what numpy takes for so few
            and endings.shape == (2, len(outcomes))
            and endings.dtype == bool
        )
        return (self._seen(obs), reward, *endings) if right else None

    def _seen(self, returned: np.ndarray) -> np.ndarray:
        """What the network gets, `[S, *obs_shape]`, of what the copies return; both new arrays."""
        return returned.astype(self._dtype, copy=False).reshape(len(returned), *self.spec.obs_shape)

    def _reset_slot(self, slot: int, seed: int | None = None) -> np.ndarray:
        """The first observation of a new episode; of a new environment where the old one fails."""
        try:
            return self._begin(slot, seed)
        except _CAUGHT as error:
            return self._recover(slot, error, 0)

    def _begin(self, slot: int, seed: int | None = None) -> np.ndarray:
        """The first observation of an episode, checked."""
        if seed is not None:
            self.calls.seeded(slot, seed)
        self.calls.enter(slot, RESET)
        returned = self._slots[slot].reset(seed)
        self.calls.leave(slot)
        check_array(returned, self._blank)
        obs: np.ndarray = self._seen(np.array([returned]))[0]
        check_finite(obs)
        return obs

    def _recover(self, slot: int, error: BaseException, step: int) -> np.ndarray:
        """Rebuild until a reset succeeds, or until the rebuilder gives up; the first observation."""
        self._games.clear(slot)
        self._failing.add(slot)
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
                return self._begin(slot)
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
