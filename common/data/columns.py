"""Where the entries of one field live: memory-mapped files, each a lane along which chunks have their runs.

The files are sparse: they are as long as the field could ever need, and take the space that has been written.
The run of a chunk (its entries) is never split, so a window of a chunk is one slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from troupe.common.data import sums
from troupe.common.data.format import record_sums
from troupe.common.data.packing import join_frame
from troupe.common.data.pager import MappedFile, Pager
from troupe.common.data.schema import FieldSpec
from troupe.common.errors import ConfigError

SUM_BYTES = 4
"""Bytes of the checksum of an entry."""

LZ4_INDEX_BYTES = 12 + SUM_BYTES
"""Bytes of a compressed entry beside its block: where it starts (int64), its size (uint32), its checksum."""


def damaged(folder: Path, what: str) -> ConfigError:
    """The error for files that no process of this program leaves, whenever it is killed."""
    return ConfigError(
        f"{folder} is damaged: {what}; restore a snapshot into another --data-dir, or start empty with "
        "--volatile"
    )


class Payload:
    """One field of one chunk, checked and ready to be written.

    Attributes:
        data: `[entries, *shape]`, or the blocks of a compressed field end to end.
        lengths: uint32 `[entries]`, bytes of each block; None if the field is not compressed.
        entries: number of entries.
    """

    __slots__ = ("data", "entries", "lengths")

    def __init__(self, data: NDArray, lengths: NDArray[np.uint32] | None = None) -> None:
        self.data = data
        self.lengths = lengths
        self.entries = len(data) if lengths is None else len(lengths)


@dataclass(frozen=True)
class Lane:
    """Units along which chunks have their runs: at most `most`, `unit_bytes` each, in `files`."""

    most: int
    unit_bytes: int
    files: list[MappedFile]


class Column(ABC):
    """Storage of one field, in `lanes`. Who gives out positions is not its business."""

    lanes: list[Lane]

    def __init__(self, spec: FieldSpec, number: int) -> None:
        """Hold the field `spec`, the one of this `number` in its chunk."""
        self.spec = spec
        self.number = number

    @abstractmethod
    def counts(self, payload: Payload) -> list[int]:
        """Units that `payload` takes in each lane."""

    @abstractmethod
    def write(self, starts: list[int], payload: Payload, commit: int) -> None:
        """Write `payload`, of the chunk `commit`, at the positions `starts`, one for each lane."""

    @abstractmethod
    def wrong(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        commits: NDArray[np.uint64],
        first: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Which windows are not what was written: `entries [B]` from `starts [B]` of `commits [B]`.

        `first` says which of them begin with the first entry of their chunk.
        """

    @abstractmethod
    def is_wrong_chunk(self, start: int, count: int, commit: int) -> bool:
        """Whether any of the `count` entries of the chunk `commit` is not what was written."""

    def _seal(self, commit: int) -> int:
        """What is mixed into all checksums of the chunk `commit` here."""
        return sums.commit_sum(commit, self.number) >> 32

    def _seals(self, commits: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """The same of chunks `commits [B]`."""
        return sums.upper_half(sums.commit_sums(commits, self.number))

    @abstractmethod
    def gather(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        *,
        plain: bool = False,
        out: NDArray | None = None,
    ) -> NDArray:
        """Windows of `entries [B]` from `starts [B]`; short ones repeat their last entry.

        Returns `[B, max(entries), *shape]`, written to `out` if that is given; or, of a compressed field,
        uint8 `[bytes]`, one LZ4 frame that unpacks to it. With `plain`, entries that did not compress
        come as an array all the same, where the whole batch is made of such.
        """


class RawColumn(Column):
    """Entries as they are, one after the other."""

    def __init__(
        self, spec: FieldSpec, number: int, pager: Pager, budget_bytes: int, max_entries: int
    ) -> None:
        super().__init__(spec, number)
        unit_bytes = spec.entry_bytes + SUM_BYTES
        most = max(min(budget_bytes // unit_bytes, max_entries), 1)
        data = pager.open(f"{spec.name}.raw", spec.dtype, (most, *spec.shape))
        seals = pager.open(f"{spec.name}.sums", "uint32", (most,))
        self.lanes = [Lane(most, unit_bytes, [data, seals])]
        self._data, self._sums = data.array, seals.array
        self._entry_bytes = spec.entry_bytes
        self._by_words = sums.summed_by_words(self._entry_bytes)
        self._bytes = self._data.reshape(-1).view(np.uint8).data
        self._words = sums.as_words(self._data, self._entry_bytes) if self._by_words else None

    def counts(self, payload: Payload) -> list[int]:
        """See `Column`."""
        return [payload.entries]

    def write(self, starts: list[int], payload: Payload, commit: int) -> None:
        """See `Column`."""
        place = slice(starts[0], starts[0] + payload.entries)
        if self._by_words:
            seal = np.uint64(sums.commit_sum(commit, self.number))
            words = sums.word_sums(sums.as_words(payload.data, self._entry_bytes))
            self._sums[place] = sums.upper_half(words + seal)
        else:
            data = np.ascontiguousarray(payload.data).reshape(-1).view(np.uint8).data
            self._sums[place] = self._running_sums(data, payload.entries, commit)
        self._data[place] = payload.data

    def wrong(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        commits: NDArray[np.uint64],
        first: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """See `Column`."""
        if self._by_words:
            longest = int(entries.max())
            if longest == 1:
                return self._word_sums(self._data[starts], commits) != self._sums[starts]
            places = (starts[:, None] + np.minimum(np.arange(longest), entries[:, None] - 1)).reshape(-1)
            found = self._word_sums(self._data[places], np.repeat(commits, longest))
            unequal = (found != self._sums[places]).reshape(len(starts), longest)
            return np.logical_or.reduce(unequal, axis=1)
        size = self._entry_bytes
        begins, ends = starts * size, (starts + entries) * size
        return _wrong_runs(
            self._bytes, begins, ends, self._sums, starts, entries, self._seals(commits), first
        )

    def is_wrong_chunk(self, start: int, count: int, commit: int) -> bool:
        """See `Column`."""
        end, size = start + count, self._entry_bytes
        stored = self._sums[start:end]
        if self._words is None:
            return (
                self._running_sums(self._bytes[start * size : end * size], count, commit) != stored.tolist()
            )
        seal = np.uint64(sums.commit_sum(commit, self.number))
        found = sums.upper_half(sums.word_sums(self._words[start:end]) + seal)
        return found.tobytes() != stored.tobytes()

    def _running_sums(self, data: memoryview, count: int, commit: int) -> list[int]:
        size = self._entry_bytes
        ends = range(size, size * (count + 1), size) if size else [0] * count
        return sums.running_sums(data, ends, self._seal(commit))

    def _word_sums(self, data: NDArray, commits: NDArray[np.uint64]) -> NDArray[np.uint32]:
        words = sums.word_sums(sums.as_words(data, self._entry_bytes))
        return sums.upper_half(words + sums.commit_sums(commits, self.number))

    def gather(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        *,
        plain: bool = False,
        out: NDArray | None = None,
    ) -> NDArray:
        """See `Column`."""
        longest = int(entries.max())
        if out is not None:
            places = starts[:, None] + np.minimum(np.arange(longest), entries[:, None] - 1)
            # Any other mode than "clip" goes through a buffer, at half the speed.
            flat = out.reshape(len(starts) * longest, *self.spec.shape)
            np.take(self._data, places.reshape(-1), axis=0, out=flat, mode="clip")
            return out
        # The commonest window: one entry needs no table of places.
        if longest == 1:
            return self._data[starts][:, None]
        if int(entries.min()) == longest:
            # Overlapping windows as one view: numpy then copies whole windows, not single entries.
            data = self._data
            windows = as_strided(
                data,
                (len(data) - longest + 1, longest, *data.shape[1:]),
                (data.strides[0], *data.strides),
                writeable=False,
            )
            return windows[starts]
        steps = np.minimum(np.arange(longest), entries[:, None] - 1)
        return self._data[starts[:, None] + steps]


class Lz4Column(Column):
    """Entries as LZ4 blocks end to end in a lane of bytes, and a lane that says where each one is."""

    def __init__(
        self, spec: FieldSpec, number: int, pager: Pager, budget_bytes: int, max_entries: int
    ) -> None:
        super().__init__(spec, number)
        entries = max(min(budget_bytes // LZ4_INDEX_BYTES, max_entries), 1)
        # No entry takes more than itself and the four bytes of its size.
        budget_bytes = min(budget_bytes, entries * (spec.entry_bytes + 4))
        offsets, lengths, seals, blocks = (
            pager.open(f"{spec.name}.{end}", dtype, (units,))
            for end, dtype, units in (
                ("offsets", "int64", entries),
                ("lengths", "uint32", entries),
                ("sums", "uint32", entries),
                ("blocks", "uint8", budget_bytes),
            )
        )
        index = Lane(entries, LZ4_INDEX_BYTES, [offsets, lengths, seals])
        self.lanes = [index, Lane(budget_bytes, 1, [blocks])]
        self._offsets, self._lengths, self._blocks = offsets.array, lengths.array, blocks.array
        self._sums = seals.array
        self._bytes = self._blocks.data

    def counts(self, payload: Payload) -> list[int]:
        """See `Column`."""
        return [payload.entries, payload.data.nbytes]

    def write(self, starts: list[int], payload: Payload, commit: int) -> None:
        """See `Column`."""
        assert payload.lengths is not None
        entry, byte = starts
        place = slice(entry, entry + payload.entries)
        ends = np.cumsum(payload.lengths, dtype=np.int64)
        data = np.ascontiguousarray(payload.data).data
        self._sums[place] = sums.running_sums(data, ends.tolist(), self._seal(commit))
        self._offsets[place] = byte + ends - payload.lengths
        self._lengths[place] = payload.lengths
        self._blocks[byte : byte + payload.data.nbytes] = payload.data

    def wrong(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        commits: NDArray[np.uint64],
        first: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """See `Column`. What the index says is right where the bytes that it leads to are."""
        last = np.minimum(starts + entries, len(self._offsets)) - 1
        begins, ends = self._offsets[starts], self._offsets[last] + self._lengths[last]
        sizes = ends - begins
        impossible = (
            (begins < 0)
            | (ends > len(self._blocks))
            | (sizes < 0)
            | (sizes > entries * (self.spec.entry_bytes + 4))
        )
        begins[impossible] = ends[impossible] = 0
        found = _wrong_runs(
            self._bytes, begins, ends, self._sums, starts, entries, self._seals(commits), first
        )
        return found | impossible

    def is_wrong_chunk(self, start: int, count: int, commit: int) -> bool:
        """See `Column`."""
        place = slice(start, start + count)
        begins = self._offsets[place]
        ends = begins + self._lengths[place]
        first, end = int(begins[0]), int(ends[-1])
        if not 0 <= first <= end <= len(self._blocks) or begins[1:].tobytes() != ends[:-1].tobytes():
            return True
        found = sums.running_sums(self._bytes[first:end], (ends - first).tolist(), self._seal(commit))
        return found != self._sums[place].tolist()

    def gather(
        self,
        starts: NDArray[np.int64],
        entries: NDArray[np.int64],
        *,
        plain: bool = False,
        out: NDArray | None = None,
    ) -> NDArray:
        """See `Column`."""
        longest = int(entries.max())
        last = np.minimum(starts + entries, len(self._offsets)) - 1  # whatever a reader may have been told
        # Entries of a chunk lie end to end, so a window is one slice of bytes, from its first block to the
        # end of its last.
        first_begins = self._offsets[starts]
        last_begins = self._offsets[last]
        ends = last_begins + self._lengths[last]
        uniform = int(entries.min()) == longest
        block_bytes = self.spec.entry_bytes + 4
        # All blocks have the largest size there is, so none has shrunk: there is nothing to unpack.
        if plain and uniform and np.all(ends - first_begins == longest * block_bytes):
            return self._gather_stored(first_begins, longest, out)
        view = self._bytes
        if uniform:
            parts = [view[b:e] for b, e in zip(first_begins.tolist(), ends.tolist(), strict=True)]
        else:
            parts = []
            for b, lb, e, n in zip(
                first_begins.tolist(), last_begins.tolist(), ends.tolist(), entries.tolist(), strict=True
            ):
                parts.append(view[b:e])
                # Windows have one length in an array; blocks are independent, so the last one can simply
                # stand there again.
                parts.extend([view[lb:e]] * (longest - n))
        entry_bytes = self.spec.entry_bytes
        frame = join_frame(parts, entry_bytes, entry_bytes * longest * len(starts))
        return np.frombuffer(frame, np.uint8)

    def _gather_stored(self, begins: NDArray[np.int64], window: int, out: NDArray | None) -> NDArray:
        """Windows of entries that all stand uncompressed: every block is four bytes and the entry."""
        spec, size = self.spec, self.spec.entry_bytes
        if out is None:
            out = np.empty((len(begins), window, *spec.shape), spec.dtype)
        rows = out.reshape(-1).view(np.uint8).reshape(len(begins), window, size)
        blocks = self._blocks
        for row, begin in zip(rows, begins.tolist(), strict=True):
            end = begin + window * (size + 4)
            row[...] = blocks[begin:end].reshape(window, size + 4)[:, 4:]
        return out


def _wrong_runs(
    data: memoryview,
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    seals: NDArray[np.uint32],
    starts: NDArray[np.int64],
    entries: NDArray[np.int64],
    keys: NDArray[np.uint32],
    first: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Which bytes `[begins, ends)` of windows `[B]` do not lead from one running sum to the next.

    `starts` and `entries` are the windows' places in `seals`, and `keys` what is mixed into these.
    """
    before = np.where(first, np.uint32(0), seals[starts - 1] ^ keys)
    after = seals[np.minimum(starts + entries, len(seals)) - 1] ^ keys
    crc = sums.crc32c  # by itself: the calls are most of the cost of small windows
    windows = zip(begins.tolist(), ends.tolist(), before.tolist(), strict=True)
    found = [crc(data[begin:end], so_far) for begin, end, so_far in windows]
    return np.array(found, np.uint32) != after


def damaged_chunks(columns: Iterable[Column], records: NDArray) -> NDArray[np.bool_]:
    """Which chunks do not match their checksums, by their `records [n]` or by any entry of `columns`."""
    found: NDArray[np.bool_] = record_sums(records) != records["sum"]
    lanes, lane = [], 1  # the first is the records themselves
    for column in columns:
        lanes.append((column, lane, column.lanes[0].most))
        lane += len(column.lanes)
    # One by one, for there are few at a time, and arrays of a few numbers cost more than the numbers.
    for i in np.flatnonzero(~found).tolist():
        starts, counts = records["starts"][i].tolist(), records["counts"][i].tolist()
        commit = int(records["commit"][i])
        for column, lane, most in lanes:
            start, count = starts[lane], counts[lane]
            placed = 0 <= start <= most - count and count > 0
            if not placed or column.is_wrong_chunk(start, count, commit):
                found[i] = True
                break
    return found


def column_files(spec: FieldSpec) -> list[dict[str, int]]:
    """The files of `spec` by lane, as `make_column` maps them: the bytes of a unit, by name."""
    seals = {f"{spec.name}.sums": SUM_BYTES}
    if spec.compress:
        return [{f"{spec.name}.offsets": 8, f"{spec.name}.lengths": 4, **seals}, {f"{spec.name}.blocks": 1}]
    return [{f"{spec.name}.raw": spec.entry_bytes, **seals}]


def make_column(spec: FieldSpec, number: int, pager: Pager, budget_bytes: int, max_entries: int) -> Column:
    """The storage that fits the field `spec` of this `number`: for `max_entries`, or fewer bytes."""
    return (Lz4Column if spec.compress else RawColumn)(spec, number, pager, budget_bytes, max_entries)
