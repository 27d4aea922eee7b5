import lz4.block
import lz4.frame
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.common.data.packing import (
    Packer,
    PackingError,
    check_blocks,
    join_frame,
    pack_entries,
    store_entries,
    unpack_frame,
)


def frames(count, rng, noisy):
    data = np.zeros((count, 84, 84), np.uint8)
    data[:, 10:20, 5:9] = rng.integers(0, 255, (count, 1, 1))
    data[noisy] = rng.integers(0, 256, data[noisy].shape)
    return data


@given(st.integers(1, 30), st.integers(0, 2**32), st.lists(st.integers(0, 29), max_size=5))
@settings(max_examples=40, deadline=None)
def test_any_selection_of_blocks_is_a_frame(count, seed, noisy):
    rng = np.random.default_rng(seed)
    data = frames(count, rng, [n for n in noisy if n < count])
    blocks, lengths = pack_entries(data)
    check_blocks(blocks, lengths, 84 * 84)
    ends = np.cumsum(lengths)
    chosen = rng.integers(0, count, 10)
    parts = [blocks[ends[i] - lengths[i] : ends[i]].data for i in chosen]
    frame = join_frame(parts, 84 * 84, 84 * 84 * 10)
    assert np.array_equal(unpack_frame(frame, (10, 84, 84), "uint8"), data[chosen])
    assert lz4.frame.decompress(frame) == data[chosen].tobytes(), "not a standard LZ4 frame"


