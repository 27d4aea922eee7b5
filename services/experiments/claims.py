"""Which of several processes trains which run of a sweep that they share: claims with a lease, as files.

The claim of a run is a file `claims/RUN.N`. Only one process can make it, and then writes into it every few
seconds. Whoever sees that it has not changed for the length of a lease may make `claims/RUN.N+1`, which again
only one can, and has the run. An owner that finds a later claim has lost the run.

No clocks are compared: each process measures by its own how long a file has not changed. Nothing is deleted,
so nobody can take a new claim for an old one.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from troupe.common.runtime.files import MAX_JSON_BYTES, atomic_write, check_regular, make_directory

FOLDER = "claims"
BEAT_S = 5.0
LEASE_S = 120.0
"""More than network file systems take to show what another machine has written, usually up to 60 s."""
HELD, FREE = "held", "free"


@dataclass(frozen=True)
class Claim:
    """The newest claim of a run.

    Attributes:
        number: claims before it.
        state: `held`; `free`, where it was given back or its lease is over; `done` or `failed`.
        error: why it has failed.
        host: of its owner.
    """

    number: int
    state: str
    error: str = ""
    host: str = ""


class Claims:
    """The claims of one process, and its view of those of others. For one thread.

    Args:
        folder: of the sweep, on a file system that all share.
        clock: seconds, monotonic.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = make_directory(folder / FOLDER, "directory of claims")
        self._clock = clock
        self._me = {"owner": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._mine: dict[str, int] = {}
        self._given_back: dict[str, tuple[int, str, str]] = {}  # and not written yet
        self._beats = 0
        self._next_beat_s = 0.0
        self._seen: dict[str, tuple[int, bytes, float]] = {}

    def has(self, name: str) -> bool:
        """Whether a run is this process's, as far as that knows."""
        return name in self._mine

    @property
    def owes(self) -> bool:
        """Whether the others have still to be told what became of a run."""
        return bool(self._given_back)

    def take(self, name: str, *, again: int = -1) -> bool:
        """Claim a run; returns whether it is this process's now.

        Args:
            name: of the run.
            again: number of a claim that counts as given back, although the run was done or has failed.
        """
        newest = self.newest().get(name)
        if newest is not None and newest.state != FREE and (newest.state == HELD or newest.number != again):
            return False
        number = 0 if newest is None else newest.number + 1
        try:
            with self._path(name, number).open("xb") as file:
                file.write(self._text(HELD))
        except FileExistsError:
            return False  # another was faster
        self._mine[name] = number
        return True

    def newest(self) -> dict[str, Claim]:
        """The newest claim of each run that has one; this process's own included."""
        numbers: dict[str, int] = {}
        for entry in os.listdir(self._folder):
            name, _, number = entry.rpartition(".")
            if name and number.isdecimal():
                numbers[name] = max(numbers.get(name, -1), int(number))
        return {name: self._read(name, number) for name, number in numbers.items()}

    def beat(self) -> list[str]:
        """Keep the claims of this process, now and then; returns the runs that it has lost."""
        self._say_given_back()
        if self._clock() < self._next_beat_s:
            return []
        self._beats += 1
        lost = [name for name, number in self._mine.items() if self._path(name, number + 1).exists()]
        for name in lost:
            del self._mine[name]
        if lost:
            return lost  # at once: what follows may fail, and those runs still train
        for name, number in self._mine.items():
            self._write(name, number, HELD)
        self._next_beat_s = self._clock() + BEAT_S  # one that failed is made again at once
        return []

    def give_back(self, name: str, state: str = FREE, error: str = "") -> None:
        """Say what became of a run of this process: `done`, `failed`, or `free` for whoever wants it.

        Where that cannot be written now (OSError), the next `beat` does.
        """
        number = self._mine.pop(name, None)
        if number is not None:
            self._given_back[name] = number, state, error
        self._say_given_back()

    def _say_given_back(self) -> None:
        for name, (number, state, error) in list(self._given_back.items()):
            self._write(name, number, state, error)
            del self._given_back[name]

    def _read(self, name: str, number: int) -> Claim:
        try:
            text = check_regular(self._path(name, number), MAX_JSON_BYTES).read_bytes()
        except OSError:
            text = b""
        seen = self._seen.get(name)
        if seen is None or seen[:2] != (number, text):
            seen = self._seen[name] = (number, text, self._clock())
        told = _told(text)
        state = told.get("state")
        if state not in (FREE, "done", "failed"):
            state = HELD
        # Also one without a word: its owner may have died between making and writing it.
        if state == HELD and name not in self._mine and self._clock() - seen[2] > LEASE_S:
            state = FREE
        return Claim(number, state, str(told.get("error", "")), str(told.get("host", "")))

    def _write(self, name: str, number: int, state: str, error: str = "") -> None:
        # Renamed into place: who reads it sees a whole one. A power cut costs a lease.
        atomic_write(self._path(name, number), self._text(state, error), durable=False)

    def _text(self, state: str, error: str = "") -> bytes:
        return json.dumps({**self._me, "state": state, "error": error, "beat": self._beats}).encode()

    def _path(self, name: str, number: int) -> Path:
        return self._folder / f"{name}.{number}"


def _told(text: bytes) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
