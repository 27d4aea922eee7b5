"""Samplers that choose among random candidates by a distance: elite and attentive replay.

After https://github.com/parralplex/elite_buffer_vtrace. For a batch of n rows, lambda n candidates are drawn,
all different, and n of them are taken by a strategy; lambda falls to 1, which is uniform sampling. Candidates
come in random order and every sort is stable, so that equal distances are a matter of chance.

Where a table is `scored_by` the learner, the candidates themselves are the rows, and the learner chooses.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from troupe.common.data.candidates import STRATEGIES, Floats
from troupe.common.data.distances import distances
from troupe.common.data.table_config import TableConfig
from troupe.services.replay.storage.selectors import NO_SLOTS, Chosen, Slots, TableView, Uniform

MAX_CANDIDATES = 1 << 16
"""Most of one draw: a shard serves nobody else meanwhile."""

BLOCK = 256
"""Candidates per block: the features of a block are in memory at once."""

BLOCK_NUMBERS = 1 << 23
"""Upper bound on the numbers of a block; long or wide items get smaller blocks."""

MAX_DISTANCE = 1e10
"""No features in float16 are farther apart: what claims more says nothing of others."""

MEMORY = 0.99
"""Of the mean rate at which items get off policy, for each item that is measured."""


class Candidates(Uniform):
    """What elite and attentive sampling share; subclasses say how far an item is."""

    def __init__(self, config: TableConfig, table: TableView) -> None:
        super().__init__(config.slots)
        self._config = config
        self._table = table
        self._strategy = STRATEGIES[config.strategy]

    def select(self, count: int, rng: np.random.Generator) -> Chosen:
        """See `Selector`. An item comes twice only where there are fewer items than rows.

        Their probability counts as that of uniform sampling: that they are not drawn alike is the purpose.

        More than `count` are candidates for the learner, drawn with replacement.
        """
        if not self._size:
            return NO_SLOTS, np.empty(0)
        if self._config.scored_by == "learner":
            return self._unscored(count, rng)
        candidates = self._draw(self.per_row * count, count, rng)
        wanted = min(count, len(candidates))
        sampled = self._table.items["sampled"][candidates]
        slots = candidates[self._strategy(self._distances(candidates), sampled, wanted)]
        if wanted < count:
            slots = np.concatenate([slots, super().select(count - wanted, rng)[0]])
        return slots, np.full(count, 1.0 / self._size)

    def _unscored(self, count: int, rng: np.random.Generator) -> Chosen:
        """Lambda times as many as rows, each of all items, and behind them what they are compared with.

        At lambda 1 just the rows.
        """
        candidates = max(int(min(self.per_row * count, MAX_CANDIDATES)), count)
        slots = super().select(candidates, rng)[0]
        if candidates > count:
            slots = np.concatenate([slots, self._compared_with()])
        return slots, np.full(len(slots), 1.0 / self._size)

    @property
    def per_row(self) -> float:
        """Lambda: candidates for each row of a batch, now."""
        most, period = self._config.candidates_max, self._config.candidates_anneal_samples
        done = self._table.samples() / period if period else 0.0
        return max(1.0, most - (most - 1.0) * done)

    def _draw(self, wanted: float, least: int, rng: np.random.Generator) -> Slots:
        """`wanted` different slots in random order, no fewer than `least`, or all that there are."""
        count = min(max(int(min(wanted, MAX_CANDIDATES)), least), self._size)
        return self._slots[rng.choice(self._size, count, replace=False)]

    def _compared_with(self) -> Slots:
        """The item that candidates are compared with, `[1]`, or none."""
        return NO_SLOTS

    @abstractmethod
    def _distances(self, slots: Slots) -> Floats:
        """How far the items at `slots [n]` are, `[n]`; the least is chosen."""


class Elite(Candidates):
    """The least off policy, or as a remover the most; priorities say how much that is (`nearness`).

    A priority is as old as the last time that its item was learned from, and the network has moved on. So an
    item is taken to get off policy steadily, from when it was inserted on: its distance when it was measured,
    over its age then, is a rate, and this times its age now is the estimate. What was never measured has the
    mean rate of what was. Ages are counted in chunks.
    """

    def __init__(self, config: TableConfig, table: TableView) -> None:
        super().__init__(config, table)
        self._rates = np.full(config.slots, np.nan)  # where it was never measured
        self._mean_rate = np.nan
        self._newest = 0.0

    def insert(self, slots: Slots, priorities: Floats) -> None:
        """See `Selector`. A priority of 1 is one that was not measured yet."""
        super().insert(slots, priorities)
        self._rates[slots] = np.nan
        if len(slots):
            self._newest = max(self._newest, float(self._table.items["commit"][slots].max()))
        known = priorities < 1.0
        if known.any():  # after a restart
            self.update(slots[known], priorities[known])

    def update(self, slots: Slots, priorities: Floats) -> None:
        """See `Selector`."""
        # Of 0, which no agent can learn from: infinitely far.
        with np.errstate(divide="ignore", over="ignore"):
            measured = np.maximum(1.0 / priorities - 1.0, 0.0)
        rates = np.where(measured <= MAX_DISTANCE, measured, np.inf) / self._ages(slots)
        self._rates[slots] = rates
        rates = rates[np.isfinite(rates)]
        if len(rates):
            kept = 0.0 if np.isnan(self._mean_rate) else MEMORY ** len(rates)
            before = self._mean_rate if kept else 0.0
            self._mean_rate = kept * before + (1.0 - kept) * float(rates.mean())

    def distinct(self, count: int, rng: np.random.Generator) -> Slots:
        """See `Selector`: the farthest of `removal_candidates` for each."""
        candidates = self._draw(self._config.removal_candidates * count, count, rng)
        order = np.argsort(self._distances(candidates), kind="stable")
        return candidates[order[max(len(order) - count, 0) :]]

    def _distances(self, slots: Slots) -> Floats:
        rates = self._rates[slots]
        mean = 1.0 if np.isnan(self._mean_rate) else self._mean_rate
        return np.where(np.isnan(rates), mean, rates) * self._ages(slots)

    def _ages(self, slots: Slots) -> Floats:
        """Chunks that have come since, and the item's own, `[n]`."""
        return self._newest - self._table.items["commit"][slots].astype(np.float64) + 1.0


