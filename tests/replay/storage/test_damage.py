"""A shard's files that were lost, cut or changed are told of, and never served as if they were whole."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.replay.storage.replays import check_everything, check_windows, make_insert, open_tables
from troupe.common.data.format import RECORDS_FILE, record_dtype, record_sums
from troupe.common.data.pager import FilePager
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.folder import clear
from troupe.services.replay.storage.header import Header
from troupe.services.replay.storage.records import ITEM, PRIORITY, item_sums

TABLES = (
    TableConfig(capacity=40),
    TableConfig("other", capacity=30, sampler="fifo", limiter="queue", max_times_sampled=1),
)
STEPS = 4
FILES = (
    *("obs.offsets", "obs.lengths", "obs.blocks", "raw.raw", "action.raw", "features.raw"),
    *(f"{field}.sums" for field in ("obs", "raw", "action", "features")),
    *("chunks.records", "chunks.header", "producers"),
    *(f"{table}.{end}" for table in ("default", "other") for end in ("items", "priorities", "header")),
)


def open_again(folder):
    return open_tables(folder, *TABLES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a shard that has been stopped."""
    folder = tmp_path_factory.mktemp("whole")
    replay = open_again(folder)
    for number in range(8):
        table = ("default", "other")[number % 2]
        insert = make_insert(
            number + 1, 10 * number, STEPS, range(STEPS), [1] * STEPS, [1.0] * STEPS, table=table
        )
        assert replay.insert(insert)
    replay.close()
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "shard")


