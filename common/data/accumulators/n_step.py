"""Turns one slot's stream of steps into chunks of n-step items with initial priorities."""

from __future__ import annotations

import numpy as np

from troupe.common.data.schema import Chunk, FieldSpec, SlotStep
from troupe.common.spaces import ActionSpec

PRIORITY_FLOOR = 1e-6
"""Added to |TD error|, so that a perfectly predicted item can still be drawn."""


def n_step_fields(
    obs_shape: tuple[int, ...],
    obs_dtype: str,
    stack: int,
    n_steps: int,
    actions: ActionSpec | None = None,
    action_bounds: tuple[float, float] | None = None,
) -> tuple[FieldSpec, ...]:
    """Fields of an n-step item: everything that a Q-learning update needs, each observation stored once.

    Args:
        obs_shape: shape of one whole observation; `(stack, H, W)` when `stack` is not 0.
        obs_dtype: numpy name of its dtype.
        stack: frames per stacked-pixel observation, or 0 for an observation that is stored whole.
        n_steps: steps over which rewards are summed.
        actions: what is chosen; None: one of several, not known how many.
        action_bounds: least and largest number of an action; None: those of `actions`.

    Returns:
        `obs`: an item sees `stack - 1 + 1 + n` single frames (or `1 + n` whole observations), so that the
        observation of its step starts at entry 0 and that of the bootstrap at entry `bootstrap_steps`;
        `action`, a row of `actions`, int32 or float32; `reward` float32, the discounted n-step sum;
        `discount` float32, what multiplies the bootstrap value (0 after a termination); `bootstrap_steps`
        uint8 in 1..n.
    """
    if stack:
        obs = FieldSpec("obs", obs_dtype, obs_shape[1:], before=stack - 1, after=n_steps, compress=True)
    else:
        obs = FieldSpec("obs", obs_dtype, obs_shape, before=0, after=n_steps)
    return (
        obs,
        _action_field(actions, action_bounds),
        FieldSpec("reward", "float32", ()),
        FieldSpec("discount", "float32", (), bounds=(0, 1)),
        FieldSpec("bootstrap_steps", "uint8", (), bounds=(1, n_steps)),
    )


def _action_field(actions: ActionSpec | None, bounds: tuple[float, float] | None) -> FieldSpec:
    if actions is None:
        return FieldSpec("action", "int32", ())
    return FieldSpec("action", actions.stored_dtype, actions.shape, bounds=bounds or actions.limits)


