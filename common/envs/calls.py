"""Which call of its environment each slot is in, for who looks from another thread or another process.

An environment that hangs, or that ends the process by `os._exit` or a crash, can say nothing itself. Where
the variable `TROUPE_ENV_CALLS` names a directory, the record is a file there, which outlives the process.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np

VARIABLE = "TROUPE_ENV_CALLS"
MAKING, RESET, STEP, CHECKER = 1, 2, 3, 4
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
# Numbers of 8 bytes. The head: the number of the first slot, whether one record stands for all slots, and how
# many rounds of steps were announced. A record: which call it is (0: none), how many were entered one by one,
# the round before the first of the episode, and the seed (-1: not known).
_HEAD, _RECORD = 3, 4
_FILES = itertools.count()


@dataclass(frozen=True)
class Call:
    """A call that has not returned.

    Attributes:
        number: different for every call of the slot.
        call: `MAKING`, `RESET`, `STEP` or `CHECKER`.
        step: of the episode, counted from 1; 0 where it has none.
        slot: the copy; None where all copies are one object.
        seed: that the copy had last; None where nobody has said so.
    """

    number: int
    call: int
    step: int
    slot: int | None
    seed: int | None = None

    def __str__(self) -> str:
        if self.call == CHECKER:
            return "in Gymnasium's checker"
        what = {MAKING: "while it is made", RESET: "in reset()"}.get(self.call, f"at step {self.step}")
        return f"{what}, {'all slots' if self.slot is None else f'slot {self.slot}'}"


class Calls:
    """The record of one process's slots. Each slot is written by one thread.

    Attributes:
        current: which call each slot is in, 0 for none; `[S]`. Steps that `announce_steps` told of are
            entered and left here, for they are often.
    """

    def __init__(self, slots: int, *, whole: bool = False) -> None:
        """For this many slots; `whole`: one record for all of them."""
        records = 1 if whole else slots
        size = 8 * (_HEAD + _RECORD * records)
        directory, self._path = os.environ.get(VARIABLE), None
        if directory:
            self._path = Path(directory) / f"{os.getpid()}-{next(_FILES)}"
            with self._path.open("w+b") as file:
                file.truncate(size)
                # A shared mapping: writes reach the page cache by themselves, so the record is there whatever
                # ends the process.
                memory = mmap.mmap(file.fileno(), size)
        else:
            memory = mmap.mmap(-1, size)
        # Aligned words of 8 bytes, each written by one thread: a reader sees the old number or the new one.
        # To set one number of a memoryview costs less than one of an array.
        self._numbers = memoryview(memory).cast("q")
        self._numbers[1] = whole
        self.current = self._numbers[_HEAD::_RECORD]
        for record in range(records):
            self.seeded(record, None)

    def number_from(self, first: int) -> None:
        """Say which number the first slot has in the process."""
        self._numbers[0] = first

    def enter(self, slot: int, call: int, step: int = 0) -> None:
        """A call begins; an episode is in its `step`."""
        at = _HEAD + _RECORD * slot
        self._numbers[at + 1] += 1
        # The call last, below: what it says of itself has to be there when it can be seen.
        self._numbers[at + 2] = self._numbers[2] - step
        self.current[slot] = call

    def announce_steps(self) -> None:
        """The next call of every slot is a step, the first after `RESET` and then the one after its last."""
        self._numbers[2] += 1

    def seeded(self, slot: int, seed: int | None) -> None:
        """The copy has this seed from here on."""
        self._numbers[_HEAD + _RECORD * slot + 3] = -1 if seed is None else seed

    def seed_of(self, slot: int) -> int | None:
        """The seed that the copy had last."""
        seed = self._numbers[_HEAD + _RECORD * slot + 3]
        return None if seed < 0 else seed

    def leave(self, slot: int) -> None:
        """It has returned."""
        self.current[slot] = 0

    def running(self) -> list[Call]:
        """The calls that have not returned."""
        return _running(self._numbers.tobytes())

    def close(self) -> None:
        """Take the file away: from here on no one watches the environment's calls."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def calls_of(directory: Path, pid: int) -> list[Call]:
    """The calls that a process, which may have ended, has not returned from; of several, in no order."""
    running: list[Call] = []
    for path in directory.glob(f"{pid}-*"):
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was read
            running += _running(path.read_bytes())
    return running


def last_words(directory: Path, pid: int, code: int, env_id: str) -> str:
    """What to say of a process that ended without a word of its own, with a negative code by a signal.

    Empty where no environment was in a call, or where the signal came from outside.
    """
    running = calls_of(directory, pid)
    for path in directory.glob(f"{pid}-*"):
        path.unlink(missing_ok=True)
    # SIGKILL and SIGTERM come from outside, whatever the environment was doing.
    if not running or (code < 0 and -code not in _CRASHES):
        return ""
    return f"{env_id} ended the process {running[0]} ({ending(code)})"


def ending(code: int) -> str:
    """How an environment ended a process that has said nothing about it itself."""
    if code >= 0:
        return f"os._exit({code})"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _running(memory: bytes) -> list[Call]:
    numbers = np.frombuffer(memory, np.int64)
    if not len(numbers):  # the file was made a moment ago
        return []
    first, whole, rounds = numbers[:_HEAD].tolist()
    return [
        Call(
            rounds + entered,
            call,
            rounds - before,
            None if whole else first + slot,
            None if seed < 0 else seed,
        )
        for slot, (call, entered, before, seed) in enumerate(numbers[_HEAD:].reshape(-1, _RECORD).tolist())
        if call
    ]