def refused_twice(folder, match):
    """It is refused, and nothing is made anew meanwhile that would be taken for whole the next time."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for _ in range(2):
        with pytest.raises(ConfigError, match=match) as refused:
            open_again(folder)
        assert "\n" not in str(refused.value)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == sizes


def test_what_is_whole_is_served(folder):
    replay = open_again(folder)
    assert replay.restored_items == 32
    replay.close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bytes_left", [None, 0, 7])
def test_a_file_that_is_missing_or_short_is_damage(folder, name, bytes_left):
    path = folder / name
    if bytes_left is None:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(bytes_left)
    refused_twice(folder, rf"damaged: {name} (is missing|has \d+ bytes of at least)")


def test_every_file_of_a_shard_is_looked_at(folder):
    assert {path.name for path in folder.iterdir()} == {*FILES, "lock", "signature.json", "opened.json"}


@pytest.mark.parametrize("also", [(), ("chunks.header", "chunks.records")])
def test_items_without_a_signature_are_damage(folder, also):
    for name in ("signature.json", *also):
        (folder / name).unlink()
    refused_twice(folder, r"damaged: signature\.json is missing")


@pytest.mark.parametrize(("field", "value"), [("offset", STEPS), ("length", STEPS + 1), ("length", 1 << 30)])
def test_an_item_that_reaches_beyond_its_chunk_is_damage(folder, field, value):
    items = np.memmap(folder / "default.items", ITEM, "r+")
    items[field][np.flatnonzero(items["commit"])[3]] = value
    items["sum"] = item_sums(items)
    items.flush()
    refused_twice(folder, "the items of table 'default' are damaged")


@pytest.mark.parametrize(
    "damage", [(0, -1), (1, np.nan), (1, 0.5), (2, np.inf), (5, 1e300), (slice(None), 0)]
)
def test_counters_that_are_none_are_damage(folder, damage):
    """Whoever made the folder: the checksums are right."""
    pager = FilePager(folder)
    header = Header(pager, "default.header", 8)
    values = header.values.copy()
    values[damage[0]] = damage[1]
    header.write(values)
    pager.close()
    refused_twice(folder, "the counters of table 'default' are damaged")


@pytest.mark.parametrize(("lane", "start"), [(0, 1), (1, -1), (2, 1 << 40), (3, 1 << 40)])
def test_a_chunk_that_lies_outside_of_the_files_is_left_out(folder, lane, start):
    """Whoever made the folder: its checksum is right."""
    records = np.memmap(folder / RECORDS_FILE, record_dtype(6), "r+")
    row = np.flatnonzero(records["commit"])[-1]
    records["starts"][row, lane] += start
    records["sum"][row] = record_sums(records[row : row + 1])[0]
    records.flush()
    replay = open_again(folder)
    assert (replay.restored_items, replay.counters.damaged_chunks, replay.damaged_items) == (28, 1, 4)
    check_everything(replay)


@pytest.mark.parametrize("steps", [-STEPS, 1, 1 << 40])
def test_a_chunk_of_other_steps_than_its_fields_is_left_out(folder, steps):
    """Else an item could reach beyond its chunk, and the record would say that it does not."""
    records = np.memmap(folder / RECORDS_FILE, record_dtype(6), "r+")
    row = np.flatnonzero(records["commit"])[-1]
    records["steps"][row] += steps
    records["sum"][row] = record_sums(records[row : row + 1])[0]
    records.flush()
    assert open_again(folder).counters.damaged_chunks == 1


def test_of_two_chunks_in_one_place_the_newer_one_is_served(folder):
    """The page that says that the older one has left was lost with the power."""
    records = np.memmap(folder / RECORDS_FILE, record_dtype(6), "r+")
    records["starts"][2, 2] = records["starts"][1, 2]
    records["sum"][2] = record_sums(records[2:3])[0]
    newer = int(records["commit"][2])
    records.flush()
    replay = open_again(folder)
    assert replay.counters.damaged_chunks == 1
    assert newer in replay.store.commits


PAGES = ("chunks.records", "default.items", "default.priorities", "other.items")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_zeros_is_found_and_the_rest_is_served(folder, name, caplog):
    """As a page is that was never written before the power went."""
    with (folder / name).open("r+b") as file:
        file.write(bytes(256))
    replay = open_again(folder)
    assert 0 < replay.restored_items <= 32
    assert f"{folder} is damaged: " in caplog.text
    assert caplog.text.count("\n") == 1
    while (
        not isinstance(sample := replay.sample({"default": 4}), str) and replay.counters.sampled_items < 200
    ):
        check_windows(sample)
    check_everything(replay)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", ["chunks.header", "default.header"])
def test_a_header_is_there_twice_and_made_anew_without_either(folder, name, copies, caplog):
    size = (folder / name).stat().st_size // 2
    with (folder / name).open("r+b") as file:
        for copy in range(copies):
            file.seek(copy * size + 9)
            file.write(b"\xff\xff")
    replay = open_again(folder)
    assert replay.restored_items == 32
    assert f"{copies} copies of the " in caplog.text
    assert replay.insert(make_insert(9, 80, STEPS, range(STEPS), [1] * STEPS, [1.0] * STEPS))
    check_windows(replay.sample({"default": 30}))
    check_everything(replay)


def test_a_damaged_priority_is_that_of_a_new_item(folder, caplog):
    rated = np.memmap(folder / "default.priorities", PRIORITY, "r+")
    rated["value"][3] = 7.0
    rated.flush()
    replay = open_again(folder)
    assert replay.restored_items == 32
    assert replay.tables["default"].priorities(np.array([3])) == [1.0]
    assert "1 priorities of table 'default'" in caplog.text


def test_a_folder_of_the_format_without_checksums_is_refused(folder):
    content = json.loads((folder / "signature.json").read_text())
    del content["crc32c"]
    (folder / "signature.json").write_text(json.dumps(content | {"format": 1}))
    refused_twice(folder, "has format 1, this version reads 2: start with another --data-dir, or empty with")
    clear(folder, ("default", "other"))
    assert open_again(folder).restored_items == 0


def test_the_signature_is_synced_before_it_has_its_name_and_the_folder_afterwards(tmp_path, monkeypatch):
    """What a power cut leaves of the folder cannot be read without it."""
    done = []
    sync, rename = os.fsync, os.replace

    def note_sync(handle):
        done.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        sync(handle)

    def note_rename(source, target):
        done.append(Path(target).name)
        rename(source, target)

    replay = open_again(tmp_path / "shard")
    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    assert replay.insert(make_insert(1, 0, STEPS, range(STEPS), [1] * STEPS, [1.0] * STEPS))
    assert done == ["signature.json.tmp", "signature.json", "shard"]
