"""Chunks in memory-mapped files: stored once, freed when no item is left, all there after `kill -9`.

Every bit of state is in the page cache, which belongs to the kernel and outlives the process. What makes a
chunk exist is one aligned 8-byte word, the `commit` of its record: it is written after everything else of
the chunk (the entries and the items in every table), and cleared before anything of it is reused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.columns import (
    FULL,
    Column,
    Lane,
    MappedFile,
    Payload,
    damaged,
    make_column,
)
from troupe.common.data.format import HEADER_FILE, RECORDS_FILE, fence, record_dtype
from troupe.common.data.schema import FieldSpec
from troupe.services.replay.storage.space import Space

RESERVE_BYTES = 1 << 16
MAX_RESERVE_BYTES = 1 << 24
"""Room on the disk is taken in steps of a sixteenth of a lane, but at least and at most so much."""

DISK_RETRY_S = 1.0
"""A full disk is tried again after this."""

_log = logging.getLogger(__name__)


def add_counts(totals: NDArray[np.int32], places: NDArray[np.int64], step: int = 1) -> None:
    """Add `step` to `totals` at each of `places [n]`, repeats included.

    As `np.add.at`, at a quarter of its cost.
    """
    distinct, counts = np.unique(places, return_counts=True)
    totals[distinct] += (step * counts).astype(np.int32)


class StoreFullError(ValueError):
    """A chunk that is larger than the whole store may be."""


class NoRoomError(Exception):
    """There is no room for a chunk now, though there will be: `str()` says what has to happen."""


class ChunkStore:
    """Chunks of one signature (a list of fields) within a budget of bytes.

    A chunk is known by its *row*, the place of its record, which is reused, and by its *commit*, a 64-bit
    number that is not. Rows are for indexing, the commit tells whether a row still holds the same chunk.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[FieldSpec],
        budget_bytes: int,
        max_chunks: int,
        most_entries: Mapping[str, int],
    ) -> None:
        """Map the files in `folder`; `most_entries`, by field, may not change while they exist."""
        self.specs = tuple(specs)
        self._folder = folder
        self.columns: dict[str, Column] = {
            spec.name: make_column(spec, folder, budget_bytes, most_entries[spec.name]) for spec in self.specs
        }
        lanes = [lane for column in self.columns.values() for lane in column.lanes]
        self.record_dtype = record_dtype(1 + len(lanes))
        records = MappedFile(folder / RECORDS_FILE, self.record_dtype, (max_chunks,))
        self._records = records.array
        self.commits: NDArray[np.uint64] = self._records["commit"]
        self.versions: NDArray[np.int64] = self._records["version"]
        self.times_s: NDArray[np.float64] = self._records["time_s"]
        self.steps: NDArray[np.int64] = self._records["steps"]
        self._lanes = [Lane(max_chunks, self.record_dtype.itemsize, [records]), *lanes]
        # Position 0: the last commit number given out. The rest: the limits of the lanes.
        header = MappedFile(folder / HEADER_FILE, "uint64", (1 + len(self._lanes),), sparse=False)
        self._header: NDArray[np.uint64] = header.array
        self._first_lane: dict[str, int] = {}
        position = 1
        for name, column in self.columns.items():
            self._first_lane[name] = position
            position += len(column.lanes)
        self.references = np.zeros(max_chunks, np.int32)
        """Items of each row, over all tables."""
        self.queued = np.zeros(max_chunks, np.int32)
        """Those of queues among them: a chunk with one of these is never evicted."""
        self.space = Space(
            [lane.most for lane in self._lanes],
            [lane.unit_bytes for lane in self._lanes],
            budget_bytes,
            self._records["starts"],
            self._records["counts"],
        )
        self._restore()
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

    def _restore(self) -> None:
        """Find the chunks that a former process has left."""
        rows = self._live_rows(int(self._header[1]))
        # Rows ascend along the first lane, and so does every other lane: neighbours are all there is to
        # compare.
        starts, counts = self._records["starts"][rows], self._records["counts"][rows]
        ends = starts + counts
        limits = self._header[1:].astype(np.int64)
        if (
            np.any(ends[:-1] > starts[1:])
            or np.any(starts < 0)
            or np.any(counts < 0)
            or np.any(ends > limits)
        ):
            raise damaged(self._folder, "chunks overlap, or lie outside of the files")
        for spec in self.specs:  # by these the items are looked at
            entries = counts[:, self._first_lane[spec.name]]
            if np.any(entries != self.steps[rows] + (spec.before + spec.after)):
                raise damaged(self._folder, "chunks have other steps than their fields")
        rows = rows[np.argsort(self.commits[rows])]
        self.space.restore(rows, self._header[1:].tolist())
        if len(rows):
            self._header[0] = max(self._header[0], self.commits[rows[-1]])

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
        return self._header

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
            raise NoRoomError(f"the disk is full: make room where {self._folder} is")
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
                        _log.error("the disk is full: replay keeps to %d MiB until there is room", used)
                    return False
                grown = True
        if grown and self._disk_full:
            self._disk_full = False
            _log.info("there is room on the disk again: replay grows on")
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
                if error.errno not in FULL:
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
        commit = int(self._header[0]) + 1
        # Before anything of the chunk: a process that dies half-way has used the number up, so that items
        # which it has left in a table never match a later chunk in this row.
        self._header[0] = commit
        counts = self._counts(payloads)
        for name, column in self.columns.items():
            first = self._first_lane[name]
            column.write(starts[first : first + len(column.lanes)], payloads[name])
        record = self._records[row]
        record["starts"], record["counts"] = starts, counts
        self.space.take(starts, counts)
        self._header[1:] = self.space.limits  # before the commit: a restart looks at no row beyond them
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
        record = self._records[row]
        record["steps"], record["version"], record["time_s"] = steps, version, time_s
        record["incarnation"], record["sequence"] = incarnation, sequence
        self.commits[row] = commit

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
        commit = int(self.commits[row])
        self._forget(row)
        self.space.evict(row)
        return commit

    def _drop(self, row: int) -> None:
        self._forget(row)
        self.space.free(row)

    def _forget(self, row: int) -> None:
        self.commits[row] = 0
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
        starts = self._records["starts"][rows]
        arrays = {}
        for name in self.columns if only is None else only:
            column, spec = self.columns[name], self.columns[name].spec
            first = starts[:, self._first_lane[name]] + offsets
            arrays[name] = column.gather(first, lengths + (spec.before + spec.after), plain=plain)
        return arrays

    def close(self) -> None:
        """Close the files."""
        for lane in self._lanes:
            for file in lane.files:
                file.close()

    def _counts(self, payloads: Mapping[str, Payload]) -> list[int]:
        counts = [1]
        for name, column in self.columns.items():
            counts += column.counts(payloads[name])
        return counts

    def _bytes(self, payloads: Mapping[str, Payload]) -> int:
        counts = self._counts(payloads)
        return sum(n * lane.unit_bytes for n, lane in zip(counts, self._lanes, strict=True))
