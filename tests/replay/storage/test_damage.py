"""A shard's files that were lost, cut or changed are told of, and never served as if they were whole."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.replay.storage.replays import make_insert, open_tables
from troupe.common.data.format import RECORDS_FILE, record_dtype
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.storage.table import ITEM

TABLES = (
    TableConfig(capacity=40),
    TableConfig("other", capacity=30, sampler="fifo", limiter="queue", max_times_sampled=1),
)
STEPS = 4
FILES = (
    *("obs.offsets", "obs.lengths", "obs.blocks", "raw.raw", "action.raw", "features.raw"),
    *("chunks.records", "chunks.header", "producers", "unstored"),
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
    assert open_again(folder).restored_items == 32


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bytes_left", [None, 0, 7])
def test_a_file_that_is_missing_or_short_is_damage(folder, name, bytes_left):
    path = folder / name
    if bytes_left is None and name == "unstored":
        pytest.skip("older folders have none")
    if bytes_left is None:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(bytes_left)
    refused_twice(folder, rf"damaged: {name} (is missing|has \d+ bytes of at least)")


def test_every_file_of_a_shard_is_looked_at(folder):
    assert {path.name for path in folder.iterdir()} == {*FILES, "lock", "signature.json"}


@pytest.mark.parametrize("also", [(), ("chunks.header", "chunks.records")])
def test_items_without_a_signature_are_damage(folder, also):
    for name in ("signature.json", *also):
        (folder / name).unlink()
    refused_twice(folder, r"damaged: signature\.json is missing")


@pytest.mark.parametrize(("field", "value"), [("offset", STEPS), ("length", STEPS + 1), ("length", 1 << 30)])
def test_an_item_that_reaches_beyond_its_chunk_is_damage(folder, field, value):
    items = np.memmap(folder / "default.items", ITEM, "r+")
    items[field][np.flatnonzero(items["commit"])[3]] = value
    items.flush()
    refused_twice(folder, "the items of table 'default' are damaged")


@pytest.mark.parametrize(
    "damage", [(0, -1), (1, np.nan), (1, 0.5), (2, np.inf), (5, 1e300), (slice(None), 0)]
)
def test_counters_that_are_none_are_damage(folder, damage):
    header = np.memmap(folder / "default.header", "float64", "r+")
    header[damage[0]] = damage[1]
    header.flush()
    refused_twice(folder, "the counters of table 'default' are damaged")


@pytest.mark.parametrize(("lane", "start"), [(0, 1), (1, -1), (2, 1 << 40), (3, 1 << 40)])
def test_a_chunk_that_lies_outside_of_the_files_is_damage(folder, lane, start):
    records = np.memmap(folder / RECORDS_FILE, record_dtype(6), "r+")
    records["starts"][np.flatnonzero(records["commit"])[-1], lane] += start
    records.flush()
    refused_twice(folder, "damaged: chunks overlap, or lie outside of the files")


@pytest.mark.parametrize("steps", [-STEPS, 1, 1 << 40])
def test_a_chunk_of_other_steps_than_its_fields_is_damage(folder, steps):
    """Else an item could reach beyond its chunk, and the record would say that it does not."""
    records = np.memmap(folder / RECORDS_FILE, record_dtype(6), "r+")
    records["steps"][np.flatnonzero(records["commit"])[-1]] += steps
    records.flush()
    refused_twice(folder, "damaged: chunks have other steps than their fields")


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

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    replay = open_again(tmp_path / "shard")
    assert replay.insert(make_insert(1, 0, STEPS, range(STEPS), [1] * STEPS, [1.0] * STEPS))
    assert done == ["signature.json.tmp", "signature.json", "shard"]
