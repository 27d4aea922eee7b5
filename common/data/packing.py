"""Compression of single entries in a form that a whole batch of them is one standard LZ4 frame.

Every entry becomes one *data block* of the LZ4 frame format: four little-endian bytes with the size of the
block (the top bit set where the entry would not shrink and stands uncompressed), then the block. Blocks do
not refer to each other, so any selection of entries, end to end, between a frame header and an end mark, is a
valid LZ4 frame: replay stores blocks, cuts windows out of them with plain copies, and a reader decompresses a
batch of thousands of entries in one call that does not hold Python's interpreter lock.

That call is Blosc's, whose chunks are the same blocks behind another header: bindings of LZ4 itself copy what
they have unpacked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

import blosc
import lz4.block
import lz4.frame
import numpy as np
from numpy.typing import NDArray

from troupe.common import system

Buffer: TypeAlias = bytes | memoryview

STORED = np.uint32(1 << 31)
"""Top bit of a block's size: the block stands uncompressed."""

END_MARK = b"\0\0\0\0"

MAX_ENTRY_BYTES = 4 << 20
"""Largest entry that one block can hold (the largest block size of the LZ4 frame format)."""

_BLOCK_SIZES = (
    (64 << 10, lz4.frame.BLOCKSIZE_MAX64KB),
    (256 << 10, lz4.frame.BLOCKSIZE_MAX256KB),
    (1 << 20, lz4.frame.BLOCKSIZE_MAX1MB),
    (4 << 20, lz4.frame.BLOCKSIZE_MAX4MB),
)


_size_at = struct.Struct("<I").unpack_from

_BLOSC_HEADER = struct.Struct("<4B3i")
_BLOSC_LZ4 = (2, 1, 0x30, 1)
"""Versions of the format and of LZ4 in it, a stream of LZ4 for each block, and no filter."""
_BLOSC_MAX_BYTES = (1 << 31) - 1

blosc.set_nthreads(1)  # whoever wants more unpacks several batches at a time
blosc.set_releasegil(True)


class PackingError(ValueError):
    """Blocks that are not what they are said to be."""


def pack_entries(array: NDArray) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """Compress each `array[i]` to one block; returns the blocks end to end and the bytes of each."""
    array = np.ascontiguousarray(array)
    count = array.shape[0]
    entry_bytes = array[0].nbytes if count else 0
    if entry_bytes > MAX_ENTRY_BYTES:
        raise PackingError(f"an entry of {entry_bytes} bytes is more than a block holds ({MAX_ENTRY_BYTES})")
    flat = array.reshape(-1).view(np.uint8).data
    parts: list[bytes | memoryview] = []
    lengths = np.empty(count, np.uint32)
    compress = lz4.block.compress
    for i in range(count):
        raw = flat[i * entry_bytes : (i + 1) * entry_bytes]
        # Without lz4's own four bytes of size: the frame format has the size of the block in their place.
        block: bytes | memoryview = compress(raw, store_size=False)
        size = len(block)
        # The frame format allows no block that is larger than what it unpacks to; it is marked as stored
        # instead.
        if size >= entry_bytes:
            block, size = raw, entry_bytes | int(STORED)
        parts.append(size.to_bytes(4, "little"))
        parts.append(block)
        lengths[i] = 4 + len(block)
    return np.frombuffer(b"".join(parts), np.uint8), lengths


def store_entries(array: NDArray) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
    """The same as `pack_entries`, but every entry stands uncompressed."""
    count, entry_bytes = len(array), array[0].nbytes
    blocks = np.empty((count, 4 + entry_bytes), np.uint8)
    blocks[:, :4].view("<u4")[:] = entry_bytes | int(STORED)
    blocks[:, 4:] = np.ascontiguousarray(array).reshape(count, -1).view(np.uint8)
    return blocks.reshape(-1), np.full(count, 4 + entry_bytes, np.uint32)


class Packer:
    """`pack_entries` for the chunks of a field in turn, without trying for ever what does not shrink.

    Once no entry of a chunk has shrunk, one of each further chunk is tried, until one shrinks again.

    Attributes:
        tried: entries that it has tried to compress.
        entry_bytes: of all entries.
        block_bytes: of what they were packed to.
        seconds: that this took.
    """

    def __init__(self) -> None:
        self.tried = 0
        self.entry_bytes = 0
        self.block_bytes = 0
        self.seconds = 0.0
        self._hopeless = False

    def pack(self, array: NDArray) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """Blocks of the entries of the next chunk, as `pack_entries` returns them."""
        began_s = system.perf_counter()
        blocks, lengths = self._pack(array)
        self.seconds += system.perf_counter() - began_s
        self.entry_bytes += array.nbytes
        self.block_bytes += blocks.nbytes
        return blocks, lengths

    def _pack(self, array: NDArray) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        if self._hopeless:
            probe = array[self.tried % len(array)]  # another one every time
            self.tried += 1
            if len(lz4.block.compress(np.ascontiguousarray(probe), store_size=False)) >= probe.nbytes:
                return store_entries(array)
        blocks, lengths = pack_entries(array)
        self.tried += len(array)
        # Noise does not shrink, and trying takes as long as compressing: one probe per chunk finds out when
        # that ends.
        self._hopeless = bool(np.all(lengths == 4 + array[0].nbytes))
        return blocks, lengths


