"""A reader of a store's files sees what the store would send, or that it is gone; never a mixture."""

import dataclasses
import sys
import threading
import time

import numpy as np
import pytest

from tests.replay.storage.replays import open_replay
from troupe.common import system
from troupe.common.data.arena import Arena, DamagedChunksError
from troupe.common.data.columns import Payload
from troupe.common.data.inserts import Insert
from troupe.common.data.packing import pack_entries, unpack_frame
from troupe.common.data.schema import FieldSpec, Items
from troupe.common.errors import ConfigError
from troupe.services.replay.storage import leases

FRAME = (24, 24)
SPECS = (
    FieldSpec("pong", "uint8", FRAME, before=3, after=2, compress=True),
    FieldSpec("noise", "uint8", FRAME, before=1, compress=True),
    FieldSpec("plain", "float32", FRAME, before=1),
    FieldSpec("action", "int64", ()),
)


def noise(number):
    """The same for the same number, and incompressible."""
    return np.random.default_rng(number).integers(0, 256, FRAME, dtype=np.uint8)


def insert(sequence, steps, lengths):
    """A chunk of numbered steps, with one item at every offset where its length fits."""
    first = 100 * sequence
    obs = np.stack([np.full(FRAME, (first + i) % 256, np.uint8) for i in range(-3, steps + 2)])
    payloads = {
        "pong": Payload(*pack_entries(obs)),
        "noise": Payload(*pack_entries(np.stack([noise(first + i) for i in range(-1, steps)]))),
        "plain": Payload(np.stack([np.full(FRAME, first + i, np.float32) for i in range(-1, steps)])),
        "action": Payload(np.arange(first, first + steps)),
    }
    offsets = [i for i in range(steps) if i + lengths[i % len(lengths)] <= steps]
    sizes = [lengths[i % len(lengths)] for i in offsets]
    items = Items(np.array(offsets, np.int32), np.array(sizes, np.int32), np.ones(len(offsets)))
    return Insert(5, sequence, sequence, SPECS, payloads, steps, 1, {"default": items})


def fill(folder, *, capacity=1000, chunks=5, lengths=(1,)):
    replay = open_replay(folder, capacity, 1 << 22)
    for sequence in range(1, chunks + 1):
        replay.insert(insert(sequence, 8, lengths))
    return replay


def stored(replay):
    """Chunks in the files."""
    return np.count_nonzero(replay.store.commits)


def places(replay, size=64):
    sample = replay.sample({"default": size}, places=True)
    assert not sample.arrays
    return sample.rows, sample.commits, sample.offsets, sample.lengths


@pytest.mark.parametrize("lengths", [(1,), (3,), (1, 4, 2)])
def test_the_files_say_what_the_store_would_send(tmp_path, lengths):
    replay = fill(tmp_path, lengths=lengths)
    rows, commits, offsets, sizes = places(replay)
    found = Arena(tmp_path).gather(rows, commits, offsets, sizes)
    args = rows, offsets.astype(np.int64), sizes.astype(np.int64)
    frames, plain = replay.store.gather(*args), replay.store.gather(*args, plain=True)
    for spec in SPECS:
        sent = frames[spec.name]
        if spec.compress:
            sent = unpack_frame(sent.data, found[spec.name].shape, spec.dtype, entry_bytes=spec.entry_bytes)
        np.testing.assert_array_equal(found[spec.name], sent)
    # What does not compress need not be unpacked, where the windows are equally long.
    assert plain["pong"].ndim == 1
    assert (plain["noise"].ndim == 1) == (len(lengths) > 1)
    if len(lengths) == 1:
        np.testing.assert_array_equal(plain["noise"], found["noise"])
    numbers = found["action"][:, :1] + np.arange(-1, 1)
    np.testing.assert_array_equal(found["plain"][:, :2, 0, 0], numbers)
    for row in range(0, 64, 8):
        np.testing.assert_array_equal(found["noise"][row, 0], noise(numbers[row, 0]))


def test_arrays_come_from_where_they_are_asked_for(tmp_path):
    replay = fill(tmp_path)
    made = []

    def allocate(shape, dtype):
        made.append(np.full(shape, 9, dtype))
        return made[-1]

    found = Arena(tmp_path).gather(*places(replay), allocate)
    assert [id(array) for array in found.values()] == [id(array) for array in made]


def test_a_chunk_that_has_left_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "LEASE_S", -1.0)
    replay = fill(tmp_path, capacity=40)
    arena = Arena(tmp_path)
    old = places(replay)
    assert arena.gather(*old) is not None
    replay.expire_leases()
    for sequence in range(6, 9):
        replay.insert(insert(sequence, 8, (1,)))
    assert arena.gather(*old) is None
    assert arena.gather(*places(replay)) is not None
    # The places of a chunk that took the same row are not its.
    rows, commits, offsets, lengths = places(replay)
    assert arena.gather(rows, commits + np.uint64(1), offsets, lengths) is None


