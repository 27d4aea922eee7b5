"""Which of the chunks that stand in the records are whole, after whatever has happened to the files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.format import record_sums
from troupe.common.data.schema import FieldSpec

ROUNDS = 64
"""More than any damage takes, of looking for chunks in the place of others."""

Rows = NDArray[np.int64]


def rows_written(path: Path, row_bytes: int, most: int) -> int:
    """Rows at the start of a file, behind which nothing was ever written."""
    end = position = 0
    with path.open("rb") as file:
        while True:
            try:
                position = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), position, os.SEEK_HOLE)
            except OSError:  # no data behind this, or a file system that does not know
                return min(-(-end // row_bytes), most)


def whole_chunks(
    records: NDArray,
    rows: Rows,
    specs: Sequence[FieldSpec],
    first_lane: Mapping[str, int],
    most: Sequence[int],
) -> tuple[Rows, Rows]:
    """Divide `rows`, ascending, into those of whole chunks and those of damaged ones.

    Args:
        records: of all chunks, by row.
        rows: where there should be chunks.
        specs: their fields.
        first_lane: the first lane of each field.
        most: units of each lane.
    """
    found = records[rows]
    starts, counts, steps = found["starts"], found["counts"], found["steps"]
    whole = (record_sums(found) == found["sum"]) & (starts[:, 0] == rows)
    # What follows holds for every record that was written, and is there for folders that somebody has made.
    with np.errstate(over="ignore"):
        whole &= np.all((starts >= 0) & (counts >= 0) & (counts <= most) & (starts <= most - counts), axis=1)
        for spec in specs:  # by these the items are looked at
            whole &= counts[:, first_lane[spec.name]] == steps + (spec.before + spec.after)
    left = np.flatnonzero(whole)
    for _ in range(ROUNDS):
        # Rows ascend along the first lane, and so does every other lane: only neighbours can overlap.
        # Two in one place: the page that says that the older one has left was lost with the power.
        ends = starts[left] + counts[left]
        over = np.flatnonzero(np.any(ends[:-1] > starts[left][1:], axis=1))
        if not len(over):
            break
        commits = found["commit"][left]
        left = np.delete(left, np.where(commits[over] < commits[over + 1], over, over + 1))
    else:
        left = left[:0]
    damaged = np.ones(len(rows), bool)
    damaged[left] = False
    return rows[left], rows[damaged]
