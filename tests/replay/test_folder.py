"""A volatile shard empties its folder, and only its folder."""

import fcntl
import subprocess
import sys

import numpy as np
import pytest

from troupe.common.data.columns import Payload
from troupe.common.data.inserts import Insert
from troupe.common.data.schema import FieldSpec, Items
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.common.wire.replay.files import SharedFiles
from troupe.services.replay.folder import clear
from troupe.services.replay.options import parse_serve
from troupe.services.replay.shard import open_replay
from troupe.services.replay.storage.replay import Replay


def fill(folder):
    """A closed shard with one item."""
    replay = Replay(folder, [TableConfig(capacity=10)], budget_bytes=1 << 22)
    one = np.ones(1)
    items = {"default": Items(np.zeros(1, np.int32), np.ones(1, np.int32), one)}
    replay.insert(
        Insert(
            1,
            1,
            1,
            (FieldSpec("action", "int64", ()),),
            {"action": Payload(np.ones(1, np.int64))},
            1,
            0,
            items,
        )
    )
    SharedFiles(folder)
    replay.close()


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_everything_of_a_shard_goes(tmp_path):
    folder = tmp_path / "shard"
    fill(folder)
    assert {"action.raw", "signature.json", "default.items"} <= names(folder)
    (folder / "lost+found").mkdir()
    clear(folder)
    assert names(folder) == {"lock", "lost+found"}
    clear(folder)
    clear(tmp_path / "absent")


def test_a_folder_with_files_of_others_is_refused_and_stays_as_it_is(tmp_path):
    fill(tmp_path / "shard")
    (tmp_path / "shard" / "thesis.tex").write_text("years of work")
    before = names(tmp_path / "shard")
    with pytest.raises(ConfigError, match=r"did not write \(thesis.tex\): choose another --data-dir"):
        clear(tmp_path / "shard")
    assert names(tmp_path / "shard") == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="thesis"):
        clear(tmp_path / "home")
    assert names(tmp_path / "home") == {"thesis.tex"}


def test_a_folder_in_use_is_left_alone(tmp_path):
    fill(tmp_path)
    before = names(tmp_path)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="in use by another replay process"):
            clear(tmp_path)
    assert names(tmp_path) == before


def test_fields_that_were_not_noted_yet_are_no_obstacle(tmp_path):
    """The shard died in its first insert, before it wrote the signature."""
    fill(tmp_path)
    (tmp_path / "signature.json").unlink()
    clear(tmp_path)
    assert names(tmp_path) == {"lock", "action.raw", "action.sums"}
    fill(tmp_path)


NOTES = """
import os, sys
from pathlib import Path
from troupe.services.replay.storage.opened import Opened

os.fsync = lambda file: os.kill(os.getpid(), 9)
Opened(Path(sys.argv[1])).write("process")
"""


def test_a_note_that_a_killed_shard_was_writing_is_no_obstacle(tmp_path):
    fill(tmp_path)
    (tmp_path / "opened.json").unlink()
    killed = subprocess.run([sys.executable, "-c", NOTES, tmp_path], check=False)
    assert killed.returncode == -9
    assert any(name.endswith(".tmp") for name in names(tmp_path))
    clear(tmp_path)
    assert names(tmp_path) == {"lock"}


def ids_of(folder):
    """The ids in a closed shard with one item."""
    replay = Replay(folder, [TableConfig(capacity=10)], budget_bytes=1 << 22)
    ids = replay.sample({"default": 1}).ids
    replay.close()
    return ids


def test_ids_of_an_emptied_folder_do_not_come_again(tmp_path):
    """Priorities for items of a volatile shard that has died may still be on their way to the next one."""
    fill(tmp_path)
    old = ids_of(tmp_path)
    assert np.array_equal(old, ids_of(tmp_path)), "a restart keeps them"
    assert int(old[0]) < 2**53, "exact as float64"
    clear(tmp_path)
    fill(tmp_path)
    replay = Replay(tmp_path, [TableConfig(capacity=10)], budget_bytes=1 << 22)
    replay.update("default", old, np.array([9.0]))
    assert replay.counters.unknown_priorities == 1
    replay.update("default", replay.sample({"default": 1}).ids, np.array([9.0]))
    assert replay.counters.updated_priorities == 1
    new = replay.sample({"default": 1}).ids
    assert (int(new[0]) - int(old[0])) % 10 == 0, "the same slot, so only the id can tell"
    replay.close()


def test_a_limit_that_cannot_be_raised_is_told(tmp_path, caplog):
    fill(tmp_path)  # made for 4 MiB
    words = ["--data-dir", str(tmp_path), "--table", "default:capacity=10"]
    for limit, told in ((1 << 21, False), (1 << 22, False), (None, False), (1 << 23, True)):
        caplog.clear()
        options, _ = parse_serve([*words, *(["--max-bytes", str(limit)] if limit else [])])
        replay = open_replay(options)
        assert replay.budget_bytes == min(limit or 1 << 22, 1 << 22)
        replay.close()
        assert any("keeps that size" in record.getMessage() for record in caplog.records) == told
