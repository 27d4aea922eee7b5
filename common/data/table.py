"""Items with a sampler, a remover and a limiter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.data.columns import MappedFile
from common.data.limiter import Limiter
from common.data.selectors import Fifo, Prioritized, Selector, Slots

ITEM = np.dtype(
    [("commit", "u8"), ("id", "u8"), ("row", "i4"), ("offset", "i4"), ("length", "i4"), ("sampled", "i4")]
)
"""One item: the chunk that it is cut from (``commit`` is zero where the slot is empty), and its window."""

MAX_PRIORITY = 1e30
"""Larger priorities are refused: sums of them could become infinite."""


@dataclass(frozen=True)
class TableConfig:
    """What a table is.

    Attributes:
        name: at most 64 letters, digits, ``-`` and ``_``.
        capacity: most items.
        priority_exponent: alpha of the prioritized sampler.
        min_items: items that must be there before sampling begins.
        samples_per_insert: times an item is sampled on average, 0 for no limit.
        samples_per_insert_error: samples by which that may be off.
    """

    name: str = "default"
    capacity: int = 1_000_000
    priority_exponent: float = 0.6
    min_items: int = 1
    samples_per_insert: float = 0.0
    samples_per_insert_error: float = 0.0


def valid_priorities(priorities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of ``priorities [n]`` are finite, not negative and not absurdly large (NaN is none of them)."""
    return (priorities >= 0) & (priorities <= MAX_PRIORITY)


