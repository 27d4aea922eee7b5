"""Checksums of what stands in replay's files: a flipped bit or a torn page is found before it is used.

Two kinds, each as cheap as what it guards can be read:

* Bytes in a row (compressed blocks, frames) have *running sums*: the CRC-32C of a chunk's bytes up to the
  end of each entry. A window is right if the sum before it goes on to the sum after it: one call, however
  many entries there are, in hardware.
* Numbers (records, items, short entries) have the sum of their words, each times an odd number of its own,
  mod 2^64. numpy adds up thousands at once, and no single flipped bit leaves the sum as it is (multilinear
  hashing: Lemire and Kaser, 2014).

Both depend on the commit of the chunk, which is never used twice: what a page had before it was written
again, with sums that were right at the time, does not pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import mul

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

MAX_WORDS = 64
"""Words that are summed at most; for what is longer there are running sums."""


def _splitmix64(number: int) -> int:
    """The `number`-th output of this generator (Steele et al., 2014), begun with 0."""
    z = number * 0x9E3779B97F4A7C15 % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


KEYS: NDArray[np.uint64] = np.array([_splitmix64(i + 1) | 1 for i in range(MAX_WORDS)], np.uint64)
"""What each word is multiplied by."""
_KEY_NUMBERS: list[int] = KEYS.tolist()
_COMMIT_KEY, _FIELD_KEY = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_HALF, _MASK = np.uint64(32), 2**64 - 1


def word_sums(words: NDArray[np.unsignedinteger]) -> NDArray[np.uint64]:
    """The sum of each row of `words [n, k]`, k at most `MAX_WORDS`."""
    if words.shape[1] == 1:
        return np.multiply(words[:, 0], KEYS[0], dtype=np.uint64)
    return np.multiply(words, KEYS[: words.shape[1]], dtype=np.uint64).sum(axis=1, dtype=np.uint64)


def word_sum(words: Sequence[int]) -> int:
    """The sum of one row of words. A few are added up faster without numpy."""
    return sum(map(mul, words, _KEY_NUMBERS)) & _MASK


def upper_half(sums: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """32 bits of each sum that change with every bit of what was added up."""
    return (sums >> _HALF).astype(np.uint32)


def commit_sums(commits: NDArray[np.uint64], field: int) -> NDArray[np.uint64]:
    """A number for one field (by its place) of each chunk of `commits [n]`."""
    mixed = (commits + np.uint64((1 + field) * _FIELD_KEY & _MASK)) * np.uint64(_COMMIT_KEY)
    return (mixed ^ (mixed >> _HALF)) * np.uint64(_FIELD_KEY)


def commit_sum(commit: int, field: int) -> int:
    """The same of one chunk."""
    mixed = (commit + (1 + field) * _FIELD_KEY) * _COMMIT_KEY & _MASK
    return (mixed ^ mixed >> 32) * _FIELD_KEY & _MASK


def running_sums(data: memoryview, ends: Iterable[int], seal: int) -> list[int]:
    """The CRC-32C of `data`, flat bytes, up to each of `ends`, which ascend, each XOR `seal`."""
    value, begin, sums, crc = 0, 0, [], crc32c
    for end in ends:
        value = crc(data[begin:end], value)
        sums.append(value ^ seal)
        begin = end
    return sums


def text_sum(text: bytes) -> int:
    """The CRC-32C of a whole text."""
    return int(crc32c(text))


def as_words(array: NDArray, entry_bytes: int) -> NDArray[np.unsignedinteger]:
    """Entries `[n, ...]` of `entry_bytes` each as words `[n, k]`, as wide as they divide into."""
    width = min(entry_bytes & -entry_bytes, 8)  # the largest power of two that divides it
    flat = np.ascontiguousarray(array).reshape(-1).view(f"u{width}")
    return flat.reshape(-1, entry_bytes // width)


def summed_by_words(entry_bytes: int) -> bool:
    """Whether entries of this size are summed by their words: those for which a call each is too dear."""
    return 0 < entry_bytes <= MAX_WORDS
