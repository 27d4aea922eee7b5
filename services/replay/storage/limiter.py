"""When a table may be sampled, and when writers should pause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Limiter:
    """Holds a table to a minimum size and to a ratio of sampled to inserted items.

    With `samples_per_insert = r` the table keeps `r * inserted - sampled` within `error` of what it is
    when the minimum size has just been reached: samples wait below, writers pause above. Both totals count
    items over the life of the table.

    Attributes:
        min_items: items that must be there before anything is sampled.
        samples_per_insert: times an item is sampled on average, 0 for no limit.
        error: samples by which the ratio may be off, either way (see `TableConfig.limiter_error`).
        inserted: items inserted so far.
        sampled: items sampled so far.
        base: surplus that is forgiven, because the limits were others when it came about.
        queue_capacity: items at which writers wait for room, 0 where they do not.
    """

    min_items: int = 1
    samples_per_insert: float = 0.0
    error: float = 0.0
    inserted: int = 0
    sampled: int = 0
    base: float = 0.0
    queue_capacity: int = 0

    def sample_blocked(self, items: int, batch_size: int) -> str | None:
        """Why `batch_size` of the `items` present may not be sampled now; None if they may."""
        if items < self.min_items:
            return f"min size: {items} of {self.min_items} items"
        # As it would be with this batch. For writers it is as it is now: what they have sent is stored all
        # the same, so the surplus may exceed the error by what they have credit for.
        ratio = self.samples_per_insert
        if ratio > 0 and self._surplus() - batch_size < -self.error:
            return f"samples per insert: {self.current:.3g} would exceed {ratio:.3g}; waits for inserts"
        return None

    def insert_blocked(self, items: int) -> str | None:
        """Why writers should pause; None if they need not."""
        if self.queue_capacity and items >= self.queue_capacity:
            return f"queue is full: {items} of {self.queue_capacity} items; waits for samples"
        ratio = self.samples_per_insert
        if ratio > 0 and items >= self.min_items and self._surplus() > self.error:
            return f"samples per insert: {self.current:.3g} is below {ratio:.3g}; waits for samples"
        return None

    @property
    def offset(self) -> float:
        """Place of the ratio in its band: at -1 samples wait for inserts, at 1 writers pause; 0: none."""
        return self._surplus() / self.error if self.samples_per_insert > 0 and self.error > 0 else 0.0

    def insert_held(self, items: int, count: int) -> bool:
        """Whether `count` items have to wait until some of the `items` present have gone."""
        return 0 < self.queue_capacity < items + count

    def impossible(self, batch_size: int) -> str | None:
        """Why a batch of this size could wait for ever, both sides blocked; None if it cannot."""
        # Samples wait below a surplus of `batch_size - error`, writers pause above one of `error`: where the
        # first is the larger, both stand still in between.
        if self.samples_per_insert > 0 and 2 * self.error < batch_size:
            return f"a batch of {batch_size} is more than twice the limiter's error of {self.error:g} samples"
        return None

    def forgive(self) -> None:
        """Start to count from here, after a change of the limits."""
        # The totals are of the table's whole life: a new ratio would ask at once for all the samples that it
        # would have brought since the first item.
        self.base = self.samples_per_insert * max(self.inserted - self.min_items, 0) - self.sampled

    def _surplus(self) -> float:
        """Samples owed to the inserted items, less those that the minimum size brought."""
        return self.samples_per_insert * (self.inserted - self.min_items) - self.sampled - self.base

    @property
    def current(self) -> float:
        """Samples per insert so far, not counting the items of the minimum size, but all those of a queue.

        A queue's minimum is passed on like the rest; that of another table is there before anything counts.
        """
        forgiven = 0 if self.queue_capacity else self.min_items
        return self.sampled / max(self.inserted - forgiven, 1)
