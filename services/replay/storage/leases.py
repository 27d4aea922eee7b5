"""Chunks that somebody may be reading out of the files, kept for a moment after their items have left."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from troupe.services.replay.storage.store import ChunkStore

LEASE_S = 2.0
"""A reader that takes longer may find that a chunk has left, which it notices."""

MAX_LEASES = 4096
"""Batches that are kept for readers at one time."""


class Leases:
    """Counts one reference more for every item of a batch whose places were told, for `LEASE_S`.

    This makes it rare that a chunk is overwritten while it is read; that it is noticed when it happens does
    not depend on it. A lease is never in the way: a store without room drops the chunk all the same.
    """

    def __init__(self) -> None:
        self._held: deque[tuple[float, NDArray[np.int64], NDArray[np.uint64]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self, store: ChunkStore, rows: NDArray[np.int64], commits: NDArray[np.uint64], now_s: float
    ) -> None:
        """Keep the chunks `commits [B]` in `rows [B]`, which are there now."""
        store.hold(rows)
        self._held.append((now_s + LEASE_S, rows, commits))
        if len(self._held) > MAX_LEASES:
            self._release_first(store)

    def expire(self, store: ChunkStore, now_s: float) -> None:
        """End the leases that have lasted long enough."""
        while self._held and self._held[0][0] <= now_s:
            self._release_first(store)

    def _release_first(self, store: ChunkStore) -> None:
        _, rows, commits = self._held.popleft()
        # A row may hold another chunk by now, which nobody leased.
        store.release(rows[store.commits[rows] == commits])