class Table:
    """Items of one name. Their chunks belong to the store, which hears of every item that goes."""

    def __init__(
        self, config: TableConfig, folder: Path, release: Callable[[NDArray[np.int64]], None]
    ) -> None:
        capacity = config.capacity
        self.config = config
        self._release = release
        self._items = MappedFile(folder / f"{config.name}.items", ITEM, (capacity,), sparse=False).array
        self._commits: NDArray[np.uint64] = self._items["commit"]
        self._ids: NDArray[np.uint64] = self._items["id"]
        self._priorities: NDArray[np.float64] = MappedFile(
            folder / f"{config.name}.priorities", "float64", (capacity,), sparse=False
        ).array
        # Outlives the process: items inserted and sampled, the limiter's base, and the limits that it is for.
        self._header: NDArray[np.float64] = MappedFile(
            folder / f"{config.name}.header", "float64", (8,), sparse=False
        ).array
        self.sampler: Selector = Prioritized(capacity, config.priority_exponent)
        self.remover: Selector = Fifo(capacity)
        self.limiter = Limiter(config.min_items, config.samples_per_insert, config.samples_per_insert_error)
        self.size = 0
        self._free = np.arange(capacity, dtype=np.int64)
        self._free_at = 0  # the free slots are a ring, so that slots are used in turn
        # Slots of each chunk row: the first and how many, or a list where they are not consecutive.
        self._first_slot: dict[int, tuple[int, int]] = {}
        self._scattered: dict[int, Slots] = {}

    # ---------------------------------------------------------------- restart

    def restore(self, commits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Find the items that a former process has left; ``commits`` are those of the store, by row.

        Returns the row of every item that is still there.
        """
        filled = np.flatnonzero(self._commits)
        valid = commits[self._items["row"][filled]] == self._commits[filled]
        self._commits[filled[~valid]] = 0  # its chunk was never committed, or is gone
        slots = filled[valid]
        slots = slots[np.lexsort((self._ids[slots], self._commits[slots]))]
        self.size = len(slots)
        mask = np.ones(self.config.capacity, bool)
        mask[slots] = False
        free = np.flatnonzero(mask)
        self._priorities[free] = 0
        # Continue behind the newest item, as if nothing had happened.
        if len(slots):
            free = np.concatenate([free[free > slots[-1]], free[free <= slots[-1]]])
        self._free[: len(free)] = free
        self._free_at = 0
        priorities = self._priorities[slots]
        self.sampler.insert(slots, priorities)
        self.remover.insert(slots, priorities)
        rows = self._items["row"][slots].astype(np.int64)
        if len(slots):
            cuts = np.flatnonzero(np.diff(rows)) + 1
            begins = np.concatenate([[0], cuts])
            for row, part in zip(rows[begins].tolist(), np.split(slots, cuts), strict=True):
                self._remember(row, part)
        limiter = self.limiter
        limiter.inserted, limiter.sampled = int(self._header[0]), int(self._header[1])
        limiter.base = float(self._header[2])
        limits = (limiter.samples_per_insert, float(limiter.min_items))
        if tuple(self._header[3:5]) != limits:
            limiter.forgive()
            self._header[2:5] = limiter.base, *limits
        return rows

    # ---------------------------------------------------------------- items

    def insert(
        self,
        row: int,
        commit: int,
        offsets: NDArray[np.int32],
        lengths: NDArray[np.int32],
        priorities: NDArray[np.float64],
    ) -> None:
        """Add items of one chunk, removing others where the table is full. They exist once it commits."""
        count = len(offsets)
        excess = self.size + count - self.config.capacity
        if excess > 0:
            slots, _ = self.remover.select(excess, _NO_RNG)
            self.remove(slots)
        slots = self._take_slots(count)
        items = np.empty(count, ITEM)
        items["commit"], items["row"], items["sampled"] = commit, row, 0
        items["offset"], items["length"] = offsets, lengths
        # A slot's ids are slot + 1, slot + 1 + capacity, ...: never reused, and found again without a search.
        capacity = np.uint64(self.config.capacity)
        last = self._ids[slots]
        items["id"] = np.where(last > 0, last + capacity, slots.astype(np.uint64) + np.uint64(1))
        self._priorities[slots] = priorities
        self._items[slots] = items
        self.size += count
        self.sampler.insert(slots, priorities)
        self.remover.insert(slots, priorities)
        self._remember(row, slots)
        self.limiter.inserted += count
        self._header[0] = self.limiter.inserted

    def remove(self, slots: Slots) -> None:
        """Take out ``slots [n]``, all distinct and filled."""
        rows = self._items["row"][slots].astype(np.int64)
        self._forget(slots)
        self._release(rows)

    def drop_chunk(self, row: int, commit: int) -> int:
        """Take out the items of a chunk that is gone already; returns how many they were."""
        slots = self._slots_of(row)
        slots = slots[self._commits[slots] == np.uint64(commit)]
        if len(slots):
            self._forget(slots)
        return len(slots)

    def select(self, count: int, rng: np.random.Generator) -> tuple[Slots, NDArray[np.float64]]:
        """Sample ``count`` slots and their probabilities; none where every priority is zero."""
        return self.sampler.select(count, rng)

    def items(self, slots: Slots) -> NDArray:
        """The records ``[n]`` of ``slots``, as ``ITEM``."""
        return self._items[slots]

    def count_sampled(self, slots: Slots) -> None:
        """Count that ``slots`` have been sampled."""
        np.add.at(self._items["sampled"], slots, 1)
        self.limiter.sampled += len(slots)
        self._header[1] = self.limiter.sampled

    def update(self, ids: NDArray[np.uint64], priorities: NDArray[np.float64]) -> tuple[int, int]:
        """Set the priorities of items by id; returns how many were invalid, and how many ids unknown."""
        valid = valid_priorities(priorities)
        invalid = len(ids) - int(np.count_nonzero(valid))
        slots = ((ids - np.uint64(1)) % np.uint64(self.config.capacity)).astype(np.int64)
        known = (self._ids[slots] == ids) & (self._commits[slots] != 0)
        good = valid & known
        slots, priorities = slots[good], priorities[good]
        self._priorities[slots] = priorities
        self.sampler.update(slots, priorities)
        self.remover.update(slots, priorities)
        return invalid, int(np.count_nonzero(valid & ~known))

    def priorities(self, slots: Slots) -> NDArray[np.float64]:
        """The raw priorities of ``slots [n]``."""
        return self._priorities[slots]

    def filled(self) -> Slots:
        """All slots that hold an item."""
        return np.flatnonzero(self._commits)

    # ---------------------------------------------------------------- slots

    def _take_slots(self, count: int) -> Slots:
        at = (self._free_at + np.arange(count)) % self.config.capacity
        self._free_at = (self._free_at + count) % self.config.capacity
        return self._free[at]

    def _forget(self, slots: Slots) -> None:
        self._commits[slots] = 0
        self._priorities[slots] = 0
        self.sampler.delete(slots)
        self.remover.delete(slots)
        capacity = self.config.capacity
        end = self._free_at + (capacity - self.size)
        self._free[(end + np.arange(len(slots))) % capacity] = slots
        self.size -= len(slots)

    def _remember(self, row: int, slots: Slots) -> None:
        first, count = int(slots[0]), len(slots)
        if int(slots[-1]) - first == count - 1 and np.all(np.diff(slots) == 1):
            self._first_slot[row] = (first, count)
            self._scattered.pop(row, None)
        else:
            self._scattered[row] = slots
            self._first_slot.pop(row, None)

    def _slots_of(self, row: int) -> Slots:
        if row in self._first_slot:
            first, count = self._first_slot.pop(row)
            return np.arange(first, first + count)
        return self._scattered.pop(row, np.empty(0, np.int64))


_NO_RNG = np.random.default_rng(0)
