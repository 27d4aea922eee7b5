"""Seats in epochs, as the learner's own threads ask for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any

from troupe.common import system, timing
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.epochs import Epochs
from troupe.services.learner.control.roster import Roster

GONE_S = 5.0
"""A learner that was to come to an epoch, and has not been heard for so long, is waited for no more."""


class Seating:
    """`Epochs`, told who is alive now, under the lock of the control server."""

    def __init__(
        self, epochs: Epochs, roster: Roster, lock: AbstractContextManager[Any], heartbeat_s: float
    ) -> None:
        self._epochs, self._roster, self._lock, self._heartbeat_s = epochs, roster, lock, heartbeat_s

    def _live(self, heard_s: float = -math.inf) -> set[int]:
        return self._roster.processes("learner", heard_s)

    @property
    def waits(self) -> bool:
        """Whether a learner waits for a seat."""
        with self._lock:
            return self._epochs.waits(self._live(), system.monotonic())

    def own(self, meeting: Callable[[], tuple[str, int]]) -> Seat | None:
        """The seat of this learner in the next epoch, or None while others may come: ask again soon.

        `meeting` is called for the address at which learners meet, where there are several.
        """
        with self._lock:
            return self._epochs.formed(self._live(), system.monotonic(), meeting)

    def planned(self, staying: Collection[int], meeting: Callable[[], tuple[str, int]]) -> Seat | None:
        """The seat of this learner in an epoch of these ranks and those that wait; see `Epochs.planned`."""
        with self._lock:
            return self._epochs.planned(staying, self._live(), system.monotonic(), meeting)

    @property
    def comer_gone(self) -> bool:
        """Whether one that is to come to the planned epoch has left, or not been heard for a while."""
        with self._lock:
            heard_s = system.monotonic() - max(GONE_S, timing.HEARTBEATS_LATE * self._heartbeat_s)
            return not self._live(heard_s).issuperset(self._epochs.comers)

    @property
    def over(self) -> bool:
        """Whether another learner has left the newest epoch; see `Epochs.over`."""
        with self._lock:
            return self._epochs.over(self._live())

    def changed(self) -> None:
        """Note that the epoch that was planned is the newest now."""
        with self._lock:
            self._epochs.changed()

    def begun(self) -> None:
        """Note that all who had a seat in the newest epoch have come."""
        with self._lock:
            self._epochs.begun()

    def failed(self, absent: Collection[int]) -> None:
        """Note that it did not begin; see `Epochs.failed`."""
        with self._lock:
            self._epochs.failed(absent, system.monotonic())

    def unreached(self, ranks: Collection[int]) -> bool:
        """Note that these cannot connect to those who are to come; see `Epochs.unreached`."""
        with self._lock:
            return self._epochs.unreached(ranks, system.monotonic())

    def misled(self, ranks: Collection[int]) -> None:
        """Note that one of these has said in it what cannot be; see `Epochs.misled`."""
        with self._lock:
            self._epochs.misled(ranks, system.monotonic())
