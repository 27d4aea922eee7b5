"""Where learners get their seats in epochs: from their own control server, or from that of another."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import torch.distributed as dist

from troupe.common import system
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.peers.group import (
    GroupLostError,
    Meeting,
    ProcessGroup,
    absent,
    first_line,
    joined_store,
)
from troupe.services.learner.peers.network import own_address
from troupe.services.learner.peers.survivors import Survivors, exchange_places

_log = logging.getLogger(__name__)

SILENT_S = 2.5
"""A learner that has the run, and has not answered for so long, is taken to be gone."""
OWN_S = 15.0
"""How long a learner that has the run waits for its own store, in the same process."""
AWAY_S = 60.0
"""How long the others go on without it. Their updates reach nobody until it is back."""


class Seats(Protocol):
    """Where a learner gets its seats."""

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """That in an epoch after `ended`, if there is one within `timeout_s`."""

    def wanted(self) -> bool:
        """Whether there should be another epoch. Rank 0 is asked, which knows."""

    def planned(self, staying: Collection[int]) -> Seat | None:
        """That of rank 0 in the next epoch, of these ranks of this one, in their order, and those who wait.

        None where this epoch has to end for it.
        """

    def changed(self) -> None:
        """Take note that this epoch is now the one that was planned."""

    def gone(self) -> bool:
        """Whether one that was to come to the epoch that was planned has left, or is not heard any more."""

    def over(self) -> bool:
        """Whether another learner is known to have left this epoch; asked while this one waits for all."""

    def silent_s(self) -> float | None:
        """How long the other learner that gave the last seat has been silent; None where none did."""

    def begun(self, group: ProcessGroup, seat: Seat) -> None:
        """Prepare for the end of this epoch, as all in it do. Raises GroupLostError."""

    def failed(self, seat: Seat) -> None:
        """Take note that this epoch did not begin."""

    def unreached(self, ranks: Collection[int]) -> bool:
        """Take note that these say, and not rank 0, that they cannot connect to those who are to come.

        To be said before `failed`. Whether this epoch has to end, because one of them has lost its seat.
        """

    def misled(self, ranks: Collection[int]) -> None:
        """Take note that one of these in this epoch, or of all, has said what cannot be."""

    def store(self, seat: Seat) -> dist.Store:
        """Where those with a seat in this epoch find each other. Raises GroupLostError where it is gone."""


class OwnSeats:
    """Those of the learner that has the run; see `Seats`."""

    def __init__(self, control: ControlServer, network: str, stop: StopSignal) -> None:
        self._control, self._network, self._stop = control, network, stop
        self._meeting: Meeting | None = None

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """See `Seats`."""
        seat = self._control.seating.own(self._meet)
        if seat is None:
            self._stop.wait(timeout_s)
        return seat

    def wanted(self) -> bool:
        """See `Seats`."""
        return self._control.seating.waits

    def planned(self, staying: Collection[int]) -> Seat | None:
        """See `Seats`."""
        return self._control.seating.planned(staying, self._meet)

    def changed(self) -> None:
        """See `Seats`."""
        self._control.seating.changed()

    def gone(self) -> bool:
        """See `Seats`."""
        return self._control.seating.comer_gone

    def over(self) -> bool:
        """See `Seats`."""
        return self._control.seating.over

    def silent_s(self) -> float | None:
        """See `Seats`."""
        return None

    def begun(self, group: ProcessGroup, seat: Seat) -> None:
        """See `Seats`."""
        exchange_places(group, "", self._network)
        self._control.seating.begun()

    def failed(self, seat: Seat) -> None:
        """See `Seats`."""
        met = self._meeting
        self._control.seating.failed([] if met is None else absent(met.store, seat.epoch, seat.learners))

    def unreached(self, ranks: Collection[int]) -> bool:
        """See `Seats`."""
        return self._control.seating.unreached(ranks)

    def misled(self, ranks: Collection[int]) -> None:
        """See `Seats`."""
        self._control.seating.misled(ranks)

    def store(self, seat: Seat) -> dist.Store:
        """See `Seats`."""
        # Not the meeting's own: whoever waits there for one that does not come would hold up what comes next.
        return _joined(seat, OWN_S)

    def _meet(self) -> tuple[str, int]:
        address = own_address(self._network)
        if self._meeting is None:
            self._meeting = Meeting(address)
        return address, self._meeting.port


class GivenSeats:
    """Those that the learner which has the run gives to another; see `Seats`.

    While that one is gone, those who are left agree on seats among themselves.
    """

    def __init__(self, control: ControlClient, network: str, timeout_s: float) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._survivors = Survivors(network)
        self._without: int | None = None  # times that the owner had answered when an epoch began without it
        self._asked = -1, 0.0  # the epoch that has ended, and since when the next one is asked for

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """See `Seats`."""
        self._without = None
        if self._asked[0] != ended:
            self._asked = ended, system.monotonic()
        seat = self._control.next_seat(ended, timeout_s)
        silent_s = self._control.silent_s
        if (
            seat is None
            and silent_s < AWAY_S
            and min(silent_s, system.monotonic() - self._asked[1]) >= SILENT_S
        ):
            answers = self._control.answers
            seat = self._survivors.seat(ended)
            if seat is not None:
                self._without = answers
                # Back again, the owner would wait for this one in an epoch that it has not asked for.
                self._control.want_no_seat()
                _log.warning(
                    "the learner that has the run is gone: continuing without it (%d left)", seat.learners
                )
        return seat

    def wanted(self) -> bool:
        """See `Seats`: in an epoch without the owner, whether that is back, or for too long has not been."""
        if self._without is None:
            return False
        return self._control.answers != self._without or self._control.silent_s >= AWAY_S

    def planned(self, staying: Collection[int]) -> Seat | None:
        """See `Seats`: it is for the owner to plan."""
        return None

    def changed(self) -> None:
        """See `Seats`, and `planned`."""

    def gone(self) -> bool:
        """See `Seats`, and `planned`."""
        return False

    def over(self) -> bool:
        """See `Seats`: the owner knows."""
        return False

    def silent_s(self) -> float | None:
        """See `Seats`."""
        return self._control.silent_s if self._without is None else None

    def begun(self, group: ProcessGroup, seat: Seat) -> None:
        """See `Seats`."""
        self._survivors.exchange(group, seat)

    def failed(self, seat: Seat) -> None:
        """See `Seats`: it is for the owner to say who gets the next ones."""

    def unreached(self, ranks: Collection[int]) -> bool:
        """See `Seats`, and `failed`."""
        return False

    def misled(self, ranks: Collection[int]) -> None:
        """See `Seats`, and `failed`."""

    def store(self, seat: Seat) -> dist.Store:
        """See `Seats`."""
        if self._without is not None and (met := self._survivors.store(seat)) is not None:
            return met
        return _joined(seat, self._timeout_s)


def _joined(seat: Seat, timeout_s: float) -> dist.Store:
    try:
        return joined_store(seat.host, seat.port, timeout_s)
    except RuntimeError as error:
        raise GroupLostError(f"nothing answers at {seat.host}:{seat.port}: {first_line(error)}") from None
