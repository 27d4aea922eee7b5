"""Which learners share batches: epochs, in each of which they are the same. Without sockets and clocks."""

from __future__ import annotations

from collections.abc import Callable, Collection

from troupe.common.wire.control.messages import Seat

PATIENCE_S = 2.0
"""How long an epoch waits for learners that have not left the last one: they may have died, or hang."""
OWN = 0
"""Stands for the learner that has the run, which no other process has as its incarnation."""


class Epochs:
    """Seats in epochs.

    A learner that loses another, or is told to, leaves its epoch and asks for the next. It begins when all
    who are alive have asked, or after PATIENCE_S without those that have not; these get a seat in the one
    after.

    Attributes:
        closed_because: why no other learner may join; empty where they may.
    """

    def __init__(self, closed_because: str = "", *, expected: int = 1, start_s: float = 0.0) -> None:
        """Begin without any.

        Args:
            closed_because: see the class.
            expected: learners with which the run begins.
            start_s: how long the first epoch waits for them.
        """
        self.closed_because = closed_because
        self._expected = expected
        self._start_s = start_s
        self._newest = -1
        self._waiting: set[int] = set()
        self._seats: dict[int, Seat] = {}
        self._left_s: float | None = None

    def asked(self, incarnation: int, ended: int) -> Seat | None:
        """The seat of a process that has left epoch `ended`, None while there is none: it waits for one."""
        seat = self._seats.get(incarnation)
        if seat is not None and seat.epoch > ended:
            return seat
        # A restarted owner numbers on from what the others know.
        self._newest = max(self._newest, ended)
        self._waiting.add(incarnation)
        return None

    def waits(self, live: Collection[int]) -> bool:
        """Whether one of those that are alive waits for a seat."""
        self._waiting.intersection_update(live)
        return bool(self._waiting)

    def formed(
        self, live: Collection[int], now_s: float, meeting: Callable[[], tuple[str, int]]
    ) -> Seat | None:
        """The seat of the owner, which has left the last epoch; None while others may ask for one.

        Args:
            live: incarnations of the learners that are members.
            now_s: of any clock.
            meeting: gives host and port where several meet.
        """
        self.waits(live)
        if self._left_s is None:
            self._left_s = now_s
        here = 1 + len(self._waiting)
        missing = bool(set(live) - self._waiting) or (not self._seats and here < self._expected)
        patience_s = PATIENCE_S if self._seats else max(PATIENCE_S, self._start_s)
        if missing and now_s - self._left_s < patience_s:
            return None
        host, port = meeting() if self._waiting else ("", 0)
        self._newest += 1
        # In the order of incarnations, which is as good as any; the owner first, who publishes.
        self._seats = {
            incarnation: Seat(self._newest, rank, here, port, host)
            for rank, incarnation in enumerate([OWN, *sorted(self._waiting)])
        }
        self._waiting.clear()
        self._left_s = None
        return self._seats[OWN]
