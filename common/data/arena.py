"""Another process's view of a store: its files, mapped read-only.

A reader on the same host is told which chunks a batch is cut from, and copies the windows out of the files
itself. Meanwhile the owner may overwrite any of them, so a chunk is known by its *commit*, a number that is
never used twice: the owner clears it before it reuses anything of the chunk, and the reader looks at it after
it has copied. Where it is still the same, what was copied cannot be torn.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.columns import Column, damaged_chunks, make_column
from troupe.common.data.format import RECORDS_FILE, fence, load_signature, record_dtype
from troupe.common.data.packing import unpack_frame
from troupe.common.data.pager import ReadingPager
from troupe.common.data.schema import FieldSpec

Allocate = Callable[[tuple[int, ...], str], NDArray]
"""Makes an array to write to, from its shape and the name of its dtype."""

MAX_BYTES = 1 << 31
"""Larger batches are taken for mistakes."""


class DamagedChunksError(Exception):
    """Chunks that are there and are not what was written: `rows` says in which records."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(f"{len(rows)} damaged chunks")
        self.rows = rows


class Arena:
    """The files of one store, for reading while another process writes them.

    Attributes:
        specs: the fields.
    """

    def __init__(self, folder: Path) -> None:
        """Map the files in `folder`; raises OSError or ConfigError if there are none to be read."""
        signature = load_signature(folder)
        if signature is None:
            raise FileNotFoundError(2, "nothing is stored yet", str(folder))
        self.specs, layout = signature
        pager = ReadingPager(folder)
        self._columns: list[Column] = [
            make_column(spec, number, pager, layout["budget_bytes"], layout["entries"][spec.name])
            for number, spec in enumerate(self.specs)
        ]
        # Lane 0 is the records themselves, see `ChunkStore`.
        dtype = record_dtype(1 + sum(len(column.lanes) for column in self._columns))
        count = (folder / RECORDS_FILE).stat().st_size // dtype.itemsize
        records = self._records = pager.open(RECORDS_FILE, dtype, (count,)).array
        self._commits: NDArray[np.uint64] = records["commit"]
        self._starts: NDArray[np.int64] = records["starts"]
        self._checked = np.zeros(count, np.uint64)  # commits of chunks that were whole when they were read

    def chunks(self) -> tuple[NDArray[np.int64], NDArray]:
        """The rows of the chunks that are there now, and copies of their records, oldest first."""
        rows = np.flatnonzero(self._commits)
        records = self._records[rows]
        order = np.argsort(records["commit"])
        there = order[records["commit"][order] != 0]  # some may have left since
        return rows[there], records[there]

    def gather(
        self,
        rows: NDArray[np.int64],
        commits: NDArray[np.uint64],
        offsets: NDArray[np.int32],
        lengths: NDArray[np.int32],
        allocate: Allocate = np.empty,
    ) -> dict[str, NDArray] | None:
        """Windows `[B, window, *shape]`, by field, of items of the chunks `commits [B]` in `rows [B]`.

        None if one of the chunks has left meanwhile. Raises ValueError for places that never were, and
        DamagedChunksError for chunks that do not match their checksums.
        """
        # numpy would take a negative row from the end, and read some other chunk's record without an error.
        if int(rows.min()) < 0 or int(rows.max()) >= len(self._commits):
            raise ValueError("a row outside of the records")
        # Before the arrays are made: what the server says decides how much memory this takes.
        if int(lengths.min()) < 1 or self._bytes(len(rows), int(lengths.max())) > MAX_BYTES:
            raise ValueError("a batch of no size, or of an impossible one")
        # Read once, before the copy. If the record changes after this, so has the commit, and the batch is
        # given up.
        starts = self._starts[rows]
        steps = lengths.astype(np.int64)
        fresh = self._checked[rows] != commits
        fields: dict[str, NDArray] = {}
        lane = 1
        try:
            damaged = self._damaged(rows[fresh])
            if not damaged:
                for spec, column in zip(self.specs, self._columns, strict=True):
                    begins = starts[:, lane] + offsets
                    fields[spec.name] = self._read(spec, column, begins, steps, allocate)
                    lane += len(column.lanes)
        except (IndexError, ValueError):
            # What is being overwritten makes no sense, as it may. What is not, has to.
            if self._all_there(rows, commits):
                raise
            return None
        if not self._all_there(rows, commits):
            return None
        if damaged:
            raise DamagedChunksError(damaged)
        self._checked[rows[fresh]] = commits[fresh]
        return fields

    def _damaged(self, rows: NDArray[np.int64]) -> list[int]:
        """Those of `rows`, each once, whose chunks do not match their checksums.

        Chunks are looked at as a whole, and once: a look at each window costs as much as the copy.
        """
        if not len(rows):
            return []
        rows = np.unique(rows)
        found: list[int] = rows[damaged_chunks(self._columns, self._records[rows])].tolist()
        return found

    def _bytes(self, count: int, steps: int) -> int:
        """Bytes of the windows of a batch."""
        return sum(count * spec.entries(steps) * spec.entry_bytes for spec in self.specs)

    def _all_there(self, rows: NDArray[np.int64], commits: NDArray[np.uint64]) -> bool:
        fence()  # everything has been read by now
        return bool(np.array_equal(self._commits[rows], commits))

    @staticmethod
    def _read(
        spec: FieldSpec, column: Column, starts: NDArray, steps: NDArray[np.int64], allocate: Allocate
    ) -> NDArray:
        entries = steps + (spec.before + spec.after)
        shape = (len(steps), int(entries.max()), *spec.shape)
        out = allocate(shape, spec.dtype)
        found = column.gather(starts, entries, plain=True, out=out)
        if found is out:
            return out
        return unpack_frame(found.data, shape, spec.dtype, out, entry_bytes=spec.entry_bytes)
