"""Which inserts of which process are stored: what makes a repeated insert harmless, and its answer true."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.inserts import HeldError
from troupe.common.data.pager import FilePager
from troupe.common.data.sums import word_sums
from troupe.common.errors import RefusedError

PRODUCERS_FILE = "producers"
MAX_PRODUCERS = 1 << 16

MAX_SHARE = MAX_PRODUCERS // 4
"""Places for producers of one owner: a key, or a connection without one."""

FORGET_S = 3600.0
"""A producer that was silent for longer may be forgotten for a new one: it has nothing left to send again."""

_log = logging.getLogger(__name__)

_NUMBERS = ("incarnation", "sequence", "floor", "refused", "open", "synced")
_PRODUCER = np.dtype([*((name, "u8") for name in _NUMBERS), ("time_s", "f8"), ("sum", "u8")])
_WINDOW = 64


def producers_file_bytes() -> int:
    """Bytes of the file of producers."""
    return MAX_PRODUCERS * _PRODUCER.itemsize


class Producers:
    """The newest number of every producing process, and which of those before it are not stored.

    Numbers are settled in order: each is stored, refused, or left out because its producer says (by a larger
    `oldest`) that it does not want to know any more. All of it is in a mapped file, each with a checksum.

    Numbers up to `floor` are uncertain; of those above it, up to `sequence`, all are stored but the ones with
    a bit, number modulo 64, in `refused`. A refused number that is more than 64 behind raises the floor.

    Attributes:
        damaged: producers whose record was not what had been written; they count as new.
    """

    def __init__(self, pager: FilePager) -> None:
        """Open the file, or make it."""
        shape = (MAX_PRODUCERS,)
        self._rows = pager.open(PRODUCERS_FILE, _PRODUCER, shape, sparse=False).array
        wrong = np.flatnonzero((self._rows["incarnation"] != 0) & (_sums(self._rows) != self._rows["sum"]))
        self._rows[wrong] = np.zeros(len(wrong), _PRODUCER)
        self.damaged = len(wrong)
        # A clock that was put back must not keep anybody for ever.
        self._rows["time_s"][:] = np.clip(np.nan_to_num(self._rows["time_s"]), 0, system.time())
        incarnations: NDArray[np.uint64] = self._rows["incarnation"]
        taken = np.flatnonzero(incarnations)
        self._places = dict(zip(incarnations[taken].tolist(), taken.tolist(), strict=True))
        self._free = np.flatnonzero(incarnations == 0)[::-1].tolist()
        self._crowded = False
        # By incarnation, the numbers that were open and are stored again, which the disk may not have yet.
        self._again: dict[int, set[int]] = {}
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
        self._write(place, incarnation, 0, 0, 0, 0, 0)
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

    def synced(self, incarnation: int) -> int:
        """The largest number that is on the disk for certain, with all before it."""
        place = self._places.get(incarnation)
        return 0 if place is None else int(self._rows["synced"][place])

    def is_stored(self, incarnation: int, sequence: int) -> bool:
        """Whether this insert, not above `newest`, is known to have been stored."""
        place = self._places.get(incarnation)
        if place is None or sequence <= int(self._rows["floor"][place]):
            return False
        recent = int(self._rows["sequence"][place]) - sequence < _WINDOW
        return not (recent and int(self._rows["refused"][place]) >> (sequence % _WINDOW) & 1)

    def settle(self, incarnation: int, sequence: int, *, stored: bool) -> None:
        """Note that an insert, above `newest`, was stored or refused; those it skips were left out.

        Its producer was admitted.
        """
        place = self._places[incarnation]
        floor, refused = int(self._rows["floor"][place]), int(self._rows["refused"][place])
        bit = 1 << (sequence % _WINDOW)
        if sequence > int(self._rows["sequence"][place]) + 1:
            floor, refused = sequence - 1, 0
        elif refused & bit:  # of the one that is 64 behind
            floor = sequence - _WINDOW
        refused = refused & ~bit if stored else refused | bit
        # At once: killed before this, the insert comes again and is settled again.
        left_open = 0 if sequence == floor + 1 else int(self._rows["open"][place]) & ~bit
        self._write(
            *(place, incarnation, sequence, floor, refused, left_open), int(self._rows["synced"][place])
        )

    def is_open(self, incarnation: int, sequence: int) -> bool:
        """Whether a power cut has left it uncertain if this insert is whole, so that it is taken again."""
        place = self._places.get(incarnation)
        if place is None or not 0 <= int(self._rows["sequence"][place]) - sequence < _WINDOW:
            return False
        if sequence in self._again.get(incarnation, ()):
            return False
        return bool(int(self._rows["open"][place]) >> (sequence % _WINDOW) & 1)

    def close_again(self, incarnation: int, sequence: int, *, synced: bool) -> None:
        """Note that an insert that was open is stored.

        Where that has to be synced first, the file says so only when it is `acknowledged`: else the next
        power cut could leave the note without the insert.
        """
        if not synced:
            self._again.setdefault(incarnation, set()).add(sequence)
            return
        place = self._places[incarnation]
        numbers = [int(self._rows[name][place]) for name in _NUMBERS]
        numbers[_NUMBERS.index("open")] &= ~(1 << sequence % _WINDOW)
        numbers[_NUMBERS.index("refused")] &= ~(1 << sequence % _WINDOW)
        self._write(place, *numbers)

    def _write(self, place: int, *numbers: int) -> None:
        row = np.array([(*numbers, system.time(), 0)], _PRODUCER)
        row["sum"] = _sums(row)
        self._rows[place : place + 1] = row

    def acknowledged(self, incarnation: int, sequence: int) -> None:
        """Note that the insert `sequence`, and all before it, are on the disk."""
        again = self._again.get(incarnation, set())
        if sequence in again:
            again.remove(sequence)
            if self.is_open(incarnation, sequence):
                self.close_again(incarnation, sequence, synced=True)
        if not again:
            self._again.pop(incarnation, None)
        place = self._places.get(incarnation)
        if place is not None and sequence > int(self._rows["synced"][place]):
            self._write(place, *(int(self._rows[name][place]) for name in _NUMBERS[:-1]), sequence)

    def all_synced(self) -> None:
        """Note that all that is settled is on the disk."""
        rows = self._rows.copy()
        rows["synced"] = rows["sequence"]
        rows["sum"] = np.where(rows["incarnation"] != 0, _sums(rows), rows["sum"])
        self._rows[:] = rows

    def after_power_cut(self, live: Mapping[int, list[int]]) -> None:
        """Go back to what was on the disk for certain, and on from there with the chunks that are there.

        Of what was not acknowledged the disk may have any part: a chunk without its items, or with some. So
        every number above is taken if it comes again, and one that was to be taken before still is. It does
        not come again if it was acknowledged, and has only left since, or was not noted as on the disk.

        Args:
            live: numbers of the inserts whose chunks are there, by incarnation.
        """
        for incarnation in self._places.keys() | live.keys():
            if incarnation not in self._places and self._free:
                self.admit(incarnation)
            place = self._places.get(incarnation)
            if place is None:
                continue
            row = self._rows[place]
            synced, floor, refused = (int(row[name]) for name in ("synced", "floor", "refused"))
            newest = max(synced, *live.get(incarnation, ()), 0)
            recent = range(max(newest - _WINDOW, 0) + 1, newest + 1)
            left_open = sum(1 << n % _WINDOW for n in recent if n > synced or self.is_open(incarnation, n))
            known = sum(1 << n % _WINDOW for n in recent if n <= synced)
            numbers = newest, min(floor, synced), refused & known, left_open, synced
            self._write(place, incarnation, *numbers)

    def restore(self, incarnations: NDArray[np.uint64], sequences: NDArray[np.uint64]) -> None:
        """Note the inserts whose chunks are there: the last of one may be stored and not settled."""
        producers, which = np.unique(incarnations, return_inverse=True)
        newest = np.zeros(len(producers), np.uint64)
        np.maximum.at(newest, which, sequences)
        pairs: Iterable[tuple[int, int]] = zip(producers.tolist(), newest.tolist(), strict=True)
        for incarnation, sequence in pairs:
            if self.damaged and incarnation not in self._places and self._free:
                self.admit(incarnation)  # it may be one of those
            if incarnation in self._places and sequence > self.newest(incarnation):
                self.settle(incarnation, sequence, stored=True)

    def files(self) -> dict[str, NDArray]:
        """The contents of the file, by name."""
        return {PRODUCERS_FILE: self._rows}


def _sums(rows: NDArray) -> NDArray[np.uint64]:
    """What the field `sum` of `rows [n]` should say: of all but the time."""
    return word_sums(np.ascontiguousarray(rows).view("u8").reshape(len(rows), len(_NUMBERS) + 2)[:, :-2])
