"""Messages that could not be served, by kind and by peer."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict

from troupe.common.runtime.logging import Throttle

MAX_PEERS = 64
"""Peers that are remembered: those counted last. A stranger may have a new name for each message."""

MAX_CHARS = 80

GARBAGE_LOG_PERIOD_S = 60.0
"""Seconds between two lines about what cannot be understood, of one kind. Clients keep to it as well."""

_log = logging.getLogger(__name__)


class Rejections:
    """Counts what was turned down, and logs it now and then.

    Attributes:
        by_kind: over all peers.
        by_peer: counts by kind of each peer that is remembered; the one counted last is last.
    """

    def __init__(self, server: str = "server") -> None:
        """Count for `server`, a name for the log."""
        self._server = server
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
        self.by_kind: Counter[str] = Counter()
        self.by_peer: OrderedDict[str, Counter[str]] = OrderedDict()

    def count(self, peer: bytes, kind: str, detail: str = "no detail") -> None:
        """Count a message of the peer with this ZeroMQ identity."""
        self.by_kind[kind] += 1
        name = peer_name(peer)
        self.by_peer.setdefault(name, Counter())[kind] += 1
        self.by_peer.move_to_end(name)
        if len(self.by_peer) > MAX_PEERS:
            self.by_peer.popitem(last=False)
        if self._throttle(kind):
            _log.warning(
                "%s could not serve %s: %s, %s (%d of this kind so far, %d from this peer)",
                self._server,
                name,
                kind,
                detail,
                self.by_kind[kind],
                self.of(peer),
            )

    def of(self, peer: bytes) -> int:
        """Messages of this peer, as far as it is remembered."""
        return self.by_peer.get(peer_name(peer), Counter()).total()

    def status(self) -> dict[str, dict]:
        """The counts, as STATUS_OK has them."""
        by_peer = {peer: dict(kinds) for peer, kinds in self.by_peer.items()}
        return {"rejected": dict(self.by_kind), "rejected_by_peer": by_peer}


def peer_name(peer: bytes) -> str:
    """An identity for people: as text where it is printable, which those that ZeroMQ makes up are not."""
    text = peer.decode("ascii", "replace")
    return (text if text.isascii() and text.isprintable() else peer.hex())[:MAX_CHARS]
