"""A few numbers that outlive the process, in two copies that are written in turn, each with its checksum.

A copy that a death left half written, or that has a flipped bit, leaves the other one, one change older.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.pager import FilePager
from troupe.common.data.sums import word_sum, word_sums

_MASK = 2**64 - 1


def _dtype(numbers: int) -> np.dtype:
    return np.dtype([("turn", "u8"), ("values", "f8", (numbers,)), ("sum", "u8")])


def header_bytes(numbers: int) -> int:
    """Bytes of a header's file."""
    return 2 * _dtype(numbers).itemsize


class Header:
    """`numbers` values in the file `name`, exact up to 2^53.

    Attributes:
        values: what was written last; zeros where nothing was.
        damaged: copies that were not what was written; with both of them the values are lost.
    """

    def __init__(self, pager: FilePager, name: str, numbers: int) -> None:
        file = pager.open(name, _dtype(numbers), (2,), sparse=False)
        self._copies = file.array
        self._words = self._copies.view(np.uint64).reshape(2, numbers + 2)
        self.values, self.damaged, self._turn = _read(self._copies)

    @property
    def found(self) -> bool:
        """Whether there is something to read."""
        return self._turn > 0

    def write(self, values: Sequence[float] | NDArray) -> None:
        """Take `values` in the place of those before."""
        # Several of these come with each insert and each batch, so it is done without numpy's small calls.
        turn, taken = self._turn + 1, np.array(values, np.float64)
        words = [turn, *taken.view(np.uint64).tolist()]
        words.append((word_sum(words) + 1) & _MASK)
        self._words[turn % 2] = words
        self.values[:] = taken
        self._turn = turn

    def file(self) -> NDArray:
        """What stands in the file."""
        return self._copies


def read_header(content: bytes) -> NDArray[np.float64] | None:
    """The values in a header's file; None where there are none, or none that can be read."""
    numbers = len(content) // 16 - 2
    if numbers < 1 or len(content) != header_bytes(numbers):
        return None
    values, _, turn = _read(np.frombuffer(content, _dtype(numbers)))
    return values if turn else None


def _sums(copies: NDArray) -> NDArray[np.uint64]:
    return word_sums(np.ascontiguousarray(copies).view("u8").reshape(len(copies), -1)[:, :-1]) + np.uint64(1)


def _read(copies: NDArray) -> tuple[NDArray[np.float64], int, int]:
    """The newer of the whole copies, how many are damaged, and the turn of that one."""
    empty = np.array([not copy.tobytes().strip(b"\0") for copy in copies])
    whole = (_sums(copies) == copies["sum"]) & (copies["turn"] > 0)
    if not whole.any():
        return np.zeros(copies["values"].shape[1]), 0 if empty.all() else 2, 0
    turns = np.where(whole, copies["turn"], 0)
    newest = int(turns.argmax())
    # After the first write the other copy is still empty, and never again.
    damaged = np.count_nonzero(~whole & ~(empty & (turns.max() == 1)))
    return copies["values"][newest].copy(), int(damaged), int(turns.max())
