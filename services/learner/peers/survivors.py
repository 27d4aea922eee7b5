"""Learners that go on without the one that has the run, until it is back."""

from __future__ import annotations

import json
import socket

import torch
import torch.distributed as dist

from troupe.common.agents.learners.hearsay import MisledError
from troupe.common.errors import ConfigError
from troupe.common.runtime import Deadline
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.peers.group import Meeting, ProcessGroup, joined_store, within
from troupe.services.learner.peers.network import check_meeting, own_address

PATIENCE_S = 1.0
"""How long they wait for each other."""
REACH_S = 2.0
"""How long a learner may take to accept a connection, or to answer."""
PLACE_BYTES = 64
"""Room for an address and a port."""


class Survivors:
    """Seats in an epoch without the owner.

    At the beginning of each epoch all tell each other where they would meet. When the owner is gone, those
    who are left meet at the place of the lowest rank that still answers. That one says who has come.
    """

    def __init__(self, network: str) -> None:
        """See `net.learner_network`."""
        self._network = network
        self._meeting: Meeting | None = None
        self._epoch, self._rank = -1, 0
        self._places: list[str] = []  # by rank; empty for the owner, which has another
        self._ended = -1  # the epoch after which the following holds
        self._met: dist.Store | None = None
        self._at: tuple[str, int] = "", 0
        self._deadline: Deadline | None = None

    def exchange(self, group: ProcessGroup, seat: Seat) -> None:
        """Take part in `exchange_places`, and remember them. Raises GroupLostError, MisledError."""
        address = own_address(self._network)
        if self._meeting is None:
            self._meeting = Meeting(address)
        self._places = exchange_places(group, f"{address} {self._meeting.port}", self._network)
        self._epoch, self._rank = seat.epoch, seat.rank

    def seat(self, ended: int) -> Seat | None:
        """The seat of this learner in the epoch after `ended`, or None: ask again soon."""
        if self._meeting is None or not self._places:
            return None
        if self._ended != ended:
            self._ended, self._met = ended, None
        try:
            if self._met is None:
                self._met = self._meet(f"after-{self._epoch}-{ended}")
            here = self._here(self._met)
        except RuntimeError:  # whoever has the place is gone too: there is another
            self._met = None
            return None
        if self._rank not in here:
            return None
        host, port = self._at
        return Seat(ended + 1, here.index(self._rank), len(here), port, host)

    def store(self, seat: Seat) -> dist.Store | None:
        """Where those with this seat find each other; None if it is not of `seat`."""
        return self._met if seat.epoch == self._ended + 1 else None

    def _meet(self, name: str) -> dist.Store:
        """Say that this one is here, at the first place that answers."""
        assert self._meeting is not None
        for place in filter(None, self._places[: self._rank]):
            host, port = place.split()
            check_meeting(host, self._network)
            if _answers(host, int(port)):
                met = dist.PrefixStore(name, joined_store(host, int(port), REACH_S))
                met.set(f"here-{self._rank}", "")
                self._at, self._deadline = (host, int(port)), None
                return met
        self._at = own_address(self._network), self._meeting.port
        self._deadline = Deadline(PATIENCE_S)
        return dist.PrefixStore(name, self._meeting.store)

    def _here(self, met: dist.Store) -> list[int]:
        """Former ranks of all who go on; empty until that is settled."""
        if self._deadline is not None:
            others = [rank for rank, place in enumerate(self._places) if place and rank > self._rank]
            came = [rank for rank in others if met.check([f"here-{rank}"])]
            if len(came) < len(others) and not self._deadline.expired:
                return []
            met.set("settled", json.dumps([self._rank, *came]))
        elif not within(REACH_S, lambda: met.check(["settled"])):
            return []
        return settled(within(REACH_S, lambda: met.get("settled")), len(self._places))


def exchange_places(group: ProcessGroup, own: str, network: str) -> list[str]:
    """Tell the others a place, `ADDRESS PORT` or empty; those of all, by rank.

    Raises:
        GroupLostError: where a learner is lost.
        MisledError: where what one tells is no place in `network`, see `net.learner_network`.
    """
    padded = own.encode().ljust(PLACE_BYTES, b"\0")
    told = group.gather(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
    places = [each.numpy().tobytes().rstrip(b"\0").decode("ascii", "replace") for each in told]
    if wrong := [rank for rank, place in enumerate(places) if place and not _is_place(place, network)]:
        raise MisledError("that it can be reached where no learner may be", wrong)
    return places


def settled(text: bytes, learners: int) -> list[int]:
    """Who goes on, as the one that was met says: former ranks. Raises RuntimeError for what cannot be."""
    try:
        ranks = json.loads(text)
    except (ValueError, RecursionError):
        ranks = None
    if (
        not isinstance(ranks, list)
        or not all(type(rank) is int and 0 <= rank < learners for rank in ranks)
        or ranks != sorted(set(ranks))
    ):
        raise RuntimeError("whoever was met says nonsense of who goes on")
    return ranks


def _is_place(text: str, network: str) -> bool:
    host, _, port = text.partition(" ")
    try:
        check_meeting(host, network)
    except ConfigError:
        return False
    return port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def _answers(host: str, port: int) -> bool:
    # The store's own client tries for as long as its patience lasts, also where nobody listens.
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError:
        return False
    return True
