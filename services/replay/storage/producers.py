"""Which inserts of which process are stored: what makes a repeated insert harmless, and its answer true."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.columns import MappedFile
from troupe.common.data.inserts import HeldError
from troupe.common.errors import RefusedError

PRODUCERS_FILE = "producers"
UNSTORED_FILE = "unstored"
MAX_PRODUCERS = 1 << 16

MAX_SHARE = MAX_PRODUCERS // 4
"""Places for producers of one owner: a key, or a connection without one."""

FORGET_S = 3600.0
"""A producer that was silent for longer may be forgotten for a new one: it has nothing left to send again."""

_log = logging.getLogger(__name__)

_PRODUCER = np.dtype([("incarnation", "u8"), ("sequence", "u8"), ("time_s", "f8")])
_UNSTORED = np.dtype([("floor", "u8"), ("refused", "u8")])
# Bits of `refused`. A producer has no more inserts unacknowledged than that, so none asks for more.
_WINDOW = 64


def producers_file_bytes() -> int:
    """Bytes of the file of producers."""
    return MAX_PRODUCERS * _PRODUCER.itemsize


def unstored_file_bytes() -> int:
    """Bytes of the file of what is not stored."""
    return MAX_PRODUCERS * _UNSTORED.itemsize


class Producers:
    """The newest number of every producing process, and which of those before it are not stored.

    Numbers are settled in order: each is stored, refused, or left out because its producer says (by a larger
    `oldest`) that it does not want to know any more. All of it is in mapped files.

    Numbers up to `floor` are uncertain; of those above it, up to `sequence`, all are stored but the ones with
    a bit, number modulo 64, in `refused`. A refused number that is more than 64 behind raises the floor.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files in `folder`, or make them."""
        shape = (MAX_PRODUCERS,)
        self._rows = MappedFile(folder / PRODUCERS_FILE, _PRODUCER, shape, sparse=False).array
        # A file of its own: folders that were made before it existed have none, and nothing to put in it.
        self._unstored = MappedFile(folder / UNSTORED_FILE, _UNSTORED, shape, sparse=False).array
        # A clock that was put back must not keep anybody for ever.
        np.minimum(self._rows["time_s"], system.time(), out=self._rows["time_s"])
        incarnations: NDArray[np.uint64] = self._rows["incarnation"]
        taken = np.flatnonzero(incarnations)
        self._places = dict(zip(incarnations[taken].tolist(), taken.tolist(), strict=True))
        self._free = np.flatnonzero(incarnations == 0)[::-1].tolist()
        self._crowded = False
        # By place, a hash of the owner; 0 where it was taken before this process.
        self._owners = np.zeros(MAX_PRODUCERS, np.uint32)

    def admit(self, incarnation: int, owner: str = "") -> None:
        """Make place for a producer that is new, in that of the one that was silent for longest.

        Raises HeldError where all have been heard lately: what they send again has to be recognised. And
        RefusedError where those of its `owner` (empty: nobody in particular) have their share of them.
        """
        if incarnation in self._places:
            return
        number = zlib.crc32(owner.encode()) or 1
        own = np.flatnonzero(self._owners == number) if owner else np.zeros(0, np.int64)
        if self._free and len(own) < MAX_SHARE:
            place = self._free[-1]
        else:
            crowded = len(own) >= MAX_SHARE
            times_s = self._rows["time_s"]
            np.minimum(times_s, system.time(), out=times_s)  # as at the start
            place = int(own[np.argmin(times_s[own])] if crowded else np.argmin(times_s))
            if system.time() - self._rows["time_s"][place] < FORGET_S:
                if crowded:
                    detail = f"{len(own)} processes of one key or connection within {FORGET_S:g} s"
                    raise RefusedError("too_many", detail)
                if not self._crowded:
                    _log.warning("%d producers within %g s: new ones wait", len(self._places), FORGET_S)
                self._crowded = True
                raise HeldError("too many producers within a short time")
            self._crowded = False
            del self._places[int(self._rows["incarnation"][place])]
            self._free.append(place)
        # In this order: a death in the midst leaves nobody with the numbers of another.
        self._rows["incarnation"][place] = 0
        self._rows["sequence"][place], self._rows["time_s"][place] = 0, system.time()
        self._unstored[place] = (0, 0)
        self._rows["incarnation"][place] = incarnation
        self._places[incarnation] = place
        self._owners[place] = number if owner else 0
        self._free.pop()

    def heard(self, incarnation: int) -> None:
        """Note that a producer that is known is there still."""
        self._rows["time_s"][self._places[incarnation]] = system.time()

    def newest(self, incarnation: int) -> int:
        """The largest number that is settled; 0 where none is."""
        place = self._places.get(incarnation)
        return 0 if place is None else int(self._rows["sequence"][place])

    def is_stored(self, incarnation: int, sequence: int) -> bool:
        """Whether this insert, not above `newest`, is known to have been stored."""
        place = self._places.get(incarnation)
        if place is None or sequence <= int(self._unstored["floor"][place]):
            return False
        recent = int(self._rows["sequence"][place]) - sequence < _WINDOW
        return not (recent and int(self._unstored["refused"][place]) >> (sequence % _WINDOW) & 1)

    def settle(self, incarnation: int, sequence: int, *, stored: bool) -> None:
        """Note that an insert, above `newest`, was stored or refused; those it skips were left out.

        Its producer was admitted.
        """
        place = self._places[incarnation]
        row, refused = self._unstored[place : place + 1], int(self._unstored["refused"][place])
        bit = 1 << (sequence % _WINDOW)
        if sequence > int(self._rows["sequence"][place]) + 1:
            row["floor"], refused = sequence - 1, 0
        elif refused & bit:  # of the one that is 64 behind
            row["floor"] = sequence - _WINDOW
        row["refused"] = refused & ~bit if stored else refused | bit
        # Last: killed before this, the insert comes again and is settled again.
        self._rows["sequence"][place] = sequence
        self._rows["time_s"][place] = system.time()

    def restore(self, incarnations: NDArray[np.uint64], sequences: NDArray[np.uint64]) -> None:
        """Note the inserts whose chunks are there: the last of one may be stored and not settled."""
        producers, which = np.unique(incarnations, return_inverse=True)
        newest = np.zeros(len(producers), np.uint64)
        np.maximum.at(newest, which, sequences)
        pairs: Iterable[tuple[int, int]] = zip(producers.tolist(), newest.tolist(), strict=True)
        for incarnation, sequence in pairs:
            if incarnation in self._places and sequence > self.newest(incarnation):
                self.settle(incarnation, sequence, stored=True)

    def files(self) -> dict[str, NDArray]:
        """The contents of the files, by name."""
        return {PRODUCERS_FILE: self._rows, UNSTORED_FILE: self._unstored}
