"""Environments that are one object for each copy, put together to one auto-resetting `VectorEnv`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.envs.base import EnvSpec, GameTracker, Rebuilder, Step, VectorEnv, clip_rewards, slot_seeds

if TYPE_CHECKING:
    from common.config.schema import EnvConfig

log = logging.getLogger(__name__)


class Slot(Protocol):
    """One copy of an environment, with its observation as the agent sees it."""

    obs: np.ndarray
    """The newest observation."""

    def reset(self, seed: int | None = None) -> np.ndarray:
        """First observation of a new episode; the first one after building is seeded in any case."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """Next observation, raw reward, terminated, truncated; does not reset."""

    def rebuild(self, seed: int) -> None:
        """Throw the environment away and make a new one."""

    def render(self) -> np.ndarray | None:
        """What a spectator sees, uint8 `[H, W, 3]`; None where there is nothing to see."""

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
        self._rebuilders = [Rebuilder(f"{config.id} in slot {i}") for i in range(self.num_slots)]
        self._games = GameTracker(self.num_slots)
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
        n = self.num_slots
        outcomes = self._outcomes(actions.tolist())
        reward = np.zeros(n, np.float64)
        step = Step(np.empty(0), np.empty(0), np.zeros(n, bool), np.zeros(n, bool))
        for slot, outcome in enumerate(outcomes):
            if not isinstance(outcome, Exception):
                _, reward[slot], step.terminated[slot], step.truncated[slot] = outcome
        self._games.add(reward)
        frames = self._games.steps * self.spec.frames_per_step
        step.truncated |= (frames >= self._config.max_episode_frames) & ~step.terminated
        for slot, outcome in enumerate(outcomes):
            if isinstance(outcome, Exception):
                step.discarded.append(slot)
                self._games.clear(slot)
                self._recover(slot, outcome)
                continue
            self._rebuilders[slot].succeeded()
            if step.terminated[slot] or step.truncated[slot]:
                step.final_obs[slot] = outcome[0]
                step.episodes.append(self._games.finish(slot, int(frames[slot])))
                self._reset_slot(slot)
        step.obs = np.stack([s.obs for s in self._slots])
        step.reward = clip_rewards(reward, self._clip)
        step.terminated[step.discarded] = False
        step.truncated[step.discarded] = False
        return step

    def _outcomes(self, actions: list[int]) -> list[tuple[np.ndarray, float, bool, bool] | Exception]:
        """What each copy returned, or the exception that it raised."""

        def attempt(slot: int) -> tuple[np.ndarray, float, bool, bool] | Exception:
            try:
                return self._slots[slot].step(actions[slot])
            except Exception as error:
                return error

        slots = range(self.num_slots)
        return list(self._pool.map(attempt, slots) if self._pool else map(attempt, slots))

    def _reset_slot(self, slot: int, seed: int | None = None) -> None:
        try:
            self._slots[slot].reset(seed)
        except Exception as error:
            self._recover(slot, error)

    def _recover(self, slot: int, error: Exception) -> None:
        """Rebuild until a reset succeeds, or until the rebuilder gives up."""
        while True:
            self._rebuilders[slot].failed(error)
            self.restarts_total += 1
            try:
                self._slots[slot].rebuild(int(self._seeds.spawn(1)[0].generate_state(1)[0] >> 1))
                self._slots[slot].reset()
                return
            except Exception as again:
                error = again

    def render_frame(self, slot: int) -> np.ndarray | None:
        """The environment's own picture."""
        try:
            return self._slots[slot].render()
        except Exception as error:
            log.debug("%s cannot draw itself: %s", self.spec.id, error)
            return None

    def close(self) -> None:
        """Close every copy."""
        if self._pool:
            self._pool.shutdown()
        for slot in self._slots:
            slot.close()
