"""Where the entries of one field live: memory-mapped files, each a lane along which chunks have their runs.

The files are sparse: they are as long as the field could ever need, and take the space that has been written.
The run of a chunk (its entries) is never split, so a window of a chunk is one slice.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from troupe.common.data.packing import join_frame
from troupe.common.data.schema import FieldSpec
from troupe.common.errors import ConfigError

LZ4_INDEX_BYTES = 12
"""Bytes that a compressed entry takes apart from its block: where it starts (int64) and its size (uint32)."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says where the disk, or what one may use of it, is full."""


class DiskFullError(ConfigError):
    """There is no room on the disk for a file. Nothing was lost, and it may be tried again."""


def file_error(what: str, error: OSError) -> ConfigError:
    """The error for people that `error` is, where it prevented `what`."""
    if error.errno in FULL:
        return DiskFullError(f"the disk is full: {what}")
    return ConfigError(f"{what}: {error.strerror}")


def damaged(folder: Path, what: str) -> ConfigError:
    """The error for files that no process of this program leaves, whenever it is killed."""
    return ConfigError(
        f"{folder} is damaged: {what}; restore a snapshot into another --data-dir, or start empty with "
        "--volatile"
    )


class MappedFile:
    """A file of equal units that is mapped for reading and writing, made or extended with zeros.

    Attributes:
        name: of the file, in its folder.
        array: `[units, *shape]`.
    """

    def __init__(
        self,
        path: Path,
        dtype: str | np.dtype,
        shape: tuple[int, ...],
        *,
        sparse: bool = True,
        read_only: bool = False,
    ) -> None:
        """Map `path`. Unless it is `sparse`, its room on the disk is taken at once.

        `read_only` maps what another process has made, without changing it; raises OSError if it cannot.
        """
        dtype = np.dtype(dtype)
        self.name = path.name
        self._unit_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        if read_only:
            if path.stat().st_size < shape[0] * self._unit_bytes:
                raise OSError(errno.EINVAL, "the file is too short", str(path))
            self.array: NDArray = np.memmap(path, dtype=dtype, mode="r", shape=shape).view(np.ndarray)
            return
        try:
            self._file = path.open("r+b" if path.exists() else "w+b")
            if os.fstat(self._file.fileno()).st_size < shape[0] * self._unit_bytes:
                # A sparse file: address space now, blocks on the disk when `reserve` takes them.
                self._file.truncate(shape[0] * self._unit_bytes)
            if not sparse:
                self.reserve(0, shape[0])
        except OSError as error:
            raise file_error(f"cannot make {path}", error) from None
        self.array = np.memmap(self._file, dtype=dtype, mode="r+", shape=shape).view(np.ndarray)
        if not sparse:
            # The mapping outlives the descriptor, which only `reserve` of a sparse file needs again.
            self._file.close()

    def reserve(self, start: int, end: int) -> None:
        """Take room on the disk for the units `[start, end)`; raises OSError where there is none.

        Writing to a mapped file whose disk is full kills the process, so nothing is written before this.
        """
        if end > start:
            size_bytes = (end - start) * self._unit_bytes
            # Real blocks, not only a length: `ftruncate` leaves holes, and writing to a hole of a full disk
            # is SIGBUS.
            os.posix_fallocate(self._file.fileno(), start * self._unit_bytes, size_bytes)

    def close(self) -> None:
        """Close the file. The mapping stays for as long as somebody uses it."""
        self._file.close()


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

    def __init__(self, spec: FieldSpec) -> None:
        self.spec = spec

    @abstractmethod
    def counts(self, payload: Payload) -> list[int]:
        """Units that `payload` takes in each lane."""

    @abstractmethod
    def write(self, starts: list[int], payload: Payload) -> None:
        """Write `payload` at the positions `starts`, one for each lane."""

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
        self, spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int, read_only: bool = False
    ) -> None:
        super().__init__(spec)
        entry_bytes = max(spec.entry_bytes, 1)
        most = max(min(budget_bytes // entry_bytes, most_entries), 1)
        file = MappedFile(folder / f"{spec.name}.raw", spec.dtype, (most, *spec.shape), read_only=read_only)
        self.lanes = [Lane(most, entry_bytes, [file])]
        self._data = file.array

    def counts(self, payload: Payload) -> list[int]:
        """See `Column`."""
        return [payload.entries]

    def write(self, starts: list[int], payload: Payload) -> None:
        """See `Column`."""
        self._data[starts[0] : starts[0] + payload.entries] = payload.data

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
        self, spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int, read_only: bool = False
    ) -> None:
        super().__init__(spec)
        entries = max(min(budget_bytes // LZ4_INDEX_BYTES, most_entries), 1)
        # No entry takes more than itself and the four bytes of its size.
        budget_bytes = min(budget_bytes, entries * (spec.entry_bytes + 4))
        offsets, lengths, blocks = (
            MappedFile(folder / f"{spec.name}.{end}", dtype, (units,), read_only=read_only)
            for end, dtype, units in (
                ("offsets", "int64", entries),
                ("lengths", "uint32", entries),
                ("blocks", "uint8", budget_bytes),
            )
        )
        self.lanes = [Lane(entries, LZ4_INDEX_BYTES, [offsets, lengths]), Lane(budget_bytes, 1, [blocks])]
        self._offsets, self._lengths, self._blocks = offsets.array, lengths.array, blocks.array
        # A memoryview: slicing it copies nothing, and is faster than slicing an array.
        self._bytes = self._blocks.data

    def counts(self, payload: Payload) -> list[int]:
        """See `Column`."""
        return [payload.entries, payload.data.nbytes]

    def write(self, starts: list[int], payload: Payload) -> None:
        """See `Column`."""
        assert payload.lengths is not None
        entry, byte = starts
        ends = np.cumsum(payload.lengths, dtype=np.int64)
        self._offsets[entry : entry + payload.entries] = byte + ends - payload.lengths
        self._lengths[entry : entry + payload.entries] = payload.lengths
        self._blocks[byte : byte + payload.data.nbytes] = payload.data

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


def column_files(spec: FieldSpec) -> list[dict[str, int]]:
    """The files of `spec` by lane, as `make_column` maps them: the bytes of a unit, by name."""
    if spec.compress:
        return [{f"{spec.name}.offsets": 8, f"{spec.name}.lengths": 4}, {f"{spec.name}.blocks": 1}]
    return [{f"{spec.name}.raw": spec.entry_bytes}]


def make_column(
    spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int, read_only: bool = False
) -> Column:
    """The storage that fits `spec`: files in `folder` for `most_entries` or up to `budget_bytes`."""
    return (Lz4Column if spec.compress else RawColumn)(spec, folder, budget_bytes, most_entries, read_only)
