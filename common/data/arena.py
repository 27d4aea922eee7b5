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

from troupe.common.data.columns import Column, MappedFile, make_column
from troupe.common.data.format import RECORDS_FILE, fence, load_signature, record_dtype
from troupe.common.data.packing import unpack_frame
from troupe.common.data.schema import FieldSpec

Allocate = Callable[[tuple[int, ...], str], NDArray]
"""Makes an array to write to, from its shape and the name of its dtype."""

MAX_BYTES = 1 << 31
"""Larger batches are taken for mistakes."""


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
        self._columns: list[Column] = [
            make_column(spec, folder, layout["budget_bytes"], layout["entries"][spec.name], read_only=True)
            for spec in self.specs
        ]
        # Lane 0 is the records themselves, see `ChunkStore`.
        dtype = record_dtype(1 + sum(len(column.lanes) for column in self._columns))
        path = folder / RECORDS_FILE
        records = MappedFile(path, dtype, (path.stat().st_size // dtype.itemsize,), read_only=True).array
        self._commits: NDArray[np.uint64] = records["commit"]
        self._starts: NDArray[np.int64] = records["starts"]

    def gather(
        self,
        rows: NDArray[np.int64],
        commits: NDArray[np.uint64],
        offsets: NDArray[np.int32],
        lengths: NDArray[np.int32],
        allocate: Allocate = np.empty,
    ) -> dict[str, NDArray] | None:
        """Windows `[B, window, *shape]`, by field, of items of the chunks `commits [B]` in `rows [B]`.

        None if one of the chunks has left meanwhile. Raises ValueError for places that never were.
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
        fields: dict[str, NDArray] = {}
        lane = 1
        try:
            for spec, column in zip(self.specs, self._columns, strict=True):
                fields[spec.name] = self._read(spec, column, starts[:, lane] + offsets, steps, allocate)
                lane += len(column.lanes)
        except (IndexError, ValueError):
            # What is being overwritten makes no sense, as it may. What is not, has to.
            if self._all_there(rows, commits):
                raise
            return None
        return fields if self._all_there(rows, commits) else None

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
        return out if found is out else unpack_frame(found.data, shape, spec.dtype, out)
