"""No learner sees a flipped bit: whichever it is, the item has left, or the shard has refused to start."""

import os
import shutil

import numpy as np
import pytest

from tests.harness import CHAOS
from tests.replay.storage.replays import check_everything, check_windows, make_insert, open_tables
from troupe.common.data.arena import Arena, DamagedChunksError
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.storage.producers import _PRODUCER

TABLES = (
    TableConfig(capacity=40),
    TableConfig("queue", capacity=40, sampler="fifo", limiter="queue", max_times_sampled=1),
)
CHUNKS, STEPS, ENTRIES = 8, 10, 15
FLIPS = 1000 if CHAOS else 40
USED = {"producers": _PRODUCER.itemsize - 16}  # but for the time, which says only who is forgotten first


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder in which every byte of what is used means something."""
    folder = tmp_path_factory.mktemp("whole")
    replay = open_tables(folder, *TABLES)
    for number in range(CHUNKS):
        table = ("default", "queue")[number % 2]
        every = range(STEPS)
        insert = make_insert(number + 1, 100 * number, STEPS, every, [1] * STEPS, [1.5] * STEPS, table=table)
        assert replay.insert(insert)
    used = {name: array.nbytes for name, array in replay.store.lane_files().items()}
    used |= {name: array.nbytes for name, array in replay.small_files().items()} | USED
    used["chunks.records"] = replay.store.records_in_use().nbytes
    used["signature.json"] = (folder / "signature.json").stat().st_size
    replay.close()
    return folder, used


def flips(used):
    """Places of single bits: one file after the other, anywhere in what is used of it."""
    rng = np.random.default_rng(int(os.environ.get("TROUPE_FLIPS_SEED", "0")))
    names = sorted(used)
    return [(names[i % len(names)], int(rng.integers(8 * used[names[i % len(names)]]))) for i in range(FLIPS)]


def flip(folder, name, bit):
    with (folder / name).open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def found(replay):
    """How much damage has been found."""
    tables = replay.tables.values()
    small = sum(table.damage.priorities + table.damage.header for table in tables)
    count = replay.counters.damaged_chunks + replay.damaged_items + small
    return count + replay.store.header_damaged + replay._producers.damaged


def serve_everything(replay):
    """Look at every item of both tables, as learners do; no window is wrong."""
    for name, size, tries in (("default", 40, 15), ("queue", 2, 25)):
        for _ in range(tries):
            sample = replay.sample({name: size})
            if isinstance(sample, str):
                break
            check_windows(sample)
            assert set((sample.arrays["action"][:, 0] // 100 % 2).tolist()) == {0 if name == "default" else 1}
    check_everything(replay)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("running", [False, True])
def test_every_flipped_bit_is_found_before_it_is_served(whole, tmp_path, running):
    folder, used = whole
    at_start = {"signature.json", "chunks.header", "default.header", "queue.header", "producers"}
    at_start |= {"default.priorities", "queue.priorities"}
    for name, bit in flips(used):
        place = shutil.copytree(folder, tmp_path / "shard")
        if running and name not in at_start:  # those of a running shard are in its memory
            replay = open_tables(place, *TABLES)
            flip(place, name, bit)
        else:
            flip(place, name, bit)
            try:
                replay = open_tables(place, *TABLES)
            except ConfigError:
                assert name == "signature.json", (name, bit)
                shutil.rmtree(place)
                continue
        serve_everything(replay)
        for row in range(CHUNKS):
            replay.check(row)
        if name == "obs.lengths" and not replay.store.commits[bit // 32 // ENTRIES]:
            found_or_gone = True  # no window ends there, and all of the queue's chunk were handed out right
        else:
            found_or_gone = bool(found(replay))
        assert found_or_gone, (name, bit)
        replay.close()
        shutil.rmtree(place)


def test_a_reader_of_the_files_finds_what_the_shard_finds(whole, tmp_path):
    folder, used = whole
    for name, bit in flips(
        {n: size for n, size in used.items() if n.split(".")[0] in ("obs", "raw", "chunks")}
    ):
        if name == "chunks.header":
            continue
        place = shutil.copytree(folder, tmp_path / "shard")
        replay = open_tables(place, *TABLES)
        arena = Arena(place)
        sample = replay.draw({"default": 30}, places=True)
        flip(place, name, bit)
        rows = np.unique(sample.rows)
        wrong = rows[replay.store.damaged_chunks(rows)].tolist()
        where = sample.rows, sample.commits, sample.offsets, sample.lengths
        gone = not np.array_equal(replay.store.commits[sample.rows], sample.commits)
        if wrong and not gone:
            with pytest.raises(DamagedChunksError) as damaged:
                arena.gather(*where)
            assert damaged.value.rows == wrong
        else:  # a flipped commit looks to the reader as if the chunk had left
            assert (arena.gather(*where) is None) == gone
        replay.close()
        shutil.rmtree(place)
