"""Steps stored once more, with goals that were reached later (Andrychowicz et al. 2017)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from troupe.common.data.accumulators.n_step import NStepAccumulator
from troupe.common.data.schema import Chunk, SlotStep


class Goals(Protocol):
    """What is known of an environment's goals."""

    def replaced(self, obs: np.ndarray, reached: np.ndarray) -> np.ndarray:
        """The observation with that for a goal which was reached in the other one."""

    def outcome(self, obs: np.ndarray, terminated: bool) -> tuple[float, bool]:
        """Reward, as the learner should see it, and termination of a step that led to the observation.

        `terminated`: whether it was one with the goal that there was.
        """


class HindsightAccumulator:
    """Hands on what `inner` makes of a slot's steps, and each of them again with other goals.

    The strategy is `future`: a goal is one that was reached at a later time of the same episode, and window,
    any of these alike (section 4.5). Reward and termination are worked out anew for it.

    Args:
        inner: of the same slot.
        goals: see there.
        copies: how often a step is stored again: k in the paper, so a share of k / (k + 1) has other goals.
        window_steps: longest time over which goals are looked for; windows follow each other.
        chunk_steps: steps of a chunk of relabelled steps.
        rng: draws the goals.
    """

    def __init__(
        self,
        inner: NStepAccumulator,
        goals: Goals,
        *,
        copies: int,
        window_steps: int,
        chunk_steps: int,
        rng: np.random.Generator,
    ) -> None:
        self._inner = inner
        self._goals = goals
        self._copies = copies
        self._window_steps = window_steps
        self._chunk_steps = chunk_steps
        self._rng = rng
        # Until an error is known: as large as that of missing a reward of 1.
        self._priority = 1.0
        self._begin(np.zeros(0))

    def start(self, obs: np.ndarray) -> None:
        """See `NStepAccumulator`, as for all methods."""
        self._inner.start(obs)
        self._begin(obs)

    def add(self, step: SlotStep) -> list[Chunk]:
        """Relabelled chunks come at the end of an episode, or of a window."""
        chunks = self._seen(self._inner.add(step))
        self._actions.append(step.action)
        self._obs.append(step.next_obs.copy())
        self._terminated.append(step.terminated)
        self._versions.append(step.version)
        if step.terminated or step.truncated or len(self._actions) == self._window_steps:
            chunks += self._relabelled()
        return chunks

    def discard(self) -> list[Chunk]:
        """What was reached was reached, whatever became of the episode."""
        return self._seen(self._inner.discard()) + self._relabelled()

    def flush(self) -> list[Chunk]:
        """Of the running episode too."""
        return self._seen(self._inner.flush()) + self._relabelled()

    def _begin(self, obs: np.ndarray) -> None:
        self._obs = [obs.copy()]
        self._actions: list[Any] = []
        self._terminated: list[bool] = []
        self._versions: list[int] = []

    def _seen(self, chunks: list[Chunk]) -> list[Chunk]:
        """Keep the largest priority: no one has computed what a step is worth with another goal.

        As it is done for new items where no TD error is known (Schaul et al. 2016, algorithm 1).
        """
        self._priority = max([self._priority, *(float(chunk.priorities.max()) for chunk in chunks)])
        return chunks

    def _relabelled(self) -> list[Chunk]:
        """Chunks of the window so far, which is forgotten but for its last observation."""
        steps = len(self._actions)
        items = [
            # Of observations after this step, the last included. The one before it would be reached by doing
            # nothing.
            (step, *self._item(step, int(self._rng.integers(step + 1, steps + 1))))
            for step in range(steps)
            for _ in range(self._copies)
        ]
        chunks = [
            self._chunk(items[begin : begin + self._chunk_steps])
            for begin in range(0, len(items), self._chunk_steps)
        ]
        # The next window begins where this one ended; no transition lies between them, so none is lost.
        self._begin(self._obs[-1])
        return chunks

    def _item(self, step: int, goal: int) -> tuple[list[np.ndarray], float, float]:
        """Observations, sum of rewards and discount of up to n steps from `step` on, for another goal."""
        reached, powers = self._obs[goal], self._inner.powers
        rows, total, over = [self._goals.replaced(self._obs[step], reached)], 0.0, False
        # An episode is over for another goal where that is reached, though it went on for the real one.
        while len(rows) < len(powers) and step + len(rows) < len(self._obs) and not over:
            at = step + len(rows)
            rows.append(self._goals.replaced(self._obs[at], reached))
            reward, over = self._goals.outcome(rows[-1], self._terminated[at - 1])
            total += float(powers[len(rows) - 2]) * reward
        # A window that ends without the episode's end bootstraps from its last observation, with fewer steps.
        return rows, total, 0.0 if over else float(powers[len(rows) - 1])

    def _chunk(self, items: list[tuple[int, list[np.ndarray], float, float]]) -> Chunk:
        """Every item has entries of its own, n + 1 of them: no two show the same goal."""
        entries, count = len(self._inner.powers), len(items)
        steps, places = count * entries, np.arange(count) * entries
        obs: list[np.ndarray] = []
        for _, rows, _, _ in items:
            obs += rows + [rows[-1]] * (entries - len(rows))
        # Entries that `after` asks for behind the last step; no item reads them.
        obs += [obs[-1]] * (entries - 1)
        action = np.asarray([self._actions[step] for step, *_ in items], self._inner.action_dtype)
        columns = {
            "action": action,
            "reward": np.asarray([total for _, _, total, _ in items], np.float32),
            "discount": np.asarray([discount for *_, discount in items], np.float32),
            "bootstrap_steps": np.asarray([len(rows) - 1 for _, rows, _, _ in items], np.uint8),
        }
        return Chunk(
            # Between two items nothing is looked at; it is what is beside it, which keeps to all bounds.
            fields={"obs": np.stack(obs)}
            | {name: np.repeat(column, entries, axis=0) for name, column in columns.items()},
            steps=steps,
            offsets=places.astype(np.int32),
            lengths=np.ones(count, np.int32),
            priorities=np.full(count, self._priority),
            version=self._versions[items[0][0]],
        )