def test_damage_is_an_error():
    rng = np.random.default_rng(0)
    data = frames(5, rng, [1])
    blocks, _ = pack_entries(data)
    frame = join_frame([blocks.data], 84 * 84, data.nbytes)
    assert np.array_equal(unpack_frame(frame, data.shape, "uint8"), data)
    for bad in (
        frame[:-1],
        frame[: len(frame) // 2],
        b"",
        frame[:20] + b"\xff" * 100 + frame[120:],
        frame + b"xx",
    ):
        with pytest.raises(PackingError):
            unpack_frame(bad, data.shape, "uint8")
    for frames_of in (memoryview(frame), memoryview(bytearray(frame)), np.frombuffer(frame, np.uint8).data):
        assert np.array_equal(unpack_frame(frames_of, data.shape, "uint8"), data)
    with pytest.raises(PackingError):
        unpack_frame(frame, (6, 84, 84), "uint8")
    with pytest.raises(PackingError):
        unpack_frame(frame, (4, 84, 84), "uint8")


def test_every_block_holds_an_entry_and_no_other_frame_is_unpacked():
    data = frames(4, np.random.default_rng(0), [1])
    blocks, lengths = pack_entries(data)
    ends = np.cumsum(lengths)
    whole, size = data.nbytes, 84 * 84
    frame = join_frame([blocks.data], size, whole)
    # A header that names a larger size than any block has.
    options = {"source_size": whole, "block_size": lz4.frame.BLOCKSIZE_MAX4MB, "block_linked": False}
    header = lz4.frame.compress_begin(lz4.frame.create_compression_context(), **options)
    assert header != frame[: len(header)]
    larger = header + frame[len(header) :]
    assert np.array_equal(unpack_frame(larger, data.shape, "uint8"), data)
    # As many bytes in all, but not of one entry each.
    halves, _ = pack_entries(data.reshape(8, -1))
    double = lz4.block.compress(data[:2].tobytes(), store_size=False)
    wrong = [
        join_frame([halves.data], size, whole),
        join_frame([len(double).to_bytes(4, "little"), double, blocks[ends[1] :].data], size, whole),
        join_frame([blocks.data, blocks[: ends[0]].data], size, whole),  # one too many
        join_frame([blocks[: ends[2]].data], size, whole),
        lz4.frame.compress(data.tobytes(), block_linked=False),  # its blocks are larger than entries
        lz4.frame.compress(data.tobytes(), block_linked=True),
        lz4.frame.compress(data.tobytes(), block_linked=False, block_checksum=True),
        lz4.frame.compress(data.tobytes(), block_linked=False, store_size=False),
    ]
    unmarked = bytearray(frame)
    unmarked[15 + int(ends[0]) + 3] = 0  # the entry that stands uncompressed is said to be compressed
    for bad in [*wrong, bytes(unmarked)]:
        with pytest.raises(PackingError):
            unpack_frame(bad, data.shape, "uint8")


def test_blocks_are_checked():
    blocks, lengths = pack_entries(frames(5, np.random.default_rng(0), [1]))
    with pytest.raises(PackingError):
        check_blocks(blocks[:-1], lengths, 84 * 84)
    with pytest.raises(PackingError):
        check_blocks(blocks, (lengths + np.array([1, -1, 0, 0, 0])).astype(np.uint32), 84 * 84)
    with pytest.raises(PackingError):
        check_blocks(blocks, lengths, 84 * 85)
    with pytest.raises(PackingError):
        check_blocks(blocks, np.zeros(5, np.uint32), 84 * 84)


@given(st.binary(max_size=300), st.lists(st.integers(0, 2**32 - 1), max_size=8))
@settings(max_examples=100, deadline=None)
def test_garbage_blocks_only_ever_raise_packing_errors(data, lengths):
    with pytest.raises(PackingError):
        check_blocks(np.frombuffer(data, np.uint8), np.array(lengths, np.uint32), 7056)


def test_large_entries():
    data = np.zeros((2, 700, 1000, 3), np.uint8)
    blocks, _ = pack_entries(data)
    frame = join_frame([blocks.data], data[0].nbytes, data.nbytes)
    assert np.array_equal(unpack_frame(frame, data.shape, "uint8"), data)
    with pytest.raises(PackingError):
        pack_entries(np.zeros((1, 3000, 3000), np.uint8))


def test_what_does_not_shrink_is_not_tried_for_ever():
    rng = np.random.default_rng(0)
    noise, quiet = frames(10, rng, range(10)), frames(10, rng, [])
    packer = Packer()
    for _ in range(21):
        blocks, lengths = packer.pack(noise)
        check_blocks(blocks, lengths, 84 * 84)
        assert blocks.tobytes() == pack_entries(noise)[0].tobytes()
    assert packer.tried == 10 + 20, "one of each chunk but the first"
    assert len(packer.pack(quiet)[0]) < quiet.nbytes // 10, "found out at once"
    packer.pack(noise)
    # A chunk with one that shrinks, wherever it is, gets all the effort again before long.
    mixed = frames(10, rng, range(1, 10))
    assert packer.pack(mixed)[0].nbytes == store_entries(mixed)[0].nbytes
    for _ in range(10):
        size = packer.pack(mixed)[0].nbytes
    assert size == pack_entries(mixed)[0].nbytes < store_entries(mixed)[0].nbytes


def test_a_packer_counts_what_it_packs_and_what_that_takes():
    packer = Packer()
    sizes = [packer.pack(frames(10, np.random.default_rng(0), noisy))[0].nbytes for noisy in (range(10), [])]
    assert (packer.entry_bytes, packer.block_bytes) == (20 * 84 * 84, sum(sizes))
    assert packer.seconds > 0


@given(st.integers(1, 5), st.sampled_from([(3,), (2, 5), ()]), st.sampled_from(["uint8", "float32", "int64"]))
@settings(max_examples=20, deadline=None)
def test_stored_entries_are_blocks(count, shape, dtype):
    data = np.random.default_rng(count).integers(0, 100, (count, *shape)).astype(dtype)
    blocks, lengths = store_entries(data)
    check_blocks(blocks, lengths, data[0].nbytes)
    frame = join_frame([blocks.data], data[0].nbytes, data.nbytes)
    assert np.array_equal(unpack_frame(frame, data.shape, dtype), data)