class NStepAccumulator:
    """Builds n-step items of one slot.

    Windows never cross an episode's end. The last `n - 1` steps of an episode become items with shorter sums:
    without bootstrap after a termination, with the value of the true final observation after a truncation.

    The priority of an item is `|R + discount * value_max(bootstrap) - value_taken|` from values that acting
    computed anyway (Horgan et al. 2018, section 3), so items of a running episode come `n` steps late.
    """

    def __init__(
        self, n_steps: int, gamma: float, chunk_steps: int, stack: int, action_dtype: str | None = "int32"
    ) -> None:
        """`stack` is the number of frames per stacked-pixel observation, 0 for whole observations.

        Actions are stored as they are where `action_dtype` is None. `powers` float64 `[n + 1]` are of gamma.
        """
        if n_steps < 1 or chunk_steps < 1:
            raise ValueError("n_steps and chunk_steps must be at least 1")
        self._n = n_steps
        self._chunk_steps = chunk_steps
        self._stack = stack
        self.action_dtype = action_dtype
        self.powers = gamma ** np.arange(n_steps + 1, dtype=np.float64)
        self._frames: list[np.ndarray] = []
        self._actions: list[int | list[float] | np.ndarray] = []
        self._rewards: list[float] = []
        self._taken: list[float] = []
        self._max: list[float] = []
        self._versions: list[int] = []
        self._per_step: tuple[list, ...] = (
            self._actions,
            self._rewards,
            self._taken,
            self._max,
            self._versions,
        )

    def start(self, obs: np.ndarray) -> None:
        """Begin an episode at `obs`; steps of an unfinished one are forgotten (`flush` keeps them)."""
        # Copies: environments reuse the arrays that they show.
        self._frames = [frame.copy() for frame in obs] if self._stack else [obs.copy()]
        for kept in self._per_step:
            kept.clear()

    def add(self, step: SlotStep) -> list[Chunk]:
        """Appends a step and returns the chunks that it completed.

        Its extras are `value_taken`, Q of the action at the observation, and `value_max`, the largest Q
        there. A chunk carries the version of its first step. After the end of an episode call `start`
        before the next `add`.
        """
        self._actions.append(step.action)
        self._rewards.append(step.reward)
        self._taken.append(step.extras["value_taken"])
        self._max.append(step.extras["value_max"])
        self._frames.append((step.next_obs[-1] if self._stack else step.next_obs).copy())
        self._versions.append(step.version)
        if step.terminated or step.truncated:
            bootstrap = 0.0 if step.terminated else step.final_value
            return [self._cut(len(self._actions), bootstrap, ended=True, terminated=step.terminated)]
        # The last item of the chunk needs n rewards and the value after them, so the cut comes n steps late.
        if len(self._actions) == self._chunk_steps + self._n:
            return [self._cut(self._chunk_steps)]
        return []

    def discard(self) -> list[Chunk]:
        """Return the items that are complete; `start` forgets the rest."""
        return self.flush()

    def flush(self) -> list[Chunk]:
        """Return the items that are complete now; the newest `n` steps of the episode stay behind."""
        # Newer steps have no bootstrap yet; the episode goes on without an end that could stand in for it.
        ready = len(self._actions) - self._n
        return [self._cut(ready)] if ready > 0 else []

    def _cut(
        self, steps: int, bootstrap: float = 0.0, ended: bool = False, terminated: bool = False
    ) -> Chunk:
        """Make a chunk of the first `steps` steps and forget them."""
        n, known = self._n, len(self._actions)
        # Shorter only where the episode has ended: otherwise at least n steps are known behind each of these.
        windows = np.minimum(n, known - np.arange(steps))
        # float64: sums of many discounted rewards are rounded once, when they are stored.
        rewards = np.zeros(steps + n, np.float64)
        available = min(known, steps + n)
        rewards[:available] = self._rewards[:available]
        # Steps beyond the episode hold reward 0, so every window may sum all n places.
        returns = np.lib.stride_tricks.sliding_window_view(rewards, n)[:steps] @ self.powers[:n]
        values = np.full(steps + n, bootstrap, np.float64)
        values[:available] = self._max[:available]
        last = np.arange(steps) + windows
        discounts = self.powers[windows]
        if ended:
            values[known:] = bootstrap
            if terminated:
                discounts = np.where(last == known, 0.0, discounts)
        errors = returns + discounts * values[last] - np.asarray(self._taken[:steps])
        chunk = Chunk(
            fields={
                "obs": self._observations(steps),
                "action": np.asarray(self._actions[:steps], self.action_dtype),
                "reward": returns.astype(np.float32),
                "discount": discounts.astype(np.float32),
                "bootstrap_steps": windows.astype(np.uint8),
            },
            steps=steps,
            offsets=np.arange(steps, dtype=np.int32),
            lengths=np.ones(steps, np.int32),
            priorities=np.abs(errors) + PRIORITY_FLOOR,
            version=self._versions[0],
        )
        for kept in self._per_step:
            # Lists and `del` from the front: some dozens of elements, where a deque would have to be copied
            # to slice it.
            del kept[:steps]
        del self._frames[:steps]
        return chunk

    def _observations(self, steps: int) -> np.ndarray:
        """Entries of the `obs` field; an ended episode repeats its last frame, which no bootstrap reads."""
        wanted = (self._stack - 1 if self._stack else 0) + steps + self._n
        frames = self._frames[:wanted]
        frames = frames + [frames[-1]] * (wanted - len(frames))
        return np.stack(frames)
