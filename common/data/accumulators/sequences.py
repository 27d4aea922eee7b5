"""Turns one slot's stream of steps into overlapping sequences with initial priorities, for R2D2."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from troupe.common.data.accumulators.unrolls import RUNNING, TERMINATED, TRUNCATED, split_memory
from troupe.common.data.schema import Chunk, FieldSpec, SlotStep
from troupe.common.spaces import ActionSpec

BETWEEN = 3
"""Value of the field `ended` beside those of unrolls: the row is no step, and leads to the first observation
of an episode."""
Priority = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], float]
"""Priority of a sequence, from the rewards, the values of the actions taken, the best values of what followed
(0 after a termination), each float32, and `ended`, uint8: one for every row that is learned from, and for
those `BETWEEN` episodes, of which only `ended` means something."""


class Layout(NamedTuple):
    """Where sequences lie in an episode, or in the stream of a slot's episodes.

    Sequence k is learned from in the steps `[k * period, k * period + steps)`. The `burn_in` steps before are
    there to bring the memory up to date; there are fewer of them at the beginning, where the memory is known
    to be empty, and the last sequence of an episode is as long as there are steps. A stream has no last one.
    """

    burn_in: int
    steps: int
    period: int

    def begin(self, k: int) -> int:
        """First step of sequence `k`, counted from the beginning of the episode or stream."""
        return max(0, k * self.period - self.burn_in)

    def end(self, k: int) -> int:
        """The step after the last of sequence `k`, if there is such a sequence."""
        return k * self.period + self.steps

    def missing_burn_in(self, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Burn-in steps that sequences have not, because their episode began: int64 `[B]`.

        Args:
            lengths: `[B]`, steps of each sequence.
            starts: `[B]` bool, whether an episode begins with the first step. It may do so with several
              sequences of one episode: which one it is follows from the length. (Those of a stream that begin
              with any episode but its first are of full length, and miss nothing.)
        """
        # Of those that begin with the episode, sequence k ends `k * period` steps beyond the first one; the
        # last of an episode ends earlier, hence rounded up.
        beyond = np.maximum(0, lengths.astype(np.int64) - self.steps)
        burned = -(-beyond // self.period) * self.period
        missing = np.where(starts, np.maximum(0, self.burn_in - burned), 0)
        # No accumulator makes one that is all burn-in, but a stranger may: its last step is learned from.
        return np.maximum(missing, self.burn_in + 1 - lengths.astype(np.int64))


def sequence_fields(
    obs_shape: tuple[int, ...],
    obs_dtype: str,
    stack: int,
    actions: ActionSpec,
    period: int,
    memory_size: int,
    action_bounds: tuple[float, float] | None = None,
) -> tuple[FieldSpec, ...]:
    """Fields of sequences; each observation is stored once for all sequences of a chunk.

    Args:
        obs_shape: shape of one whole observation; `(stack, H, W)` when `stack` is not 0.
        obs_dtype: numpy name of its dtype.
        stack: frames per stacked-pixel observation, or 0 for an observation that is stored whole.
        actions: what is chosen.
        period: steps between the beginnings of two sequences.
        memory_size: width of the agent's recurrent state.
        action_bounds: least and largest number of an action; None: those of `actions`.

    Returns:
        `obs` of the steps and of the one after them, the true last one at an episode's end; `action` int32 or
        float32, `reward` float32 and `ended` uint8 of the step before the first and of the steps, so that
        entry t led to observation t: entry 0 of `ended` is not 0 where an episode begins with the sequence,
        others are `BETWEEN` where one does; `memory`, the state before the first step, spread over `period`
        entries, for no other sequence begins there (see `split_memory`);
        anything at the beginning of an episode.
    """
    if stack:
        obs = FieldSpec("obs", obs_dtype, obs_shape[1:], before=stack - 1, after=1, compress=True)
    else:
        compress = len(obs_shape) > 1 or obs_dtype == "uint8"  # several parts are bytes
        obs = FieldSpec("obs", obs_dtype, obs_shape, after=1, compress=compress)
    return (
        obs,
        FieldSpec(
            "action", actions.stored_dtype, actions.shape, before=1, bounds=action_bounds or actions.limits
        ),
        FieldSpec("reward", "float32", (), before=1),
        FieldSpec("ended", "uint8", (), before=1, bounds=(RUNNING, BETWEEN)),
        FieldSpec("memory", "float32", (-(-memory_size // period),), after=period - 1),
    )


class _Row(NamedTuple):
    """A step, and what was known when it was chosen."""

    action: int | list[float] | np.ndarray
    reward: float = 0.0
    ended: int = TERMINATED
    taken: float = 0.0
    best: float = 0.0
    version: int = 0


class SequenceAccumulator:
    """Builds the sequences of one slot; every step is in one at least.

    Either none crosses the end of an episode. Or they are cut from the stream of all episodes, one after the
    other: they are all equally long, and what is not complete when the actor leaves is lost. In a stream the
    true last observation of an episode is followed by the first of the next. What leads there are rows that
    are `BETWEEN`: one, or as many as a stack has frames, for the first stack of an episode is stored whole.

    The priority of a sequence needs the value of the observation after it, which acting computes with the
    next step: so sequences of a running episode come one step late.
    """

    def __init__(
        self,
        layout: Layout,
        chunk_steps: int,
        stack: int,
        memory_size: int,
        priority: Priority,
        *,
        actions: ActionSpec | None = None,
        across_episodes: bool = False,
    ) -> None:
        """A chunk holds the sequences that begin within `chunk_steps` steps, one at least.

        `actions` are what is chosen; None: one of several.
        """
        if min(layout.steps, layout.period) < 1 or layout.burn_in < 0 or layout.period > layout.steps:
            raise ValueError("sequences need steps to learn from, and may leave none out between them")
        self._layout = layout
        self._per_chunk = max(1, chunk_steps // layout.period)
        self._stack = stack
        self._memory_size = memory_size
        self._priority = priority
        self._across = across_episodes
        actions = actions or ActionSpec.discrete(1)
        self._action_dtype = actions.stored_dtype
        self._no_step = _Row(actions.zeros(1)[0].tolist())
        self._forget()

    def _forget(self) -> None:
        self._frames: list[np.ndarray] = []
        self._rows = [self._no_step]  # the step before the first, then the steps
        self._memories: dict[int, np.ndarray] = {}
        self._origin = 0  # step of the episode or stream that the first row behind the leading one is
        self._next = 0  # the first sequence that has not been handed out
        self._final_value = 0.0  # of the last observation of the newest episode that is over

    def start(self, obs: np.ndarray) -> None:
        """Begin an episode at `obs`; what is left of an unfinished one is forgotten."""
        frames = [frame.copy() for frame in obs] if self._stack else [obs.copy()]
        if not (self._across and self._frames and self._rows[-1].ended):
            self._forget()
            self._frames = frames
            return
        version = self._rows[-1].version
        link = self._no_step._replace(ended=BETWEEN, best=self._final_value, version=version)
        self._rows += [link] * len(frames)
        self._frames += frames

    def add(self, step: SlotStep) -> list[Chunk]:
        """Appends a step and returns the chunks that it completed.

        Its extras are `value_taken`, Q of the action, `value_max`, the largest Q, and `memory`
        `[memory_size]` from before the step. A chunk carries the version of its first step. After the end
        of an episode call `start` before the next `add`.
        """
        # Where a sequence begins (`Layout.begin`), and only there, the memory is stored; at step 0 it is
        # empty.
        now = self._known
        if now and (now + self._layout.burn_in) % self._layout.period == 0:
            self._memories[now] = np.array(step.extras["memory"], np.float32)
        ended = TERMINATED if step.terminated else TRUNCATED if step.truncated else RUNNING
        taken, best = step.extras["value_taken"], step.extras["value_max"]
        self._rows.append(_Row(step.action, step.reward, ended, taken, best, step.version))
        self._frames.append((step.next_obs[-1] if self._stack else step.next_obs).copy())
        if ended:
            self._final_value = 0.0 if step.terminated else step.final_value
            if not self._across:
                return self._last()
        chunks = []
        # One step less than known: the priority of the last sequence needs the value of what follows its last
        # step.
        while self._complete(self._known - 1) >= self._per_chunk:
            chunks.append(self._cut(self._per_chunk))
        return chunks

    def discard(self) -> list[Chunk]:
        """Return the sequences that are complete and forget the rest."""
        done = self.flush()
        self._forget()
        return done

    def flush(self) -> list[Chunk]:
        """Return the sequences that are complete now; the episode may go on."""
        complete = self._complete(self._known - 1)
        return [self._cut(complete)] if complete else []

    @property
    def _known(self) -> int:
        """Steps of the episode or stream so far."""
        return self._origin + len(self._rows) - 1

    def _complete(self, until: int) -> int:
        """Sequences, of those not handed out, that end at step `until` or before."""
        return max(0, (until - self._layout.steps) // self._layout.period + 1 - self._next)

    def _last(self) -> list[Chunk]:
        """The chunk at the end of an episode: whole sequences, and a shorter one for the rest."""
        # The value of what follows is known here, so the newest sequence need not wait for the next step.
        complete = self._complete(self._known)
        last = self._next + complete
        # Where the last whole sequence ends with the episode, there is no rest for a shorter one.
        whole = last > 0 and self._layout.end(last - 1) == self._known
        return [self._cut(complete + (not whole), self._final_value)]

    def _cut(self, count: int, bootstrap: float = 0.0) -> Chunk:
        """Make a chunk of the next `count` sequences, and forget what no later one needs."""
        layout, origin, rows = self._layout, self._origin, self._rows[1:]
        which = range(self._next, self._next + count)
        begins = np.array([layout.begin(k) for k in which])
        ends = np.array([min(layout.end(k), self._known) for k in which])
        steps = int(ends[-1]) - origin
        kept = self._rows[: steps + 1]
        # Each row has the best value at the observation that it acted on: that of what followed it is the
        # next's.
        best = np.array([*(row.best for row in rows[1:]), bootstrap], np.float32)
        taken = np.array([row.taken for row in rows], np.float32)
        rewards = np.array([row.reward for row in rows], np.float32)
        ended = np.array([row.ended for row in rows], np.uint8)
        # Without the burn-in, which the learner does not learn from either.
        spans = [
            slice(k * layout.period - origin, int(end) - origin) for k, end in zip(which, ends, strict=True)
        ]
        chunk = Chunk(
            fields={
                "obs": np.stack(self._frames[: max(0, self._stack - 1) + steps + 1]),
                "action": np.array([row.action for row in kept], self._action_dtype),
                "reward": np.array([row.reward for row in kept], np.float32),
                "ended": np.array([row.ended for row in kept], np.uint8),
                "memory": self._memory_entries(begins, steps),
            },
            steps=steps,
            offsets=(begins - origin).astype(np.int32),
            lengths=(ends - begins).astype(np.int32),
            priorities=np.array(
                [self._priority(rewards[s], taken[s], best[s], ended[s]) for s in spans], np.float64
            ),
            version=rows[0].version,
        )
        self._next += count
        # Its burn-in included: the next sequence begins inside what has just been handed out.
        self._forget_before(layout.begin(self._next))
        return chunk

    def _memory_entries(self, begins: np.ndarray, steps: int) -> np.ndarray:
        """The field `memory` of a chunk whose sequences begin at these steps."""
        period = self._layout.period
        entries = np.zeros((steps + period - 1, -(-self._memory_size // period)), np.float32)
        for begin in begins.tolist():
            # None is stored where an episode begins, nor at its last observation: nothing is done there.
            if begin in self._memories:
                place = begin - self._origin
                entries[place : place + period] = split_memory(self._memories[begin], period)
        return entries

    def _forget_before(self, step: int) -> None:
        """Forget the steps before `step`, but for what led to its observation."""
        gone = min(step, self._known) - self._origin
        del self._rows[:gone]
        del self._frames[:gone]
        self._origin += gone
        self._memories = {time: memory for time, memory in self._memories.items() if time >= self._origin}
