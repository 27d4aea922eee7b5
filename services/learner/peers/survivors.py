"""Learners that go on without the one that has the run, until it is back."""

from __future__ import annotations

import json
import socket
from collections import Counter

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
PATIENT_TIMES = 2
"""A learner that accepts a connection and does not answer so many times in a row is passed over."""
PLACE_BYTES = 64
"""Room for an address and a port."""


class Survivors:
    """Seats in an epoch without the owner.

    At the beginning of each epoch all tell each other where they would meet. When the owner is gone, those
    who are left meet at the place of the lowest rank that still answers. That one says who has come.

    The system still accepts connections for a process that is stopped. Where some pass it over before it goes
    on, there are two groups until the owner is back, as where the network parts them; all then take the state
    of whoever is furthest.
    """

    def __init__(self, network: str) -> None:
        """See `net.learner_network`."""
        self._network = network
        self._meeting: Meeting | None = None
        self._epoch, self._rank = -1, 0
        self._places: list[str] = []  # by rank; empty for the owner, which has another
        self._ended = -1  # the epoch after which the following holds
        self._unanswered: Counter[int] = Counter()
        self._met: dist.Store | None = None
        self._host = -1  # rank of whose store that is
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
            self._unanswered.clear()
        try:
            if self._met is None:
                self._met = self._meet(f"after-{self._epoch}-{ended}")
            here = self._here(self._met)
        except RuntimeError:  # whoever has the place is gone too, or stopped: there is another
            self._met = None
            self._unanswered[self._host] += 1
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
        passed_over = 0
        for rank, place in enumerate(self._places[: self._rank]):
            if self._unanswered[rank] >= PATIENT_TIMES:
                passed_over += 1
            elif place and self._answers(place):
                host, port = place.split()
                self._host, self._at, self._deadline = rank, (host, int(port)), None
                met = dist.PrefixStore(name, joined_store(host, int(port), REACH_S))
                met.set(f"here-{self._rank}", "")
                return met
        self._host, self._at = self._rank, (own_address(self._network), self._meeting.port)
        # Others may have begun later to wait for those that this one has passed over.
        self._deadline = Deadline(PATIENCE_S + passed_over * PATIENT_TIMES * REACH_S)
        return dist.PrefixStore(name, self._meeting.store)

    def _answers(self, place: str) -> bool:
        host, port = place.split()
        check_meeting(host, self._network)
        # The store's own client tries for as long as its patience lasts, also where nobody listens.
        try:
            socket.create_connection((host, int(port)), REACH_S).close()
        except OSError:
            return False
        return True

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
        raise MisledError("gave an address where no learner may be", wrong)
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
        raise RuntimeError("the answer does not say who continues")
    return ranks


def _is_place(text: str, network: str) -> bool:
    host, _, port = text.partition(" ")
    try:
        check_meeting(host, network)
    except ConfigError:
        return False
    return port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
