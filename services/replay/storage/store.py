"""Chunks in memory-mapped files: stored once, freed when no item is left, all there after `kill -9`.

Every bit of state is in the page cache, which belongs to the kernel and outlives the process. What makes a
chunk exist is one aligned 8-byte word, the `commit` of its record: it is written after everything else of
the chunk (the entries and the items in every table), and cleared before anything of it is reused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.columns import Column, Lane, Payload, damaged_chunks, make_column
from troupe.common.data.format import HEADER_FILE, RECORDS_FILE, fence, record_dtype, record_sums
from troupe.common.data.pager import FilePager
from troupe.common.data.schema import FieldSpec
from troupe.common.errors import DISK_FULL
from troupe.services.replay.storage.header import Header
from troupe.services.replay.storage.salvage import rows_written, whole_chunks
from troupe.services.replay.storage.space import Space

RESERVE_BYTES = 1 << 16
MAX_RESERVE_BYTES = 1 << 24
"""Room on the disk is taken in steps of a sixteenth of a lane, but at least and at most so much."""

DISK_RETRY_S = 1.0
"""A full disk is tried again after this."""

NEAR_ROWS = 4096
"""Rows that are looked at for the next chunk at one time."""

_log = logging.getLogger(__name__)


def add_counts(totals: NDArray[np.signedinteger], places: NDArray[np.int64], step: int = 1) -> None:
    """Add `step` to `totals` at each of `places [n]`, repeats included."""
    # Of the very type: with a Python number numpy is ten times as slow.
    np.add.at(totals, places, totals.dtype.type(step))


class StoreFullError(ValueError):
    """A chunk that is larger than the whole store may be."""


class NoRoomError(Exception):
    """There is no room for a chunk now, though there will be: `str()` says what has to happen."""


FIRST_COMMIT = 1 << 48
"""Commits are above this, so that no single flipped bit makes of one the zero that says: no chunk."""


class ChunkStore:
    """Chunks of one signature (a list of fields) within a budget of bytes.

    A chunk is known by its *row*, the place of its record, which is reused, and by its *commit*, a 64-bit
    number that is not. Rows are for indexing, the commit tells whether a row still holds the same chunk.

    Attributes:
        damaged: rows of the chunks that a former process has left and that were not whole.
        header_damaged: copies of the header, of two, that were not whole.
    """

    def __init__(
        self,
        pager: FilePager,
        specs: Sequence[FieldSpec],
        budget_bytes: int,
        max_chunks: int,
        max_entries: Mapping[str, int],
    ) -> None:
        """Map the files; `max_entries`, by field, may not change while they exist."""
        self.specs = tuple(specs)
        self._folder = pager.folder
        self.columns: dict[str, Column] = {
            spec.name: make_column(spec, number, pager, budget_bytes, max_entries[spec.name])
            for number, spec in enumerate(self.specs)
        }
        lanes = [lane for column in self.columns.values() for lane in column.lanes]
        self.record_dtype = record_dtype(1 + len(lanes))
        records = pager.open(RECORDS_FILE, self.record_dtype, (max_chunks,))
        self._records = records.array
        self.commits: NDArray[np.uint64] = self._records["commit"]
        self._record_words = self._records.view(np.uint64).reshape(max_chunks, -1)
        # The same in memory of its own, of whole chunks: whatever happens to the files, it is known where a
        # chunk is, and which one it was. Of rows that are never used this takes no memory.
        self._known = np.zeros(max_chunks, self.record_dtype)
        self.versions: NDArray[np.int64] = self._known["version"]
        self.times_s: NDArray[np.float64] = self._known["time_s"]
        self.steps: NDArray[np.int64] = self._known["steps"]
        self._lanes = [Lane(max_chunks, self.record_dtype.itemsize, [records]), *lanes]
        # The last commit number given out, then the limits of the lanes.
        self._header = Header(pager, HEADER_FILE, 1 + len(self._lanes))
        self.header_damaged = self._header.damaged
        self._last_commit = max(int(self._header.values[0]), FIRST_COMMIT)
        self._first_lane: dict[str, int] = {}
        position = 1
        for name, column in self.columns.items():
            self._first_lane[name] = position
            position += len(column.lanes)
        self.references = np.zeros(max_chunks, np.int32)
        """Items of each row, over all tables."""
        self._checked = np.zeros(max_chunks, np.uint64)  # commits of chunks that are known to be whole
        self.queued = np.zeros(max_chunks, np.int32)
        """Those of queues among them: a chunk with one of these is never evicted."""
        self.space = Space(
            [lane.most for lane in self._lanes],
            [lane.unit_bytes for lane in self._lanes],
            budget_bytes,
            self._known["starts"],
            self._known["counts"],
        )
        self.damaged = self._restore(records.path)
        self._reserved = list(self.space.limits)
        self._disk_full = False
        self._retry_s = 0.0

    @property
    def chunks(self) -> int:
        """Chunks that are there."""
        return len(self.space)

    @property
    def used_bytes(self) -> int:
        """Bytes that the lanes have grown to."""
        return self.space.used_bytes

    def _restore(self, path: Path) -> NDArray[np.int64]:
        """Find the chunks that a former process has left; returns the rows of those that are damaged."""
        limits = [int(limit) for limit in self._header.values[1:]]
        # A power cut may have kept records and not the header that counts them.
        written = rows_written(path, self.record_dtype.itemsize, len(self._records))
        rows = self._live_rows(max(limits[0], written))
        most = [lane.most for lane in self._lanes]
        whole, damaged = whole_chunks(self._records, rows, self.specs, self._first_lane, most)
        lost = np.flatnonzero(self._records["incarnation"][: limits[0]] == 0)
        damaged = np.union1d(damaged, lost)
        self.commits[damaged] = 0
        self._known[whole] = self._records[whole]
        whole = whole[np.argsort(self.commits[whole])]
        self.space.restore(whole, [min(limit, least) for limit, least in zip(limits, most, strict=True)])
        if len(whole):
            self.raise_commit(int(self.commits[whole[-1]]))
        return damaged

    def raise_commit(self, commit: int) -> None:
        """Never give out a commit up to this one: something in the files has it."""
        self._last_commit = max(self._last_commit, commit)

    def _live_rows(self, limit: int) -> NDArray[np.int64]:
        """The rows of all chunks, which are below `limit`.

        Nothing is read beyond it: no room was taken for that, and on a tmpfs reading takes some.
        """
        return np.flatnonzero(self.commits[:limit])

    def live(self) -> NDArray:
        """The records of all chunks."""
        return self._records[self._live_rows(self.space.limits[0])]

    def records_in_use(self) -> NDArray:
        """The records up to the last row that was ever used."""
        return self._records[: self.space.limits[0]]

    def lane_files(self) -> dict[str, NDArray]:
        """The used part of each file of the lanes, by name, but of the records."""
        lanes = zip(self._lanes[1:], self.space.limits[1:], strict=True)
        return {file.name: file.array[:limit] for lane, limit in lanes for file in lane.files}

    def header(self) -> NDArray:
        """What stands in the header's file."""
        return self._header.file()

    def prepare(self, payloads: Mapping[str, Payload]) -> list[int] | None:
        """Where a chunk of `payloads` would go in every lane; None while another one is in its way.

        Raises StoreFullError if it does not even fit in an empty store, NoRoomError if the disk is too full
        for it, whatever would go.
        """
        counts = self._counts(payloads)
        if not self.space.fits_empty(counts):  # known before any other has left for it
            raise StoreFullError(
                f"a chunk of {self._bytes(payloads)} bytes, the store may use {self.space.budget_bytes}"
            )
        if self._disk_full and system.monotonic() >= self._retry_s:
            self.space.ceilings = [lane.most for lane in self._lanes]
        starts = self.space.place(counts)
        if starts is not None:
            if self._reserve([start + count for start, count in zip(starts, counts, strict=True)]):
                return starts
            starts = self.space.place(counts)  # somewhere within what is reserved
        if starts is None and not self.space.fits_now(counts):
            raise NoRoomError(f"the disk is full: free space where {self._folder} is")
        return starts

    def _reserve(self, ends: list[int]) -> bool:
        """Take room on the disk up to `ends` of the lanes; False, and no growth for now, if it is full."""
        grown = False
        for i, end in enumerate(ends):
            if end > self._reserved[i]:
                if not self._reserve_lane(i, end):
                    self._retry_s = system.monotonic() + DISK_RETRY_S
                    self.space.ceilings = list(self._reserved)
                    if not self._disk_full:
                        self._disk_full = True
                        used = self.used_bytes >> 20
                        _log.error("the disk is full: replay stays at %d MiB until there is space", used)
                    return False
                grown = True
        if grown and self._disk_full:
            self._disk_full = False
            _log.info("there is space on the disk again: replay continues to grow")
        return True

    def _reserve_lane(self, i: int, end: int) -> bool:
        """Take room for one lane, up to `end` and some more if there is as much; False if there is not."""
        lane, reserved = self._lanes[i], self._reserved[i]
        most, least = MAX_RESERVE_BYTES // lane.unit_bytes, RESERVE_BYTES // lane.unit_bytes
        step = max(min(reserved // 16, most), least)
        for target in (min(max(end, reserved + step), lane.most), end):
            try:
                for file in lane.files:
                    file.reserve(reserved, target)
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
            else:
                self._reserved[i] = target
                return True
        return False

    def write(
        self, starts: list[int], payloads: Mapping[str, Payload], items: int, queued: int = 0
    ) -> tuple[int, int]:
        """Write the entries at the positions that `prepare` returned, for `items` items over all tables.

        Of these, `queued` are in queues. Returns the row and its future commit.
        """
        row = starts[0]
        commit = self._last_commit = self._last_commit + 1
        counts = self._counts(payloads)
        self._known["starts"][row], self._known["counts"][row] = starts, counts
        self._records["incarnation"][row] = 1  # any: rows up to the limit have one, or their page is lost
        self.space.take(starts, counts)
        # Before anything of the chunk: a process that dies half-way has used the number up, so that items
        # which it has left in a table never match a later chunk in this row; and a restart looks at all rows.
        self._header.write([commit, *self.space.limits])
        for name, column in self.columns.items():
            first = self._first_lane[name]
            column.write(starts[first : first + len(column.lanes)], payloads[name], commit)
        self.references[row] = items
        self.keep(np.array([row]), queued)
        return row, commit

    def commit(
        self,
        row: int,
        commit: int,
        *,
        steps: int,
        version: int,
        time_s: float,
        incarnation: int,
        sequence: int,
    ) -> None:
        """Make a written chunk exist. Its items have to be in their tables by now."""
        record = self._known[row : row + 1]
        record["steps"], record["version"], record["time_s"] = steps, version, time_s
        record["incarnation"], record["sequence"] = incarnation, sequence
        record["commit"] = commit
        record["sum"] = record_sums(record)
        written = record.view(np.uint64).copy()
        written[0] = 0  # the commit comes behind everything else
        self._record_words[row] = written
        self.commits[row] = self._checked[row] = commit

    def keep(self, rows: NDArray[np.int64], queued: int = 1) -> None:
        """Count `queued` items of queues more for each of `rows` (repeats allowed), which then stay."""
        if queued:
            fresh = set(rows[self.queued[rows] == 0].tolist())
            add_counts(self.queued, rows, queued)
            for row in fresh:
                self.space.keep(row)

    def let_go(self, rows: NDArray[np.int64]) -> None:
        """Count one item of queues less for each of `rows` (repeats allowed) that is still there."""
        rows = rows[self.queued[rows] > 0]
        add_counts(self.queued, rows, -1)
        for row in set(rows[self.queued[rows] <= 0].tolist()):
            self.space.let_go(row)

    def hold(self, rows: NDArray[np.int64]) -> None:
        """Count one reference more for each of `rows` (repeats allowed), until as many are released."""
        add_counts(self.references, rows)

    def release(self, rows: NDArray[np.int64]) -> None:
        """Count one item less for each of `rows` (repeats allowed), and free what is empty then."""
        add_counts(self.references, rows, -1)
        empty = rows[self.references[rows] <= 0]
        if len(empty):
            for row in set(empty.tolist()):
                self._drop(row)

    def free_unused(self) -> None:
        """Free the chunks that a former process has left without items."""
        rows = self._live_rows(self.space.limits[0])
        for row in rows[self.references[rows] <= 0].tolist():
            self._drop(row)

    def wrong(
        self,
        rows: NDArray[np.int64],
        commits: NDArray[np.uint64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Which of the items `[B]`, of chunks `commits` in `rows`, do not match their checksums."""
        records = self._read_records(rows)
        wrong: NDArray[np.bool_] = (record_sums(records) != records["sum"]) | (records["commit"] != commits)
        starts, first = self._known["starts"][rows], offsets == 0
        for name, column in self.columns.items():
            spec, begins = column.spec, starts[:, self._first_lane[name]] + offsets
            wrong |= column.wrong(begins, lengths + (spec.before + spec.after), commits, first)
        return wrong

    def damaged_chunks(self, rows: NDArray[np.int64], records: NDArray | None = None) -> NDArray[np.bool_]:
        """Which of the chunks in `rows [n]` do not match their checksums.

        `records [n]` take the place of what stands in the file about them.
        """
        found = damaged_chunks(
            self.columns.values(), self._read_records(rows) if records is None else records
        )
        return found if records is not None else found | (self.commits[rows] != self._known["commit"][rows])

    def _read_records(self, rows: NDArray[np.int64]) -> NDArray:
        # As bytes without fields, for numpy copies those several times as fast.
        return self._records.view(f"V{self.record_dtype.itemsize}")[rows].view(self.record_dtype)

    def unchecked(self, rows: NDArray[np.int64], commits: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Those of `rows [B]`, each once, whose chunks this process neither wrote nor found whole.

        Among them are those where the files no longer say that `commits [B]` are there.
        """
        unlike = (self._checked[rows] != commits) | (self.commits[rows] != commits)
        return np.unique(rows[unlike]) if unlike.any() else rows[:0]

    def checked(self, rows: NDArray[np.int64]) -> None:
        """Note that the chunks in `rows` were found whole."""
        self._checked[rows] = self._known["commit"][rows]

    def commit_of(self, row: int) -> int:
        """The commit of the chunk in `row`, whatever its file says; 0 where there is none."""
        return int(self._known["commit"][row])

    def unsynced(self, synced: Callable[[int], int]) -> NDArray[np.int64]:
        """The rows of the chunks whose insert is above what `synced` says of its incarnation."""
        rows = self._live_rows(self.space.limits[0])
        found = self._records[rows]
        pairs = zip(found["incarnation"].tolist(), found["sequence"].tolist(), strict=True)
        return rows[[number > synced(incarnation) for incarnation, number in pairs]]

    def rows_of(self, incarnation: int, sequence: int) -> NDArray[np.int64]:
        """The rows of the chunks of this insert."""
        rows = self._live_rows(self.space.limits[0])
        found = self._known[rows]
        return rows[(found["incarnation"] == incarnation) & (found["sequence"] == sequence)]

    def next_live(self, row: int) -> int:
        """The first row from `row` on with a chunk, or the row behind a few thousand that have none."""
        commits = self.commits[row : min(row + NEAR_ROWS, self.space.limits[0])]
        filled = np.flatnonzero(commits)
        return row + (int(filled[0]) if len(filled) else len(commits))

    def drop(self, row: int) -> int:
        """Free the chunk at `row`, whatever is in it; returns its former commit.

        Its items must go as soon as this returns.
        """
        commit = self.commit_of(row)
        self._drop(row)
        return commit

    def oldest(self) -> int:
        """The row of the oldest chunk without items of queues. Raises NoRoomError where there is none."""
        row = self.space.oldest()
        if row is None:
            limit = "the disk is" if self._disk_full else "the files are"
            raise NoRoomError(f"{limit} full of items of queues; waits for samples")
        return row

    def evict(self, row: int) -> int:
        """Free the chunk at `row`, to make room; returns its former commit.

        Its items must go as soon as this returns.
        """
        commit = self.commit_of(row)
        self._forget(row)
        self.space.evict(row)
        return commit

    def _drop(self, row: int) -> None:
        self._forget(row)
        self.space.free(row)

    def _forget(self, row: int) -> None:
        self.commits[row] = self._known["commit"][row] = 0
        fence()  # a concurrent reader of the files has to see this before anything is overwritten
        self.references[row] = self.queued[row] = 0

    def gather(
        self,
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        plain: bool = False,
        only: Sequence[str] | None = None,
    ) -> dict[str, NDArray]:
        """The entries of items `[B]`, by field, of all or `only` of these: see `Column.gather`."""
        starts = self._known["starts"][rows]
        arrays = {}
        for name in self.columns if only is None else only:
            column, spec = self.columns[name], self.columns[name].spec
            first = starts[:, self._first_lane[name]] + offsets
            arrays[name] = column.gather(first, lengths + (spec.before + spec.after), plain=plain)
        return arrays

    def _counts(self, payloads: Mapping[str, Payload]) -> list[int]:
        counts = [1]
        for name, column in self.columns.items():
            counts += column.counts(payloads[name])
        return counts

    def _bytes(self, payloads: Mapping[str, Payload]) -> int:
        counts = self._counts(payloads)
        return sum(n * lane.unit_bytes for n, lane in zip(counts, self._lanes, strict=True))
