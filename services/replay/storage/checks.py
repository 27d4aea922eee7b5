"""Looking at chunks before anything of them is used, and having those leave that are not what was written."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.sample import Sample
from troupe.services.replay.storage.changes import CHANGE
from troupe.services.replay.storage.counters import Counters
from troupe.services.replay.storage.store import ChunkStore
from troupe.services.replay.storage.table import Table

_log = logging.getLogger(__name__)


class Checks:
    """Takes damaged chunks out of `tables`."""

    def __init__(
        self, folder: Path, tables: Mapping[str, Table], counters: Counters, *, every_read: bool
    ) -> None:
        """Count in `counters`; `every_read` has every window looked at, not only every chunk once."""
        self._folder = folder
        self._tables = tables
        self._counters = counters
        self._every_read = every_read

    def drop_damaged(self, store: ChunkStore, sample: Sample) -> bool:
        """Have the damaged chunks of `sample` leave; returns whether there were any.

        Each chunk is looked at once in a process, for what was whole in memory seldom changes; later changes
        are for the scrubber.
        """
        rows = store.unchecked(sample.rows, sample.commits)
        if len(rows):
            wrong = store.damaged_chunks(rows)
            store.checked(rows[~wrong])
            self._drop_all(store, rows[wrong])
            if wrong.any():
                return True
        if not self._every_read:
            return False
        offsets, lengths = sample.offsets.astype(np.int64), sample.lengths.astype(np.int64)
        wrong = store.wrong(sample.rows, sample.commits, offsets, lengths)
        self._drop_all(store, np.unique(sample.rows[wrong]))
        return bool(wrong.any())

    def check(self, store: ChunkStore, row: int) -> bool:
        """Look at the whole chunk in `row`, if there is one; returns whether it was damaged, and has left."""
        if not 0 <= row < len(store.commits) or not store.commit_of(row):
            return False
        rows = np.array([row])
        damaged = bool(store.damaged_chunks(rows)[0])
        if damaged:
            self._drop_all(store, rows)
        else:
            store.checked(rows)
        return damaged

    def _drop_all(self, store: ChunkStore, rows: NDArray[np.int64]) -> None:
        for row in rows.tolist():
            # The commit that is known from before: that of the record may be what is damaged.
            commit = store.commit_of(row)
            with CHANGE:
                store.drop(row)
                items = {name: table.drop_chunk(row, commit) for name, table in self._tables.items()}
            self._counters.damaged_chunks += 1
            for name, count in items.items():
                self._tables[name].damage.items += count
            _log.error(
                "chunk %d (record %d of %s) is damaged: its items were removed: %s",
                *(commit, row, self._folder, ", ".join(f"{n} of {name!r}" for name, n in items.items() if n)),
            )
