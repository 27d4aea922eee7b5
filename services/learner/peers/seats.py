"""Where learners get their seats in epochs: from their own control server, or from that of another."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from troupe.common.runtime import StopSignal
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.peers.group import GroupLostError, Meeting
from troupe.services.learner.peers.network import own_address


class OwnSeats:
    """Those of the learner that has the run; see `troupe.services.learner.peers.team.Seats`."""

    def __init__(self, control: ControlServer, network: str, stop: StopSignal) -> None:
        self._control, self._network, self._stop = control, network, stop
        self._meeting: Meeting | None = None

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """See `Seats`."""
        seat = self._control.own_seat(self._meet)
        if seat is None:
            self._stop.wait(timeout_s)
        return seat

    def wanted(self) -> bool:
        """See `Seats`."""
        return self._control.learner_waits

    def store(self, seat: Seat) -> dist.Store:
        """See `Seats`."""
        assert self._meeting is not None
        return self._meeting.store

    def _meet(self) -> tuple[str, int]:
        address = own_address(self._network)
        if self._meeting is None:
            self._meeting = Meeting(address)
        return address, self._meeting.port


class GivenSeats:
    """Those that the learner which has the run gives to another; see `Seats`."""

    def __init__(self, control: ControlClient, timeout_s: float) -> None:
        self._control, self._timeout_s = control, timeout_s

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """See `Seats`."""
        return self._control.next_seat(ended, timeout_s)

    def wanted(self) -> bool:
        """See `Seats`."""
        return False

    def store(self, seat: Seat) -> dist.Store:
        """See `Seats`."""
        try:
            return dist.TCPStore(
                seat.host,
                seat.port,
                is_master=False,
                timeout=timedelta(seconds=self._timeout_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            line = (str(error).splitlines() or [""])[0][:200]
            raise GroupLostError(f"nobody is at {seat.host}:{seat.port}: {line}") from None
