"""A slow look at everything that a shard holds, so that damage is found where nobody samples."""

from __future__ import annotations

from troupe.common import system
from troupe.services.replay.storage.replay import Replay

CHUNK_PERIOD_S = 0.02
SHARE = 0.01
"""One chunk at a time, no more often than this, and no longer than this share of the time."""


class Scrubber:
    """Looks at one chunk after the other, over and over."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._row = 0
        self._next_s = 0.0

    def advance(self) -> None:
        """Look at the next chunk, if it is time to. One that is damaged leaves the tables."""
        now_s = system.monotonic()
        store = self._replay.store
        if now_s < self._next_s or store is None:
            return
        row = store.next_live(self._row)
        if row >= store.space.limits[0]:
            self._row = 0
        elif not store.commits[row]:
            self._row = row
        else:
            self._replay.check(row)
            self._row = row + 1
            after_s = system.monotonic()
            self._next_s = after_s + max(CHUNK_PERIOD_S, (after_s - now_s) / SHARE)
