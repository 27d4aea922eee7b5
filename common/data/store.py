"""Chunks in memory-mapped files: stored once, freed oldest first, all there again after ``kill -9``.

Every bit of state is in the page cache, which belongs to the kernel and outlives the process. What makes a
chunk exist is one aligned 8-byte word, the ``commit`` of its record: it is written after everything else of
the chunk (the entries and the items in every table), and cleared before anything of it is reused.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.columns import Column, MappedFile, Payload, make_column
from common.data.fence import fence
from common.data.fields import FieldSpec
from common.data.rings import Ring
from common.errors import ConfigError

SIGNATURE_FILE = "signature.json"
FORMAT = 1

RESERVE_BYTES = 1 << 16
"""Room on the disk is taken in steps of a sixteenth of a ring, or so much."""

_log = logging.getLogger(__name__)


def record_dtype(rings: int) -> np.dtype:
    """What is noted about one chunk: where it starts in each ring, and how much of it it takes."""
    numbers = [("commit", "u8"), ("incarnation", "u8"), ("sequence", "u8"), ("version", "i8")]
    rest = [("time_s", "f8"), ("steps", "i8"), ("starts", "i8", (rings,)), ("counts", "i8", (rings,))]
    return np.dtype([*numbers, *rest])


class StoreFullError(ValueError):
    """A chunk that is larger than the whole store may be."""


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
        """Map the files in ``folder``; ``most_entries``, by field, may not change while they exist."""
        self.specs = tuple(specs)
        self.budget_bytes = budget_bytes
        self.columns: dict[str, Column] = {
            spec.name: make_column(spec, folder, budget_bytes, most_entries[spec.name]) for spec in self.specs
        }
        self._rings: list[Ring] = [Ring(max_chunks)]
        for column in self.columns.values():
            self._rings += column.rings
        self.record_dtype = record_dtype(len(self._rings))
        self._unit_bytes = [self.record_dtype.itemsize]
        for column in self.columns.values():
            self._unit_bytes += column.unit_bytes
        records = MappedFile(folder / "chunks.records", self.record_dtype, (max_chunks,))
        self._records = records.array
        self.commits: NDArray[np.uint64] = self._records["commit"]
        self.versions: NDArray[np.int64] = self._records["version"]
        self.times_s: NDArray[np.float64] = self._records["time_s"]
        # Position 0: the last commit number given out. The rest: the limits of the rings.
        header = MappedFile(folder / "chunks.header", "uint64", (1 + len(self._rings),), sparse=False)
        self._header: NDArray[np.uint64] = header.array
        self._files = [[records]]
        for column in self.columns.values():
            self._files += column.files
        self._first_ring: dict[str, int] = {}
        position = 1
        for name, column in self.columns.items():
            self._first_ring[name] = position
            position += len(column.rings)
        self._rows: deque[int] = (
            deque()
        )  # oldest first, chunks without items among them until they are oldest
        self.references = np.zeros(max_chunks, np.int32)
        """Items of each row, over all tables."""
        self._restore()
        self._reserved = [ring.limit for ring in self._rings]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def used_bytes(self) -> int:
        """Bytes that the rings have grown to."""
        return sum(ring.limit * size for ring, size in zip(self._rings, self._unit_bytes, strict=True))

    def _restore(self) -> None:
        """Find the chunks that a former process has left."""
        live = np.flatnonzero(self.commits)
        live = live[np.argsort(self.commits[live])]
        self._rows.extend(live.tolist())
        starts, counts = self._records["starts"][live], self._records["counts"][live]
        for i, ring in enumerate(self._rings):
            ring.restore(starts[:, i], starts[:, i] + counts[:, i], int(self._header[1 + i]))
        if len(live):
            self._header[0] = max(self._header[0], self.commits[live[-1]])

    def live(self) -> NDArray:
        """The records of all chunks, oldest first."""
        return self._records[np.fromiter(self._rows, np.int64, len(self._rows))]

    def oldest(self) -> int | None:
        """The row of the oldest chunk; None if there is none."""
        return self._rows[0] if self._rows else None

    def prepare(self, payloads: Mapping[str, Payload]) -> list[int] | None:
        """Where a chunk of ``payloads`` would go, in every ring; None while the oldest chunk is in its way.

        Raises StoreFullError if it does not even fit in an empty store.
        """
        starts = []
        spare_bytes = self.budget_bytes - self.used_bytes
        counts = self._counts(payloads)
        for ring, count, unit in zip(self._rings, counts, self._unit_bytes, strict=True):
            start = ring.place(count, max(spare_bytes, 0) // unit)
            if start is None:
                if self._rows:
                    return None
                if self.used_bytes:
                    # Nothing is stored: let the rings find their proportions again.
                    for each in self._rings:
                        each.reset()
                    return self.prepare(payloads)
                raise StoreFullError(
                    f"a chunk of {self._bytes(payloads)} bytes, the store may use {self.budget_bytes}"
                )
            spare_bytes -= max(start + count - ring.limit, 0) * unit
            starts.append(start)
        if self._reserve([start + count for start, count in zip(starts, counts, strict=True)]):
            return starts
        if not self._rows:
            raise StoreFullError("the disk is full")
        return None

    def _reserve(self, ends: list[int]) -> bool:
        """Take room on the disk up to ``ends`` of the rings; False, and no growth any more, if it is full."""
        for i, end in enumerate(ends):
            reserved = self._reserved[i]
            if end <= reserved:
                continue
            step = max(reserved // 16, RESERVE_BYTES // self._unit_bytes[i])
            target = min(max(end, reserved + step), self._rings[i].most)
            try:
                for file in self._files[i]:
                    file.reserve(reserved, target)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self.budget_bytes = self.used_bytes
                _log.error("the disk is full: replay keeps to %d MiB from now on", self.used_bytes >> 20)
                return False
            self._reserved[i] = target
        return True

    def write(self, starts: list[int], payloads: Mapping[str, Payload], items: int) -> tuple[int, int]:
        """Write the entries at the positions that ``prepare`` returned, for ``items`` items over all tables.

        Returns the row and its future commit.
        """
        row = starts[0]
        commit = int(self._header[0]) + 1
        self._header[0] = commit
        counts = self._counts(payloads)
        for name, column in self.columns.items():
            first = self._first_ring[name]
            column.write(starts[first : first + len(column.rings)], payloads[name])
        record = self._records[row]
        record["starts"], record["counts"] = starts, counts
        for i, ring in enumerate(self._rings):
            ring.take(starts[i], counts[i])
            self._header[1 + i] = ring.limit
        self._rows.append(row)
        self.references[row] = items
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

    def release(self, rows: NDArray[np.int64]) -> None:
        """Count one item less for each of ``rows`` (repeats allowed), and free what is empty then."""
        np.subtract.at(self.references, rows, 1)
        self.trim()

    def trim(self) -> None:
        """Free the oldest chunks as long as they have no items."""
        while self._rows and self.references[self._rows[0]] <= 0:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Free the oldest chunk. Its items must be out of their tables, or go as soon as this returns."""
        row = self._rows.popleft()
        self.commits[row] = 0
        fence()  # whoever reads the files at the same time has to see this before anything is overwritten
        self.references[row] = 0
        starts = self._records["starts"][self._rows[0]].tolist() if self._rows else [0] * len(self._rings)
        for ring, start in zip(self._rings, starts, strict=True):
            ring.free(start)

    def gather(
        self,
        rows: NDArray[np.int64],
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        plain: bool = False,
    ) -> dict[str, NDArray]:
        """The entries of items ``[B]``, by field: see ``Column.gather``."""
        starts = self._records["starts"][rows]
        arrays = {}
        for name, column in self.columns.items():
            spec = column.spec
            first = starts[:, self._first_ring[name]] + offsets
            arrays[name] = column.gather(first, lengths + (spec.before + spec.after), plain=plain)
        return arrays

    def close(self) -> None:
        """Close the files."""
        for files in self._files:
            for file in files:
                file.close()

    def _counts(self, payloads: Mapping[str, Payload]) -> list[int]:
        counts = [1]
        for name, column in self.columns.items():
            counts += column.counts(payloads[name])
        return counts

    def _bytes(self, payloads: Mapping[str, Payload]) -> int:
        return sum(n * unit for n, unit in zip(self._counts(payloads), self._unit_bytes, strict=True))


def save_signature(folder: Path, specs: Sequence[FieldSpec], layout: Mapping[str, Any]) -> None:
    """Write what the files in ``folder`` mean, atomically."""
    text = json.dumps({"format": FORMAT, "fields": [asdict(spec) for spec in specs], "layout": dict(layout)})
    temporary = folder / (SIGNATURE_FILE + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, folder / SIGNATURE_FILE)


def load_signature(folder: Path) -> tuple[tuple[FieldSpec, ...], dict[str, Any]] | None:
    """What the files in ``folder`` mean; None if there are none."""
    path = folder / SIGNATURE_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ConfigError(f"{path} has format {content['format']}, this version reads {FORMAT}")
        specs = tuple(FieldSpec(**{**entry, "shape": tuple(entry["shape"])}) for entry in content["fields"])
        return specs, content["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it or remove the folder") from None
