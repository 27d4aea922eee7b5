"""Items with a sampler, a remover and a limiter."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.inserts import valid_priorities
from troupe.common.data.pager import FilePager
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.storage.changes import CHANGE
from troupe.services.replay.storage.item_files import Damage, ItemFiles
from troupe.services.replay.storage.limiter import Limiter
from troupe.services.replay.storage.records import ITEM, SAMPLED_UNIT, whole_items
from troupe.services.replay.storage.samplers import REMOVERS, SAMPLERS
from troupe.services.replay.storage.selectors import NO_SLOTS, Chosen, Selector, Slots, TableView
from troupe.services.replay.storage.store import add_counts

_log = logging.getLogger(__name__)

# Steps that an item may have.
_LONGEST = 2**31 - 1


class Table:
    """Items of one name. Their chunks belong to the store, which hears of every item that goes."""

    def __init__(
        self,
        config: TableConfig,
        pager: FilePager,
        release: Callable[[NDArray[np.int64]], None],
        features: Callable[[NDArray], NDArray],
    ) -> None:
        """Open the table's files.

        Args:
            config: what it is.
            pager: of the files.
            release: is told the rows of items that have gone.
            features: gives the field `features` of records `[n]` of `ITEM`.
        """
        capacity = self._slots = config.slots
        self.config = config
        self._release = release
        self._files = ItemFiles(pager, config.name, capacity)
        self._items, self._ids, self._header = self._files.items, self._files.ids, self._files.header
        self._commits, self._priorities = self._files.commits, self._files.priorities
        self.items, self.files = self._files.read, self._files.contents
        self._written: tuple[float, ...] = ()
        view = TableView(self._items, lambda: self.limiter.sampled, lambda slots: features(self.items(slots)))
        self.sampler: Selector = SAMPLERS[config.sampler](config, view)
        self.remover: Selector = REMOVERS[config.remover](config, view)
        self.limiter = Limiter(
            config.min_items,
            config.samples_per_insert,
            config.limiter_error(),
            queue_capacity=config.capacity if config.holds_writers else 0,
        )
        self.size = 0
        self._rows = np.zeros(capacity, np.int32)  # of the chunk of each item, whatever happens to the files
        self.newest_commit = 0
        """The largest of what a former process has left, even of an item whose chunk never came to be."""
        self.held_items = 0
        """Of the insert that found no room in a queue, if none has since."""
        self.dropped_items = 0
        """Acknowledged and never sampled, over the life of the table, for the queue was full."""
        self._drops_latest = True  # of one that alternates, next time
        self._shortest = _LONGEST
        self._batches = 0  # sampled since the excess was removed
        self._uses = np.zeros(capacity if config.max_times_sampled else 0, np.int32)
        self._free = np.arange(capacity, dtype=np.int64)
        self._free_at = 0  # the free slots are a ring, so that slots are used in turn
        # Slots of each chunk row: the first and how many, or a list where they are not consecutive.
        self._first_slot: dict[int, tuple[int, int]] = {}
        self._scattered: dict[int, Slots] = {}

    # ---------------------------------------------------------------- restart

    def restore(
        self, commits: NDArray[np.uint64], steps: NDArray[np.int64], lost: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Find the items that a former process has left; `damage` says what of them was not whole.

        Args:
            commits: those of the store, by row.
            steps: of each chunk, by row.
            lost: which rows had a chunk that is damaged.

        Returns:
            The row of every item that is still there.

        Raises:
            ConfigError: an item is whole, and does not lie within its chunk: no process of this program
                leaves that.
        """
        files = self._files
        if not files.totals_are_possible():
            raise self._damaged("counters")
        filled = files.drop_damaged()
        self.newest_commit = int(self._commits[filled].max(initial=0))
        places = self._items["row"][filled]
        if np.any((places < 0) | (places >= len(commits))):
            raise self._damaged()
        valid = commits[places] == self._commits[filled]
        self.damage.items += int(np.count_nonzero(lost[places] & ~valid))
        if self.config.max_times_sampled:
            valid &= self._sampled(filled) < self.config.max_times_sampled
        whole = filled[valid]  # of a chunk that was committed, so these were written to their ends
        offsets, lengths = (self._items[name][whole].astype(np.int64) for name in ("offset", "length"))
        if not (
            np.all(offsets >= 0)
            and np.all(lengths > 0)
            and np.all(offsets + lengths <= steps[self._items["row"][whole]])
        ):
            raise self._damaged()
        files.mend_priorities(whole)
        self._commits[filled[~valid]] = 0  # its chunk was never committed, or is gone
        files.find_first_ids()
        slots = filled[valid]
        keys = self._ids[slots], self._items["offset"][slots], self._commits[slots]
        slots = slots[np.lexsort(keys)]  # in the order of their age
        self.size = len(slots)
        self._shortest = int(self._items["length"][slots].min(initial=_LONGEST))
        mask = np.ones(self._slots, bool)
        mask[slots] = False
        free = np.flatnonzero(mask)
        # Continue behind the newest item, as if nothing had happened.
        if len(slots):
            free = np.concatenate([free[free > slots[-1]], free[free <= slots[-1]]])
        self._free[: len(free)] = free
        self._free_at = 0
        priorities = self._priorities[slots]
        self.sampler.insert(slots, priorities)
        self.remover.insert(slots, priorities)
        rows = self._items["row"][slots].astype(np.int64)
        self._rows[slots] = rows
        if len(slots):
            begins = np.flatnonzero(np.diff(rows, prepend=-1))
            counts = np.diff(begins, append=len(rows))
            firsts = slots[begins].tolist()
            self._first_slot = dict(
                zip(rows[begins].tolist(), zip(firsts, counts.tolist(), strict=True), strict=True)
            )
            # Where the slots of a chunk are not consecutive, they are listed.
            jumps = np.flatnonzero((np.diff(rows) == 0) & (np.diff(slots) != 1))
            for at in np.unique(np.searchsorted(begins, jumps, side="right") - 1).tolist():
                self._remember(int(rows[begins[at]]), slots[begins[at] : begins[at] + counts[at]])
        self._restore_totals()
        return rows

    def _restore_totals(self) -> None:
        limiter, totals = self.limiter, self._header.values
        limiter.inserted, limiter.sampled = int(totals[0]), int(totals[1])
        limiter.base = float(totals[2])
        self.dropped_items = int(totals[5])
        limits = (limiter.samples_per_insert, float(limiter.min_items))
        if tuple(totals[3:5]) != limits:
            if not self._header.found:
                limiter.inserted = self.size
            limiter.forgive()
        self._write_totals()

    def _write_totals(self) -> None:
        limiter = self.limiter
        limits = limiter.samples_per_insert, limiter.min_items
        totals = (
            limiter.inserted,
            limiter.sampled,
            limiter.base,
            *limits,
            self.dropped_items,
            self._files.used,
            0,
        )
        if totals != self._written:
            self._header.write(totals)
            self._written = totals

    def _damaged(self, what: str = "items") -> ConfigError:
        """The error for what no process of this program leaves, whenever it is killed."""
        return ConfigError(
            f"the {what} of table {self.config.name!r} are damaged: restore the folder, or use another"
        )

    # ---------------------------------------------------------------- items

    def insert(
        self,
        row: int,
        commit: int,
        offsets: NDArray[np.int32],
        lengths: NDArray[np.int32],
        priorities: NDArray[np.float64],
        rng: np.random.Generator,
    ) -> None:
        """Add items of one chunk, removing others where the table is full. They exist once it commits."""
        count = len(offsets)
        if self.size + count > self._slots:
            excess = self.size + count - self.config.capacity
            if self.config.is_queue:
                self.count_dropped(excess)
            self._remove_excess(excess, rng)
        slots = self._take_slots(count)
        items = np.empty(count, ITEM)
        items["commit"], items["row"], items["sampled"] = commit, row, 0
        items["offset"], items["length"] = offsets, lengths
        self._files.rate(slots, priorities)
        self._files.write(slots, items)
        self._rows[slots] = row
        self.size += count
        self._shortest = min(self._shortest, int(lengths.min()))
        self.held_items = 0
        self.sampler.insert(slots, priorities)
        self.remover.insert(slots, priorities)
        self._remember(row, slots)

    def admits(self, count: int) -> bool:
        """Whether this many new items are taken in; else `when_full` of a queue has them dropped."""
        if self.size + count <= self.config.capacity:
            return True
        keeps_oldest = self.config.when_full == "keep_oldest"
        return not (keeps_oldest or (self.config.when_full == "alternate" and self._drops_latest))

    def count_dropped(self, count: int) -> None:
        """Count items that a full queue has dropped, of those that it held or of those that came."""
        self.dropped_items += count
        self._write_totals()
        self._drops_latest = not self._drops_latest

    @property
    def damage(self) -> Damage:
        """What of the files was not what had been written."""
        return self._files.damage

    @property
    def shortest(self) -> int:
        """Steps that no item here is shorter than."""
        return self._shortest if self.size else 1

    def count_inserted(self, count: int) -> None:
        """Count this many items as inserted, whose chunk has been committed."""
        self.limiter.inserted += count
        self._write_totals()

    def remove(self, slots: Slots) -> None:
        """Take out `slots [n]`, all distinct and filled."""
        rows = self._rows[slots].astype(np.int64)
        self._forget(slots)
        self._release(rows)

    def _drop_damaged_among(self, slots: Slots) -> int:
        """Take out those of `slots [n]` whose own records are damaged; returns how many they were."""
        right = whole_items(self.items(slots), slots, self._slots)
        if right.all():
            return 0
        slots = np.unique(slots[~right])
        rows = self._rows[slots].astype(np.int64)
        with CHANGE:
            self._forget(slots)
            self._files.empty(slots)
            self._release(rows)
        self.damage.items += len(slots)
        _log.error("%d items of table %r are damaged and were removed", len(slots), self.config.name)
        return len(slots)

    def drop_chunk(self, row: int, commit: int) -> int:
        """Take out the items of a chunk that is gone already; returns how many they were."""
        slots = self._slots_of(row)
        slots = slots[self._commits[slots] == np.uint64(commit)]
        if len(slots):
            self._forget(slots)
        return len(slots)

    def draw(self, count: int, rng: np.random.Generator) -> Chosen | None:
        """Choose `count` slots to sample, and the probability of each; None where there are not enough.

        Where the learner chooses, these are more: its candidates. Nothing changes until `take`. An item is
        not chosen more often than it may be sampled.
        """
        while True:
            slots, probabilities = self.sampler.select(count, rng)
            if len(slots) < count:
                return None
            if self._drop_damaged_among(slots):
                continue
            if not self.config.max_times_sampled or self.sampler.ordered:
                return slots, probabilities
            chosen = self._draw_again(slots, probabilities, rng)
            if chosen is None or not self._drop_damaged_among(chosen[0]):
                return chosen

    def _draw_again(
        self, slots: Slots, probabilities: NDArray[np.float64], rng: np.random.Generator
    ) -> Chosen | None:
        """Replace what was drawn more often than it may be by further draws among the rest."""
        count, limit = len(slots), self.config.max_times_sampled
        kept: list[Chosen] = []
        exhausted: list[Slots] = []
        missing = count
        try:
            while len(slots):
                allowed = limit - self._sampled(slots) - self._uses[slots]
                good = _occurrence(slots) < allowed
                slots, probabilities = slots[good], probabilities[good]
                with CHANGE:
                    np.add.at(self._uses, slots, 1)
                    kept.append((slots, probabilities))
                missing -= len(slots)
                if not missing:
                    break
                empty = np.unique(slots)
                empty = empty[self._sampled(empty) + self._uses[empty] >= limit]
                with CHANGE:
                    self.sampler.delete(empty)
                    exhausted.append(empty)
                slots, probabilities = self.sampler.select(missing, rng)
        finally:  # even where there is no memory for it
            with CHANGE:
                for each in exhausted:
                    self.sampler.insert(each, self._priorities[each])
                for each, _ in kept:
                    self._uses[each] = 0
        chosen = np.concatenate([each for each, _ in kept])
        return None if missing else (chosen, np.concatenate([each for _, each in kept]))

    def sample_blocked(self, count: int) -> str | None:
        """Why `count` items may not be sampled now; None if they may."""
        if self._needs_as_many and self.size < count:
            reason = f"batch size: {self.size} of {count} items"
            if self.size + self.held_items > self.config.capacity:
                # Neither side can move, so say what to change.
                return f"{reason}, and {self.held_items} more do not fit in a queue of {self.config.capacity}"
            return reason
        return self.limiter.sample_blocked(self.size, count)

    def impossible(self, count: int) -> str | None:
        """Why `count` items can never be sampled at once; None if they can."""
        if self._needs_as_many and count > self.config.capacity:
            return f"a batch of {count} of a table of {self.config.capacity} items, none of them twice"
        return self.limiter.impossible(count)

    @property
    def _needs_as_many(self) -> bool:
        """Whether a batch needs as many items as it has rows."""
        return self.sampler.ordered or self.config.max_times_sampled > 0

    def take(self, slots: Slots, times: int = 1) -> None:
        """Note that `slots` are given away once more; at a restart, what went often enough is gone."""
        add_counts(self._items["sampled"], slots, times * SAMPLED_UNIT)

    def _sampled(self, slots: Slots) -> NDArray[np.int64]:
        """How often the items at `slots [n]` have been sampled."""
        return self._items["sampled"][slots] // SAMPLED_UNIT

    def count_sampled(self, slots: Slots, rng: np.random.Generator) -> None:
        """Count that `slots`, which were taken, have been sampled; those go that were often enough."""
        self.limiter.sampled += len(slots)
        self._write_totals()
        if self.config.max_times_sampled:
            done = slots[self._sampled(slots) >= self.config.max_times_sampled]
            if len(done):
                self.remove(np.unique(done))
        self._batches += 1
        if self._batches >= self.config.soft_period_batches:
            self._batches = 0
            if self.size > self.config.capacity:
                self._remove_excess(self.size - self.config.capacity, rng)

    def _remove_excess(self, count: int, rng: np.random.Generator) -> None:
        self.remove(self.remover.distinct(count, rng))

    def update(
        self, ids: NDArray[np.uint64], priorities: NDArray[np.float64], *, chosen: bool = False
    ) -> tuple[int, int]:
        """Set the priorities of items by id; returns how many were invalid, and how many ids unknown.

        `chosen` among candidates, each item counts as sampled; other tables have counted it already.
        """
        valid = valid_priorities(priorities)
        invalid = len(ids) - int(np.count_nonzero(valid))
        slots = ((ids - np.uint64(1)) % np.uint64(self._slots)).astype(np.int64)
        known = (self._ids[slots] == ids) & (self._commits[slots] != 0)
        good = valid & known
        slots, priorities = slots[good], priorities[good]
        self._files.rate(slots, priorities)
        self.sampler.update(slots, priorities)
        self.remover.update(slots, priorities)
        if chosen and self.config.scored_by == "learner":
            self.take(slots)
        return invalid, int(np.count_nonzero(valid & ~known))

    def priorities(self, slots: Slots) -> NDArray[np.float64]:
        """The raw priorities of `slots [n]`."""
        return self._priorities[slots]

    def filled(self) -> Slots:
        """All slots that hold an item."""
        return np.flatnonzero(self._commits)

    # ---------------------------------------------------------------- slots

    def _take_slots(self, count: int) -> Slots:
        at = (self._free_at + np.arange(count)) % self._slots
        self._free_at = (self._free_at + count) % self._slots
        return self._free[at]

    def _forget(self, slots: Slots) -> None:
        self._commits[slots] = 0
        self.sampler.delete(slots)
        self.remover.delete(slots)
        end = self._free_at + (self._slots - self.size)
        self._free[(end + np.arange(len(slots))) % self._slots] = slots
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
        return self._scattered.pop(row, NO_SLOTS)


def _occurrence(slots: Slots) -> NDArray[np.int64]:
    """How often `slots[i]` stands before position `i`."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    runs = np.diff(np.append(firsts, len(slots)))
    counts = np.empty(len(slots), np.int64)
    counts[order] = np.arange(len(slots)) - np.repeat(firsts, runs)
    return counts