def check_blocks(blocks: NDArray[np.uint8], lengths: NDArray[np.uint32], entry_bytes: int) -> None:
    """Raise PackingError unless `blocks` are `len(lengths)` blocks that unpack to `entry_bytes` each.

    The sizes are checked against the blocks one by one, what they unpack to as a whole.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    if not len(ends) or int(ends[-1]) != blocks.nbytes or int(lengths.min()) < 4:
        raise PackingError("the lengths of the blocks do not add up")
    starts = ends - lengths
    bytes4 = blocks[starts[:, None] + np.arange(4)]
    sizes = np.ascontiguousarray(bytes4).view("<u4")[:, 0]
    stored = (sizes & STORED) != 0
    sizes = sizes & ~STORED
    if np.any(sizes + np.uint32(4) != lengths) or np.any(stored & (sizes != entry_bytes)):
        raise PackingError("a block has another size than the lengths say")
    # Really unpacked: a block that lies about its contents would otherwise end a learner's batch, long after
    # its sender has gone.
    _unpack_blocks(blocks.data, np.empty((len(lengths), entry_bytes), np.uint8))


# The header depends on the two sizes alone, which are the same for every batch of a run.
@lru_cache(maxsize=64)
def frame_header(entry_bytes: int, total_bytes: int) -> bytes:
    """The header of a frame of independent blocks, `entry_bytes` each and `total_bytes` in all."""
    block_size = next((code for most, code in _BLOCK_SIZES if entry_bytes <= most), None)
    if block_size is None:
        raise PackingError(f"an entry of {entry_bytes} bytes is more than a block holds ({MAX_ENTRY_BYTES})")
    context = lz4.frame.create_compression_context()
    return bytes(
        lz4.frame.compress_begin(
            context,
            source_size=total_bytes,
            block_size=block_size,
            # Independent blocks: windows are cut from anywhere, in any order.
            block_linked=False,
            # No checksums: they would have to be computed anew for every batch that is put together.
            content_checksum=False,
            block_checksum=False,
        )
    )


def join_frame(parts: Iterable[bytes | memoryview], entry_bytes: int, total_bytes: int) -> bytes:
    """Put blocks between a header and the end mark."""
    return b"".join([frame_header(entry_bytes, total_bytes), *parts, END_MARK])


def unpack(parts: Iterable[NDArray[np.uint8]], shape: tuple[int, ...], dtype: str) -> NDArray:
    """Unpack blocks end to end to an array `shape` whose first axis counts entries."""
    entry_bytes = int(np.prod(shape[1:], dtype=np.int64) * np.dtype(dtype).itemsize)
    views = [np.ascontiguousarray(part).data for part in parts]
    return unpack_frame(join_frame(views, entry_bytes, entry_bytes * shape[0]), shape, dtype)


def unpack_frame(
    frame: Buffer,
    shape: tuple[int, ...],
    dtype: str,
    out: NDArray | None = None,
    *,
    entry_bytes: int | None = None,
) -> NDArray:
    """Unpack one whole frame; raises PackingError if it does not fill `shape` exactly.

    Args:
        frame: as `join_frame` makes it.
        shape: of the array.
        dtype: of the array.
        out: the array to write to, contiguous and of that shape and type; by default a new one.
        entry_bytes: of each entry; by default `shape[0]` says how many entries there are.
    """
    array = np.empty(shape, dtype) if out is None else out
    if not array.nbytes:
        return array
    entries = array.reshape(-1).view(np.uint8).reshape(-1, entry_bytes or array.nbytes // shape[0])
    header = frame_header(entries.shape[1], array.nbytes)
    blocks, given = memoryview(frame)[len(header) : -len(END_MARK)], bytes(frame[: len(header)])
    # All but the largest block size, which anybody may choose, and the header's checksum, which covers it.
    if given[:5] != header[:5] or given[6:-1] != header[6:-1] or frame[-len(END_MARK) :] != END_MARK:
        raise PackingError(f"no LZ4 frame of independent blocks that unpack to {array.nbytes} bytes")
    _unpack_blocks(blocks, entries)
    return array


def _unpack_blocks(blocks: memoryview, entries: NDArray[np.uint8]) -> None:
    """Unpack `blocks`, end to end, to `entries [N, bytes]`; raises PackingError if they do not fill them."""
    count, entry_bytes = entries.shape
    index_bytes = _BLOSC_HEADER.size + 4 * count
    if index_bytes + len(blocks) > _BLOSC_MAX_BYTES:
        raise PackingError(f"{len(blocks)} bytes are more than can be unpacked at once")
    starts, stored = _find_blocks(blocks, count, entry_bytes)
    header = _BLOSC_HEADER.pack(*_BLOSC_LZ4, entries.nbytes, entry_bytes, index_bytes + len(blocks))
    index = np.array(starts, "<i4") + np.int32(index_bytes)
    chunk = bytearray().join((header, index.data, blocks))
    for start in stored:
        chunk[index_bytes + start + 3] = 0  # Blosc knows such a block by its size, and has no bit for it
    try:
        blosc.decompress_ptr(chunk, entries.ctypes.data)
    except blosc.blosc_extension.error as error:
        raise PackingError(f"blocks that do not unpack to {entry_bytes} bytes each: {error}") from None


def _find_blocks(blocks: memoryview, count: int, entry_bytes: int) -> tuple[list[int], list[int]]:
    """Where each of `count` blocks begins, and where those that stand uncompressed do."""
    starts, stored, at = [], [], 0
    as_stored = entry_bytes | int(STORED)
    try:
        for _ in range(count):
            starts.append(at)
            (size,) = _size_at(blocks, at)
            if size >= entry_bytes:
                if size != as_stored:
                    raise PackingError(f"a block that does not unpack to {entry_bytes} bytes")
                stored.append(at)
                size = entry_bytes
            at += 4 + size
    except struct.error:
        raise PackingError(f"fewer than {count} blocks") from None
    if at != len(blocks):
        raise PackingError(f"{len(blocks)} bytes of blocks, expected {at}")
    return starts, stored
