"""Where the entries of one field live: memory-mapped files that are used as rings.

The files are sparse: they are as long as the field could ever need, and take the space that has been written.
Runs (the entries of one chunk) are never split at the end of a ring, so a window of a chunk is one slice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from common.data.fields import FieldSpec
from common.data.packing import join_frame
from common.data.rings import Ring

LZ4_INDEX_BYTES = 12
"""Bytes that a compressed entry takes besides its block: where it starts (int64) and its size (uint32)."""


def map_file(path: Path, dtype: str | np.dtype, shape: tuple[int, ...]) -> np.memmap:
    """Map ``path`` for reading and writing, made or extended (sparse, zeros) to the size of ``shape``."""
    dtype = np.dtype(dtype)
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    with path.open("ab") as file:
        if file.tell() < size_bytes:
            file.truncate(size_bytes)
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


class Payload:
    """One field of one chunk, checked and ready to be written.

    Attributes:
        data: ``[entries, *shape]``, or the blocks of a compressed field end to end.
        lengths: uint32 ``[entries]``, bytes of each block; None if the field is not compressed.
        entries: number of entries.
    """

    __slots__ = ("data", "entries", "lengths")

    def __init__(self, data: NDArray, lengths: NDArray[np.uint32] | None = None) -> None:
        self.data = data
        self.lengths = lengths
        self.entries = len(data) if lengths is None else len(lengths)


class Column(ABC):
    """Storage of one field. Positions are given out by ``rings``, units of ``unit_bytes`` each."""

    rings: list[Ring]
    unit_bytes: list[int]

    def __init__(self, spec: FieldSpec) -> None:
        self.spec = spec

    @abstractmethod
    def counts(self, payload: Payload) -> list[int]:
        """Units that ``payload`` takes in each ring."""

    @abstractmethod
    def write(self, starts: list[int], payload: Payload) -> None:
        """Write ``payload`` at the positions ``starts``, one for each ring."""

    @abstractmethod
    def gather(self, starts: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray:
        """Windows of ``entries [B]`` from ``starts [B]``; short ones repeat their last entry.

        Returns ``[B, max(entries), *shape]``, or uint8 ``[bytes]``, one LZ4 frame that unpacks to it.
        """


class RawColumn(Column):
    """Entries as they are, one after the other."""

    def __init__(self, spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int) -> None:
        super().__init__(spec)
        entry_bytes = max(spec.entry_bytes, 1)
        most = max(min(budget_bytes // entry_bytes, most_entries), 1)
        self.rings = [Ring(most)]
        self.unit_bytes = [entry_bytes]
        self._data: NDArray = map_file(folder / f"{spec.name}.raw", spec.dtype, (most, *spec.shape)).view(
            np.ndarray
        )

    def counts(self, payload: Payload) -> list[int]:
        """See `Column`."""
        return [payload.entries]

    def write(self, starts: list[int], payload: Payload) -> None:
        """See `Column`."""
        self._data[starts[0] : starts[0] + payload.entries] = payload.data

    def gather(self, starts: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray:
        """See `Column`."""
        longest = int(entries.max())
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
    """Entries as LZ4 blocks end to end in a ring of bytes, and a ring that says where each one is."""

    def __init__(self, spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int) -> None:
        super().__init__(spec)
        entries = max(min(budget_bytes // LZ4_INDEX_BYTES, most_entries), 1)
        budget_bytes = min(budget_bytes, entries * (spec.entry_bytes + 4))
        self.rings = [Ring(entries), Ring(budget_bytes)]
        self.unit_bytes = [LZ4_INDEX_BYTES, 1]
        self._offsets: NDArray[np.int64] = map_file(
            folder / f"{spec.name}.offsets", "int64", (entries,)
        ).view(np.ndarray)
        self._lengths: NDArray[np.uint32] = map_file(
            folder / f"{spec.name}.lengths", "uint32", (entries,)
        ).view(np.ndarray)
        self._blocks: NDArray[np.uint8] = map_file(
            folder / f"{spec.name}.blocks", "uint8", (budget_bytes,)
        ).view(np.ndarray)
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

    def gather(self, starts: NDArray[np.int64], entries: NDArray[np.int64]) -> NDArray:
        """See `Column`."""
        longest = int(entries.max())
        last = starts + entries - 1
        begins = self._offsets[starts].tolist()
        last_begins = self._offsets[last]
        ends = last_begins + self._lengths[last]
        view = self._bytes
        if int(entries.min()) == longest:
            parts = [view[b:e] for b, e in zip(begins, ends.tolist(), strict=True)]
        else:
            parts = []
            for b, lb, e, n in zip(
                begins, last_begins.tolist(), ends.tolist(), entries.tolist(), strict=True
            ):
                parts.append(view[b:e])
                parts.extend([view[lb:e]] * (longest - n))
        entry_bytes = self.spec.entry_bytes
        frame = join_frame(parts, entry_bytes, entry_bytes * longest * len(starts))
        return np.frombuffer(frame, np.uint8)


def make_column(spec: FieldSpec, folder: Path, budget_bytes: int, most_entries: int) -> Column:
    """The storage that fits ``spec``: files in ``folder`` for ``most_entries`` or up to ``budget_bytes``."""
    return (Lz4Column if spec.compress else RawColumn)(spec, folder, budget_bytes, most_entries)
