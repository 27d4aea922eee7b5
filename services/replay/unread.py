"""Batches that have been sent and that no kernel has taken yet: a peer that does not read piles them up."""

from __future__ import annotations

from collections import deque
from typing import Protocol

MAX_UNREAD_BYTES = 1 << 28
"""Limit on the unread batch bytes of one peer."""

MAX_UNREAD_BYTES_OF_ALL = 1 << 31
"""Limit for all peers together, so that one client cannot evade the other with many identities."""

SWEEP_ABOVE_PEERS = 256
"""With more peers than this, those that have read everything are swept out."""


class Tracker(Protocol):
    """What knows whether ZeroMQ still holds a message."""

    @property
    def done(self) -> bool:
        """Whether it does not any more."""


class UnreadBatches:
    """Counts the bytes of the batches that ZeroMQ holds, by peer.

    Attributes:
        bytes: those of all peers, as far as is known.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._batches: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}

    def add(self, peer: bytes, tracker: Tracker, size: int) -> None:
        """Note a batch that was sent."""
        if len(self._batches) >= SWEEP_ABOVE_PEERS:  # some of them may have gone
            self._settle_all()
        if not tracker.done:
            self._batches.setdefault(peer, deque()).append((tracker, size))
            self._bytes[peer] = self._bytes.get(peer, 0) + size
            self.bytes += size

    def blocked(self, peer: bytes) -> str | None:
        """Why this peer should get no batch now; None if it may. A single batch may be of any size."""
        self._settle(peer)
        if self._bytes.get(peer, 0) >= MAX_UNREAD_BYTES:
            return f"{self._bytes[peer] >> 20} MiB of batches are not read yet"
        if self.bytes >= MAX_UNREAD_BYTES_OF_ALL:
            self._settle_all()
            if self.bytes >= MAX_UNREAD_BYTES_OF_ALL:
                return f"{self.bytes >> 20} MiB of batches to all peers are not read yet"
        return None

    def _settle_all(self) -> None:
        for peer in list(self._batches):
            self._settle(peer)

    def _settle(self, peer: bytes) -> None:
        batches = self._batches.get(peer)
        while batches and batches[0][0].done:
            size = batches.popleft()[1]
            self._bytes[peer] -= size
            self.bytes -= size
        if batches is not None and not batches:
            del self._batches[peer], self._bytes[peer]
