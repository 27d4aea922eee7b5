"""Where chunks go: runs of units along several lanes, in the same order along each of them.

A lane is an array of units (records, entries, bytes). Every chunk has one run in each lane, and all lanes
keep their runs in one order, so one list and one cursor describe them all. The next chunk goes behind the
cursor: into the gap that freed chunks have left there, behind everything else where the lanes may grow, or to
the front again. Chunks that are freed in the order of their age make a ring of this. Where some outlive
others, the cursor skips the living, for nothing is ever moved: a reader of a chunk needs to know only that it
is still there. Where there is no room left at all, the oldest chunk goes that is not kept, and the cursor
takes its place.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Space:
    """Places of chunks along lanes; the position along the first lane is the chunk's *row*.

    The lanes start empty and grow while most of what they have is in use, so that they end a little larger
    than what is alive at one time, whatever that turns out to be.

    Attributes:
        limits: units of each lane in use at present, the point where its positions wrap.
        budget_bytes: what the lanes may grow to, all together.
        live_bytes: of the chunks that are there.
        ceilings: units that each lane may grow to at present, at most what its storage has room for.
    """

    SLACK = 16
    """A sixteenth of the space should be free before the front is used again; until then it grows."""

    CREDIT = 16
    """Chunks that may be skipped for each one that was freed: the cost of looking for a gap is bounded."""

    MAX_CREDIT = 1024

    def __init__(
        self,
        most: Sequence[int],
        unit_bytes: Sequence[int],
        budget_bytes: int,
        starts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        """Lanes of at most `most` units each.

        Args:
            most: units that the backing storage of each lane has room for.
            unit_bytes: size of a unit of each lane.
            budget_bytes: see the attribute.
            starts: `[rows, lanes]`, where the run of each chunk starts. Belongs to the caller.
            counts: `[rows, lanes]`, its units.
        """
        self.limits = [0] * len(most)
        self.budget_bytes = budget_bytes
        self.ceilings = list(most)
        self._most = tuple(most)
        self._unit_bytes = list(unit_bytes)
        self._starts = starts
        self._counts = counts
        # The chunks as a list in the order of their positions; both of its ends are the same entry.
        self._end = most[0]
        self._next = np.full(most[0] + 1, self._end, np.int32)
        self._previous = np.full(most[0] + 1, self._end, np.int32)
        self._cursor = self._end
        self._births = np.zeros(most[0], np.int64)  # numbers that ascend; 0 where there is no chunk
        self._born = 0
        self._ages: OrderedDict[int, None] = OrderedDict()  # the rows that were never kept, oldest first
        self._kept: set[int] = set()
        self._let_go: list[tuple[int, int]] = []  # a heap of births and rows, some of which have left
        self._live = 0
        self.live_bytes = 0
        self._credit = 0
        self._hopeless: list[int] | None = (
            None  # a size for which there was no gap, and nothing has gone since
        )

    def __len__(self) -> int:
        return self._live

    @property
    def used_bytes(self) -> int:
        """Bytes that the lanes have grown to."""
        return self._bytes(self.limits)

    def restore(self, rows: NDArray[np.int64], limits: Sequence[int]) -> None:
        """Continue with chunks that are there already, oldest first."""
        # Rows are positions along the first lane, and every lane has the same order: one list serves them
        # all.
        order = np.concatenate([[self._end], np.sort(rows), [self._end]]).astype(np.int32)
        self._next[order[:-1]] = order[1:]
        self._previous[order[1:]] = order[:-1]
        self._ages = OrderedDict.fromkeys(rows.tolist())
        self._births[rows] = np.arange(1, len(rows) + 1)
        self._born = self._live = len(rows)
        self.limits = [int(limit) for limit in limits]
        if len(rows):
            ends = (self._starts[rows] + self._counts[rows]).max(axis=0)
            self.limits = [max(limit, int(end)) for limit, end in zip(limits, ends, strict=True)]
            self._cursor = int(rows[-1])
            self.live_bytes = self._bytes(self._counts[rows].sum(axis=0).tolist())

    def place(self, counts: Sequence[int]) -> list[int] | None:
        """Where a chunk of `counts` units would go; None where `oldest()` has to go first.

        Also None where there is nothing that may go, and it still does not fit.
        """
        if not self._live:
            return self._place_first(counts)
        starts = self._search(counts)
        # The search may have ended for want of credit, not of room: to grow drops nothing, so it goes first.
        if starts is None and self._may_grow(counts, self.limits):
            self._cursor = int(self._previous[self._end])
            starts = self._place_here(counts)
        if starts is None and self.oldest() is None:
            starts = self._search_everywhere(counts)
        return starts

    def _search(self, counts: Sequence[int], *, everywhere: bool = False) -> list[int] | None:
        """A place behind the cursor, or behind one of the chunks that follow, as far as the credit goes."""
        # In a full store whose old chunks stay, each insert would look at all of them. Every chunk that goes
        # pays for a few looks instead, so that an insert costs the same on average whatever lives.
        for _ in range(self._live + 1):
            starts = self._place_here(counts)
            if starts is not None:
                return starts
            if not everywhere:
                if self._credit <= 0:
                    return None
                self._credit -= 1
            self._cursor = int(self._next[self._cursor])
        self._credit = 0  # no gap is large enough
        return None

    def _search_everywhere(self, counts: Sequence[int]) -> list[int] | None:
        """A place in any gap, whatever it costs to look: for when no chunk may go. Not twice in vain."""
        least = self._hopeless
        if least is not None and all(count >= few for count, few in zip(counts, least, strict=True)):
            return None
        starts = self._search(counts, everywhere=True)
        self._hopeless = list(counts) if starts is None else None
        return starts

    def fits_empty(self, counts: Sequence[int]) -> bool:
        """Whether a chunk of `counts` units would have a place if there were no other."""
        return (
            all(count <= most for count, most in zip(counts, self._most, strict=True))
            and self._bytes(counts) <= self.budget_bytes
        )

    def fits_now(self, counts: Sequence[int]) -> bool:
        """Whether a chunk of `counts` units is within the present ceilings."""
        return all(count <= ceiling for count, ceiling in zip(counts, self.ceilings, strict=True))

    def oldest(self) -> int | None:
        """The row of the oldest chunk that may go; None where all are kept."""
        # Those that were kept came back out of their order: a heap has them, and births compare across both.
        # What has left in another way is still in the heap, with a birth that its row no longer has.
        row = next(iter(self._ages), None)
        while self._let_go and self._births[self._let_go[0][1]] != self._let_go[0][0]:
            heapq.heappop(self._let_go)
        if self._let_go and (row is None or self._let_go[0][0] < self._births[row]):
            return self._let_go[0][1]
        return row

    def take(self, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Take the place that was the last answer of `place`."""
        row, before = starts[0], self._cursor
        after = self._next[before]
        self._next[row], self._previous[row] = after, before
        self._next[before] = self._previous[after] = row
        self._cursor = row
        self._born += 1
        self._births[row] = self._born
        self._ages[row] = None
        self._live += 1
        self.live_bytes += self._bytes(counts)
        self.limits = [max(n, s + c) for n, s, c in zip(self.limits, starts, counts, strict=True)]

    def keep(self, row: int) -> None:
        """Have the chunk at `row`, just taken or restored, stay until `let_go`, whatever needs room."""
        del self._ages[row]
        self._kept.add(row)

    def let_go(self, row: int) -> None:
        """Let the chunk at `row`, which was kept, go in its turn."""
        self._kept.discard(row)
        heapq.heappush(self._let_go, (int(self._births[row]), row))
        if len(self._let_go) > 2 * self._live + 64:  # most of them have left
            self._let_go = [each for each in self._let_go if self._births[each[1]] == each[0]]
            heapq.heapify(self._let_go)
        self._hopeless = None

    def free(self, row: int) -> None:
        """Give back the place of the chunk at `row`."""
        self._unlink(row)
        self._credit = min(self._credit + self.CREDIT, self.MAX_CREDIT)

    def evict(self, row: int) -> None:
        """The same, for the next chunk to go there."""
        self._cursor = self._unlink(row)

    def _unlink(self, row: int) -> int:
        before, after = int(self._previous[row]), int(self._next[row])
        self._next[before], self._previous[after] = after, before
        if self._cursor == row:
            self._cursor = before
        self._births[row] = 0
        self._ages.pop(row, None)
        self._kept.discard(row)
        self._hopeless = None
        self._live -= 1
        self.live_bytes -= self._bytes(self._counts[row].tolist())
        return before

    # ---------------------------------------------------------------- one place

    def _place_first(self, counts: Sequence[int]) -> list[int] | None:
        zeros = [0] * len(counts)
        self._cursor = self._end
        if not self._may_grow(counts, zeros):
            # Nothing is stored: let the lanes find their proportions again.
            self.limits = zeros
            if not self._may_grow(counts, zeros):
                return None
        return zeros

    def _place_here(self, counts: Sequence[int]) -> list[int] | None:
        """A place right behind the cursor, or at the front where the cursor is behind everything."""
        if self._cursor == self._end:
            begins = [0] * len(counts)
        else:
            starts, units = self._starts[self._cursor].tolist(), self._counts[self._cursor].tolist()
            begins = [start + count for start, count in zip(starts, units, strict=True)]
        after = int(self._next[self._cursor])
        if after != self._end:
            return begins if _fits(begins, counts, self._starts[after].tolist()) else None
        if _fits(begins, counts, self.limits):
            return begins
        front_fits = _fits([0] * len(counts), counts, self._starts[int(self._next[self._end])].tolist())
        used = self.used_bytes
        # Lanes that have grown stay so, on the disk and in the page cache: they stop as soon as there is room
        # to spare at the front. Earlier than that, going there would drop what lives.
        if self._may_grow(counts, begins):
            roomy = self.live_bytes * self.SLACK <= used * (self.SLACK - 1) and front_fits
            holes = self._credit > 0 and self.live_bytes * 4 <= used * 3
            if not roomy and not holes:
                return begins
        self._cursor = self._end
        return [0] * len(counts) if front_fits else None

    def _may_grow(self, counts: Sequence[int], begins: Sequence[int]) -> bool:
        """Whether the lanes may be as long as to have `counts` units behind `begins`."""
        ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
        growth = [max(end - limit, 0) for end, limit in zip(ends, self.limits, strict=True)]
        return (
            all(end <= ceiling for end, ceiling in zip(ends, self.ceilings, strict=True))
            and self.used_bytes + self._bytes(growth) <= self.budget_bytes
        )

    def _bytes(self, units: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(units, self._unit_bytes, strict=True))


def _fits(begins: Sequence[int], counts: Sequence[int], bounds: Sequence[int]) -> bool:
    return all(begin + count <= bound for begin, count, bound in zip(begins, counts, bounds, strict=True))
