"""Turns one slot's stream of steps into unrolls of fixed length, for actor-critics through a queue."""

from __future__ import annotations

from typing import Any

import numpy as np

from troupe.common.data.schema import Chunk, FieldSpec, SlotStep
from troupe.common.spaces import ActionSpec

RUNNING, TERMINATED, TRUNCATED = 0, 1, 2
"""Values of the field `ended`."""
Row = tuple[int | list[float] | np.ndarray, float, int]
"""Action, reward and ending of a step."""


def unroll_fields(
    obs_shape: tuple[int, ...],
    obs_dtype: str,
    stack: int,
    actions: ActionSpec,
    policy_size: int,
    unroll_steps: int,
    memory_size: int,
    feature_size: int = 0,
    with_values: bool = False,
) -> tuple[FieldSpec, ...]:
    """Fields of an unroll of T steps, in which episodes may end and begin; each observation stored once.

    Args:
        obs_shape: shape of one whole observation; `(stack, H, W)` when `stack` is not 0.
        obs_dtype: numpy name of its dtype.
        stack: frames per stacked-pixel observation, or 0 for an observation that is stored whole.
        actions: what is chosen.
        policy_size: P, parameters of the distribution that it is drawn from; 0 where it is not.
        unroll_steps: T.
        memory_size: width of the agent's recurrent state.
        feature_size: F, width of what is stored of the network's own view of each step; 0: nothing is.
        with_values: store what the network that acted made of each observation.

    Returns:
        `obs` of the T steps and of the one after them; `action` int32 or float32, `reward` float32 and
        `ended` uint8 of the step before the first and of the T steps, so that entry t led to observation t;
        `behaviour` float32 `[T, P]`, parameters of the policy that acted; `final_value` float32 `[T]`, the
        value of the last observation of an episode that step t truncated; `frames` uint8 `[T + 1]` (with
        `stack`), how many newest frames of the stack are real, the others being zeros; `memory` (with
        `memory_size`), the state before the first step: replay knows entries of steps only, so it is spread
        over them (see `split_memory`); `features` float16 `[T, F]` (with `feature_size`), how the
        network that acted saw the observations; `value` float32 `[T]` (with `with_values`), what it took them
        to be worth.
    """
    if stack:
        obs = FieldSpec("obs", obs_dtype, obs_shape[1:], before=stack - 1, after=1, compress=True)
    else:
        compress = len(obs_shape) > 1 or obs_dtype == "uint8"  # several parts are bytes
        obs = FieldSpec("obs", obs_dtype, obs_shape, after=1, compress=compress)
    fields = [
        obs,
        FieldSpec("action", actions.stored_dtype, actions.shape, before=1, bounds=actions.limits),
        FieldSpec("reward", "float32", (), before=1),
        FieldSpec("ended", "uint8", (), before=1, bounds=(RUNNING, TRUNCATED)),
        *([FieldSpec("behaviour", "float32", (policy_size,))] if policy_size else []),
        FieldSpec("final_value", "float32", ()),
    ]
    if stack:
        fields.append(FieldSpec("frames", "uint8", (), after=1, bounds=(1, stack)))
    if memory_size:
        fields.append(FieldSpec("memory", "float32", (-(-memory_size // unroll_steps),)))
    if feature_size:
        fields.append(FieldSpec("features", "float16", (feature_size,)))
    if with_values:
        fields.append(FieldSpec("value", "float32", ()))
    return tuple(fields)


STORED_EXTRAS = {"behaviour": "float32", "features": "float16", "value": "float32"}
"""What is stored of each step as the agent's `act` gave it, and as which type."""


def split_memory(memory: np.ndarray, steps: int) -> np.ndarray:
    """A state `[memory_size]` as entries of `steps` steps, `[steps, ceil(memory_size / steps)]`."""
    width = -(-len(memory) // steps)
    entries = np.zeros(steps * width, np.float32)
    entries[: len(memory)] = memory
    return entries.reshape(steps, width)


class UnrollAccumulator:
    """Builds unrolls of one slot, one after the other without gaps, across episodes.

    Stacked frames are stored once, so the stack of a new episode has to be one that single frames and a count
    can describe: padded with zeros (a new game), or going on (a lost life).
    """

    def __init__(
        self,
        unroll_steps: int,
        stack: int,
        memory_size: int,
        skipped_steps: int = 0,
        actions: ActionSpec | None = None,
    ) -> None:
        """Begin with the first episode.

        Args:
            unroll_steps: T.
            stack: frames per stacked-pixel observation, 0 for whole observations.
            memory_size: width of the agent's recurrent state.
            skipped_steps: the first unroll begins after this many steps, fewer than T. Slots that step
              together and skip different numbers do not complete their unrolls all at once.
            actions: what is chosen; None: one choice of several.
        """
        if not 0 <= skipped_steps < unroll_steps:
            raise ValueError("unroll_steps must be at least 1, and more than skipped_steps")
        self._skipped_steps = skipped_steps
        self._steps = unroll_steps
        self._stack = stack
        self._memory_size = memory_size
        actions = actions or ActionSpec.discrete(1)
        self._action_dtype = actions.stored_dtype
        # As if an episode had just ended: the learner takes the memory before the first step for empty.
        self._none: Row = (actions.zeros(1)[0].tolist(), 0.0, TERMINATED)
        self._before = self._none
        self._frames: list[np.ndarray] = []
        self._forget()

    def _forget(self) -> None:
        """Nothing links what comes to what was."""
        self._frames = []
        self._real: list[int] = []
        self._rows: list[Row] = []
        self._extras: dict[str, list[Any]] = {name: [] for name in STORED_EXTRAS}
        self._final_values: list[float] = []
        self._memory = np.zeros(self._memory_size, np.float32)
        self._version = 0

    def start(self, obs: np.ndarray) -> None:
        """Begin an episode at `obs`, which takes the place of the observation after the last step."""
        if not self._frames:
            self._before = self._none
            self._frames = [frame.copy() for frame in obs] if self._stack else [obs.copy()]
            self._real = [self._stack]  # the whole stack is stored, zeros and all
            return
        # Nothing is done at the last observation of an episode, and `final_value` holds what it was worth: so
        # T steps need T + 1 observations, however many episodes they are of.
        self._frames[-1] = (obs[-1] if self._stack else obs).copy()
        # A lost life goes on with the stack that `add` has counted; a new game comes with zeros.
        if self._stack and not obs[:-1].any():
            self._real[-1] = 1

    def add(self, step: SlotStep) -> list[Chunk]:
        """Appends a step and returns the unroll that the step before it completed, if any.

        An unroll ends with the observation *after* its last step. Where that step ended the episode, this is
        the first one of the next, which `start` brings: so an unroll is handed out one step later.

        Extras are `behaviour` `[P]` of the policy that chose, if any; `features` `[F]` that it chose by and
        `value` of what it saw, if they are stored; `memory` `[memory_size]` from before the step. An unroll
        carries the version of its first step.
        """
        done = self.flush()
        if not self._rows:
            self._version = step.version
            # Of the first step only, copied: extras are views of the agent's whole batch, which the next step
            # overwrites.
            self._memory = np.array(step.extras["memory"]) if self._memory_size else self._memory
        ended = TERMINATED if step.terminated else TRUNCATED if step.truncated else RUNNING
        self._rows.append((step.action, step.reward, ended))
        for name, stored in self._extras.items():
            if name in step.extras:
                stored.append(step.extras[name])
        # 0 after a termination, by definition: nothing follows.
        self._final_values.append(step.final_value if ended == TRUNCATED else 0.0)
        self._frames.append((step.next_obs[-1] if self._stack else step.next_obs).copy())
        self._real.append(min(self._stack, self._real[-1] + 1))
        return done

    def discard(self) -> list[Chunk]:
        """Hand out a complete unroll and forget a running one: its length is fixed."""
        done = self.flush()
        self._forget()
        return done

    def flush(self) -> list[Chunk]:
        """The unroll that is complete, if any."""
        # Thrown away once, so that this slot's unrolls end at another step than its neighbours'.
        if 0 < self._skipped_steps == len(self._rows):
            self._skipped_steps = 0
            self._go_on()
        return [self._cut()] if len(self._rows) == self._steps else []

    def _cut(self) -> Chunk:
        steps = self._steps
        rows = [self._before, *self._rows]
        fields = {
            "obs": np.stack(self._frames),
            "action": np.asarray([row[0] for row in rows], self._action_dtype),
            "reward": np.asarray([row[1] for row in rows], np.float32),
            "ended": np.asarray([row[2] for row in rows], np.uint8),
            "final_value": np.asarray(self._final_values, np.float32),
        }
        if self._stack:
            fields["frames"] = np.asarray(self._real, np.uint8)
        if self._memory_size:
            fields["memory"] = split_memory(self._memory, steps)
        for name, stored in self._extras.items():
            if stored:
                fields[name] = np.asarray(stored, STORED_EXTRAS[name])
        chunk = Chunk(
            fields=fields,
            steps=steps,
            offsets=np.zeros(1, np.int32),
            lengths=np.full(1, steps, np.int32),
            priorities=np.ones(1),  # a queue goes by age
            version=self._version,
        )
        self._go_on()
        return chunk

    def _go_on(self) -> None:
        """Begin the next unroll with the observation that the last one ended with."""
        # Two unrolls share it: the first needs its value, the second acts on it.
        kept = self._stacked_tail() if self._stack else self._frames[-1:]
        before = self._rows[-1]
        self._forget()
        self._before, self._frames, self._real = before, kept, [self._stack]

    def _stacked_tail(self) -> list[np.ndarray]:
        """The newest stack as it was seen: with zeros in the place of frames of another episode."""
        # The first stack of an unroll is read as it stands: where the agent saw zeros, zeros have to be.
        newest = self._frames[-self._stack :]
        missing = self._stack - self._real[-1]
        return [np.zeros_like(newest[0])] * missing + newest[missing:]