class Attentive(Candidates):
    """The nearest to where play is now: to the last state of the newest item, by the features stored with it.

    Sun et al. 2020 (AER), on unrolls: all states of a candidate are compared with that one. Features are
    those of the networks that acted, so that nothing has to be computed again.
    """

    def __init__(self, config: TableConfig, table: TableView) -> None:
        super().__init__(config, table)
        self._newest = (0, np.uint64(0))  # its slot and commit

    def insert(self, slots: Slots, priorities: Floats) -> None:
        """See `Selector`."""
        super().insert(slots, priorities)
        if len(slots):
            newest = int(slots[-1])
            self._newest = newest, self._table.items["commit"][newest]

    def _distances(self, slots: Slots) -> Floats:
        now = self._table.features(self._compared_with())[:, -1:]
        found = np.empty(len(slots))
        longest = int(self._table.items["length"][slots].max())
        block = min(max(BLOCK_NUMBERS // max(longest * now.size, 1), 1), BLOCK)
        for begin in range(0, len(slots), block):
            features = self._table.features(slots[begin : begin + block])
            with np.errstate(invalid="ignore", over="ignore"):  # a client may have inserted infinity
                found[begin : begin + block] = distances(
                    self._config.distance, features, now, self._config.distance_power
                )
        return found

    def _compared_with(self) -> Slots:
        """The newest item."""
        slot, commit = self._newest
        commits = self._table.items["commit"]
        if commits[slot] != commit:  # it has gone before older ones
            slot = int(commits.argmax())
            self._newest = slot, commits[slot]
        return np.array([slot])
