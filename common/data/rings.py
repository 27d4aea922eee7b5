"""Space that is given out in order and comes back in the same order: a ring that finds its own size."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Ring:
    """Allocates contiguous runs of units; the oldest run is always the next to be freed.

    The ring starts empty and grows while its front is still in use, so that it ends a little larger than what
    is alive at one time, whatever that turns out to be. Nothing is stored here: these are positions only.

    Attributes:
        most: units that the backing storage has room for.
        limit: units in use at present, the point where positions wrap.
    """

    SLACK = 16
    """The front counts as free when a sixteenth of the ring is; until then growing beats wrapping."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = 0
        self._runs = 0
        self._tail = 0
        self._head = 0

    @property
    def used(self) -> int:
        """Units between the oldest run and the newest, both included."""
        if not self._runs:
            return 0
        span = self._head - self._tail
        return span if span > 0 else span + self.limit

    def place(self, count: int, growth: int) -> int | None:
        """Where ``count`` units would go, growing by at most ``growth`` units; None without room."""
        if not self._runs:
            return 0 if count <= max(self.limit, min(self.limit + growth, self.most)) else None
        if self._head <= self._tail:  # the newest run has wrapped behind the oldest
            return self._head if self._head + count <= self._tail else None
        if self._head + count <= self.limit:
            return self._head
        may_grow = self._head + count <= min(self.limit + growth, self.most)
        front_free = count <= self._tail
        if may_grow and not (front_free and self._tail * self.SLACK >= self.limit):
            return self._head
        return 0 if front_free else None

    def take(self, start: int, count: int) -> None:
        """Take ``count`` units at ``start``, as ``place`` said."""
        if not self._runs:
            self._tail = start
        self._runs += 1
        self._head = start + count
        self.limit = max(self.limit, self._head)

    def free(self, next_start: int) -> None:
        """Give back the oldest run; the next one starts at ``next_start`` (anything if it was the last)."""
        self._runs -= 1
        self._tail = next_start if self._runs else self._head

    def reset(self) -> None:
        """Forget the size of an empty ring."""
        if self._runs:
            raise ValueError("the ring is in use")
        self.limit = self._head = self._tail = 0

    def restore(self, starts: NDArray[np.int64], ends: NDArray[np.int64], limit: int) -> None:
        """Continue with runs that are there already, oldest first."""
        self._runs = len(starts)
        self.limit = limit
        if len(starts):
            self._tail, self._head = int(starts[0]), int(ends[-1])
            self.limit = max(limit, int(ends.max()))