def test_chunks_are_kept_for_readers_for_a_while(tmp_path, monkeypatch):
    """Though their items have left the table; and no longer, and not where there is no room."""
    now_s = [0.0]
    monkeypatch.setattr(system, "monotonic", lambda: now_s[0])
    replay = fill(tmp_path, capacity=40)
    arena = Arena(tmp_path)
    first = places(replay)
    for sequence in range(6, 30):
        replay.insert(insert(sequence, 8, (1,)))
        assert replay.tables["default"].size == 40
    assert arena.gather(*first) is not None
    assert stored(replay) == 5 + 5
    now_s[0] += leases.LEASE_S - 0.1
    replay.expire_leases()
    assert arena.gather(*first) is not None
    second = places(replay)
    now_s[0] += 0.2
    replay.expire_leases()
    assert arena.gather(*first) is None
    assert arena.gather(*second) is not None
    assert stored(replay) == 5
    for sequence in range(30, 400):
        replay.insert(insert(sequence, 8, (1,)))
        places(replay)
    assert arena.gather(*second) is None, "the store is full of chunks that are kept"
    assert arena.gather(*places(replay)) is not None
    assert stored(replay) < 370
    assert (replay.store.references >= 0).all()
    now_s[0] += leases.LEASE_S
    replay.expire_leases()
    assert replay.store.references.sum() == 40
    assert stored(replay) == 5


def test_nonsense_is_an_error_and_nothing_else(tmp_path):
    replay = fill(tmp_path)
    arena = Arena(tmp_path)
    rows, commits, offsets, lengths = places(replay)
    for bad_rows in (rows + (1 << 40), rows - (1 << 20)):
        with pytest.raises(ValueError, match="row"):
            arena.gather(bad_rows, commits, offsets, lengths)
    for bad_lengths in (lengths * 0, lengths * (1 << 30)):
        with pytest.raises(ValueError, match="batch"):
            arena.gather(rows, commits, offsets, bad_lengths)
    with pytest.raises((ValueError, IndexError)):
        arena.gather(rows, commits, offsets + (1 << 30), lengths)


def test_no_files_no_arena(tmp_path):
    with pytest.raises(OSError, match="nothing is stored"):
        Arena(tmp_path)
    replay = fill(tmp_path)
    replay.close()
    (tmp_path / "plain.raw").write_bytes(b"short")
    with pytest.raises(OSError, match="too short"):
        Arena(tmp_path)
    (tmp_path / "signature.json").write_text("{}")
    with pytest.raises(ConfigError, match="damaged"):
        Arena(tmp_path)


def test_a_writer_at_full_speed_never_tears_a_read(tmp_path, monkeypatch):
    """And it would be seen: the same reads without the check do find mixtures."""
    monkeypatch.setattr(leases, "LEASE_S", -1.0)
    replay = fill(tmp_path, capacity=48, chunks=8)
    arena = Arena(tmp_path)
    ready = [insert(sequence, 8, (1,)) for sequence in range(9, 109)]
    lock, stop = threading.Lock(), threading.Event()

    def write():
        sequence = 9
        while not stop.is_set():
            each = dataclasses.replace(ready[sequence % 100], sequence=sequence, oldest=sequence)
            with lock:  # as the shard does it: sampling and inserting take turns, reading does not
                replay.insert(each)
            sequence += 1

    def whole(found):
        number = found["action"][:, 0]
        window = (number[:, None] + np.arange(-3, 3)) % 256
        return (
            np.all(found["pong"] == window[..., None, None])
            and np.array_equal(found["plain"][:, 1, 0, 0], number)
            and np.array_equal(found["plain"][:, 0, -1, -1], number - 1)
        )

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the two meet in the middle of a copy
    thread = threading.Thread(target=write)
    thread.start()
    counts = dict.fromkeys(("whole", "gone", "torn", "seen"), 0)
    deadline, checked = time.monotonic() + 100, False
    try:
        while time.monotonic() < deadline:
            if sum(counts.values()) > 300 and min(counts[k] for k in ("whole", "gone", "seen")) > 0:
                break
            checked = not checked
            with lock:
                asked = places(replay)
                replay.expire_leases()
            with monkeypatch.context() as patch:
                if not checked:
                    patch.setattr(arena, "_all_there", lambda *_: True)
                try:
                    found = arena.gather(*asked)
                except (ValueError, DamagedChunksError):
                    assert not checked
                    counts["seen"] += 1
                    continue
            if found is None:
                counts["gone"] += 1
            elif whole(found):
                counts["whole"] += 1
            else:
                counts["torn" if checked else "seen"] += 1
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(usual)
    assert counts["torn"] == 0
    assert counts["whole"] > 0
    assert counts["gone"] > 0
    assert counts["seen"] > 0
