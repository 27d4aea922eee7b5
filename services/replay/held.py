"""Inserts that wait until there is room in a queue."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from troupe.common.data.inserts import GapError, Insert

MAX_HELD = 4096
MAX_HELD_BYTES = 1 << 28


@dataclass
class _Line:
    """The held inserts of one producer, and whom to answer."""

    peer: bytes
    inserts: deque[Insert] = field(default_factory=deque)


class HeldInserts:
    """Keeps what arrives before there is room, each producer's in its order.

    What would be too much to keep is forgotten: it is not acknowledged, so its producer sends it again.

    Attributes:
        bytes: data of all that is kept.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._count = 0
        self._lines: OrderedDict[int, _Line] = OrderedDict()  # by incarnation; served in turn

    def __len__(self) -> int:
        return self._count

    def first(self, incarnation: int) -> int | None:
        """The smallest number that is held of this producer."""
        line = self._lines.get(incarnation)
        return line.inserts[0].sequence if line else None

    def reason(self, incarnation: int) -> str:
        """Why the first insert of this producer waits; empty where none does."""
        line = self._lines.get(incarnation)
        return line.inserts[0].waits_for if line else ""

    def add(self, peer: bytes, insert: Insert) -> None:
        """Keep `insert` behind the others of its producer. Raises GapError where one is missing."""
        line = self._lines.get(insert.incarnation)
        if line is not None:
            # A producer may have a new socket by now: the answer goes to where it was heard last.
            line.peer = peer
            last = line.inserts[-1].sequence
            # Sent again by a producer that has heard nothing: it is here already.
            if insert.sequence <= last:
                return
            # A gap, unless the producer says itself that it does not want to know of those between.
            if insert.sequence > max(last + 1, insert.oldest):
                raise GapError(last + 1)
        size = _bytes(insert)
        # The first is always kept, however large: otherwise it could never be stored.
        if self._count and (self._count >= MAX_HELD or self.bytes + size > MAX_HELD_BYTES):
            return
        if line is None:
            line = self._lines[insert.incarnation] = _Line(peer)
        line.inserts.append(insert)
        self._count += 1
        self.bytes += size

    def serve(self, store: Callable[[bytes, Insert], bool]) -> int:
        """Call `store` for the first insert of every producer; returns how many it took.

        Those that had one stored wait behind the others next time.
        """
        served = 0
        # One of each producer in turn, so that a fast one does not take all the room that becomes free.
        for incarnation, line in list(self._lines.items()):
            if not store(line.peer, line.inserts[0]):
                continue
            served += 1
            self.bytes -= _bytes(line.inserts.popleft())
            self._count -= 1
            if line.inserts:
                self._lines.move_to_end(incarnation)
            else:
                del self._lines[incarnation]
        return served


def _bytes(insert: Insert) -> int:
    return sum(payload.data.nbytes for payload in insert.payloads.values())
