"""From BATCH messages to arrays: unpacked or copied out of a shard's files, into arrays that are reused."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.arena import Allocate, Arena
from troupe.common.data.schema import FieldSpec
from troupe.common.wire.codec import Message
from troupe.common.wire.messages import Credit
from troupe.common.wire.replay.codec import SampleBatch, decode_batch
from troupe.common.wire.replay.files import PeerFiles

MAX_SPARE = 32
"""Arrays of one shape that are kept for later."""

THREADS = 2
"""Batches that are read at a time: unpacking and copying leave Python's lock to others."""

AHEAD = THREADS + 1
"""Batches that are read before they are asked for, that all threads have work meanwhile."""

LARGE_BYTES = 1 << 20
"""Smaller batches are read in less time than it takes to hand them to a thread and back."""


Reading: TypeAlias = "system.Future[SampleBatch | None]"
"""A batch that a thread reads."""


@lru_cache(maxsize=1)
def _threads() -> system.ThreadPoolExecutor:
    """Those of all clients in this process."""
    return system.ThreadPoolExecutor(THREADS, thread_name_prefix="unpack")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a child has none of its parent's threads


class ArrayPool:
    """Arrays to write to, given back when their contents have been used.

    To touch fresh memory for the first time costs as much as to copy a batch to it. Any thread may take and
    give.
    """

    def __init__(self, allocate: Allocate = np.empty) -> None:
        """`allocate` makes a new array: of page-locked memory, for instance."""
        self._allocate = allocate
        self._spare: dict[tuple[tuple[int, ...], str], list[NDArray]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: str) -> NDArray:
        """An array of `shape`, with anything in it."""
        spare = self._spare[shape, np.dtype(dtype).name]
        try:
            return spare.pop()
        except IndexError:
            return self._allocate(shape, dtype)

    def give(self, array: NDArray) -> None:
        """Take back `array`, which nobody uses any more; read-only ones are somebody else's."""
        spare = self._spare[array.shape, array.dtype.name]
        if array.flags.writeable and array.flags.c_contiguous and len(spare) < MAX_SPARE:
            spare.append(array)


class BatchReader:
    """Reads the batches of one shard.

    Attributes:
        files: the shard's files, where they can be had.
    """

    def __init__(
        self,
        pool: ArrayPool | None = None,
        *,
        map_files: bool = True,
        expected: Sequence[FieldSpec] | None = None,
    ) -> None:
        """Prepare to read.

        Args:
            pool: where batches get their arrays from.
            map_files: use the files of a shard on the same host.
            expected: the only fields that a batch may have.
        """
        self.files = PeerFiles()
        self._expected = expected
        self._pool = pool or ArrayPool()
        self._map_files = map_files
        self._last_bytes = 0

    def connected(self, credit: Credit) -> None:
        """A shard, or another process of it, has introduced itself by `credit`."""
        self.files.offered(credit.files if self._map_files and credit.files is not UNSET else {})
        if credit.fields is not UNSET:  # so there are files
            self.files.map()

    def refused(self, token: str) -> bool:
        """Windows came in spite of `token`, so these are not the shard's files. False if that is known."""
        if token != self.files.token:
            return False
        self.files.offered({})
        return True

    def start(self, message: Message, shares: Mapping[str, int]) -> Reading | None:
        """Have a thread read the batch in `message`; None where that gains nothing, to judge by the last."""
        if self._last_bytes < LARGE_BYTES:
            return None
        return _threads().submit(self._read, self.files.arena, message, shares)

    def read(
        self, message: Message, shares: Mapping[str, int], started: Reading | None = None
    ) -> SampleBatch | None:
        """The batch in `message`; None where it says places that are no longer there.

        Args:
            message: a BATCH.
            shares: the rows by table that were asked for.
            started: what `start` returned.

        Raises WireError for what is no batch, or not one of these `shares`, and DamagedChunksError for
        places whose chunks do not match their checksums.
        """
        # Waits without a deadline, for what computes and waits for nothing.
        batch = self._read(self.files.arena, message, shares) if started is None else started.result()
        if self.files.arena is None:
            self.files.map()  # now that there is a batch, there are files
        if batch is not None:
            self._last_bytes = sum(array.nbytes for array in batch.fields.values())
        return batch

    def _read(self, arena: Arena | None, message: Message, shares: Mapping[str, int]) -> SampleBatch | None:
        return decode_batch(message, arena, self._pool.take, shares=shares, expected=self._expected)

    def recycle(self, batch: SampleBatch) -> None:
        """Use the arrays of `batch` for a later one. It has no fields any more."""
        fields, batch.fields = batch.fields, {}
        for array in fields.values():
            self._pool.give(array)
