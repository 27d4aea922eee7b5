"""Who is in the run, and which exploration slots they hold: the learner's book-keeping, without sockets."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from common.wire import messages

_REMEMBERED_NAMES = 4096
_REMEMBERED_INCARNATIONS = 64


class RefusedError(Exception):
    """A HELLO that is not welcome. `kind` is a kind of ERROR in `messages`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


@dataclass(slots=True)
class Peer:
    """One service in the run.

    Attributes:
        identity: routing identity of its newest socket.
        role: one of `messages.ROLES`.
        name: unique in the run.
        incarnation: random number of its process.
        slots: exploration slots on lease, ascending.
        endpoint: where a replay shard is reached, empty for others.
        host: for logs.
        pid: for logs.
        seen_s: monotonic time of its last message.
        version: parameter version that it uses, -1 for none.
        error: last error that it reported.
        rejected: how many of its messages could not be served.
    """

    identity: bytes
    role: str
    name: str
    incarnation: int
    slots: list[int] = field(default_factory=list)
    endpoint: str = ""
    host: str = ""
    pid: int = 0
    seen_s: float = 0.0
    version: int = -1
    error: str = ""
    rejected: int = 0


@dataclass(slots=True)
class _Past:
    """What is remembered of a name, so that it gets its slots back and an old process does not return."""

    incarnations: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class Roster:
    """Peers by name, and the leases of `total_slots` exploration slots.

    A lease ends `liveness_s` after its holder's last message. A process that joins under the name of another
    replaces it (that is what a restart looks like); the replaced one cannot come back.

    The lowest free slots are leased. With `spread` they are taken evenly from all that are free: where there
    are more slots than actors will ever hold, those that are there explore as the whole run would.
    """

    def __init__(
        self, total_slots: int, heartbeat_s: float, liveness_s: float, *, spread: bool = False
    ) -> None:
        self.total_slots = total_slots
        self._spread = spread
        self._quiet_s = 2.5 * heartbeat_s
        self._liveness_s = liveness_s
        self._by_name: dict[str, Peer] = {}
        self._by_identity: dict[bytes, Peer] = {}
        self._past: OrderedDict[str, _Past] = OrderedDict()

    def join(self, peer: Peer, wanted: int, held: list[int], now_s: float) -> Peer | None:
        """Admit `peer` with up to `wanted` slots, preferring those it `held`; fills in `peer.slots`.

        Returns the peer that it replaces, if any. Raises `RefusedError`.
        """
        past = self._remember(peer.name)
        if peer.incarnation in past.incarnations[:-1]:
            raise RefusedError(
                messages.REFUSED_SUPERSEDED,
                f"another process has joined as {peer.name} since; names must be unique in a run",
            )
        peer.slots = self._grant(peer.name, wanted, [*held, *past.slots], now_s)
        previous = self._by_name.get(peer.name)
        if previous is not None:
            self._remove(previous)
        if not past.incarnations or past.incarnations[-1] != peer.incarnation:
            past.incarnations = [*past.incarnations, peer.incarnation][-_REMEMBERED_INCARNATIONS:]
        past.slots = peer.slots
        peer.seen_s = now_s
        self._by_name[peer.name] = peer
        self._by_identity[peer.identity] = peer
        return previous

    def seen(self, identity: bytes, now_s: float) -> Peer | None:
        """The peer behind a message that has just come, its lease renewed; None for a stranger."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            peer.seen_s = now_s
        return peer

    def leave(self, identity: bytes) -> Peer | None:
        """Forget a peer at its own wish; its slots are free at once."""
        peer = self._by_identity.get(identity)
        if peer is not None:
            self._remove(peer)
        return peer

    def expire(self, now_s: float) -> list[Peer]:
        """Forget, and return, the peers that have been silent for too long."""
        gone = [peer for peer in self._by_name.values() if now_s - peer.seen_s > self._liveness_s]
        for peer in gone:
            self._remove(peer)
        return gone

    def names(self) -> list[str]:
        """The names of all peers, in natural order."""
        return sorted(self._by_name, key=_natural)

    def leases(self) -> dict[int, set[int]]:
        """The slots of every peer that has any, by its incarnation."""
        return {peer.incarnation: set(peer.slots) for peer in self._by_name.values() if peer.slots}

    def shards(self) -> list[str]:
        """Endpoints of the replay shards, in the natural order of their names."""
        return [self._by_name[name].endpoint for name in self.names() if self._by_name[name].endpoint]

    def snapshot(self, now_s: float) -> list[dict[str, Any]]:
        """All peers as plain values, for logs and status files."""
        peers = (self._by_name[name] for name in self.names())
        return [
            {
                "role": peer.role,
                "name": peer.name,
                "slots": list(peer.slots),
                "seen_s_ago": round(now_s - peer.seen_s, 3),
                "version": peer.version,
                "error": peer.error,
                "endpoint": peer.endpoint,
                "host": peer.host,
                "pid": peer.pid,
                "incarnation": peer.incarnation,
                "rejected": peer.rejected,
            }
            for peer in peers
        ]

    def _grant(self, name: str, wanted: int, preferred: list[int], now_s: float) -> list[int]:
        others = [peer for peer in self._by_name.values() if peer.name != name]
        free = set(range(self.total_slots)).difference(*(peer.slots for peer in others))
        wanted = min(wanted, self.total_slots)
        kept = [slot for slot in dict.fromkeys(preferred) if slot in free][:wanted]
        rest = sorted(free.difference(kept))
        missing = min(wanted - len(kept), len(rest))
        slots = kept + [rest[i * len(rest) // missing if self._spread else i] for i in range(missing)]
        # Fewer slots than wanted are better than none, but not while a silent holder may be about to lose its
        # own: what is granted now is kept for good.
        quiet = any(peer.slots and now_s - peer.seen_s > self._quiet_s for peer in others)
        if wanted and (not slots or (len(slots) < wanted and quiet)):
            raise RefusedError(
                messages.NO_SLOTS,
                f"only {len(slots)} of the {wanted} slots that {name} wants are free (of {self.total_slots})",
            )
        return sorted(slots)

    def _remember(self, name: str) -> _Past:
        past = self._past.setdefault(name, _Past())
        self._past.move_to_end(name)
        while len(self._past) > _REMEMBERED_NAMES:
            self._past.popitem(last=False)
        return past

    def _remove(self, peer: Peer) -> None:
        if self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]
        if self._by_identity.get(peer.identity) is peer:
            del self._by_identity[peer.identity]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts replay-2 before replay-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def ranges(slots: list[int]) -> str:
    """Ascending numbers for people: `[0, 1, 2, 5]` as `0-2,5`."""
    parts: list[list[int]] = []
    for slot in slots:
        if parts and slot == parts[-1][1] + 1:
            parts[-1][1] = slot
        else:
            parts.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in parts) or "none"
