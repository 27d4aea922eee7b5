"""Files of a folder that were tampered with: one line, and no traceback."""

import json
import os

import numpy as np
import pytest

from tests.replay.storage.replays import check_everything, open_replay, simple
from troupe.common.data.format import SIGNATURE_FILE, _content_sum
from troupe.common.errors import CheckpointError, ConfigError
from troupe.services.replay.storage.snapshot import MANIFEST_FILE, restore_snapshot

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "{}", "7", '{"format": 2, "fields": [], "layout": 3}', '{"format": 2, "fields": 5}']
)
def test_a_crafted_signature_is_refused(tmp_path, text):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    replay.close()
    (tmp_path / SIGNATURE_FILE).write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [{"name": "../../x"}, {"name": "x/y"}, {"shape": [2**31 - 1, 2**31 - 1]}, {"dtype": "O"}, {"dtype": 7}],
)
def test_a_field_of_a_signature_is_one_that_the_wire_would_take(tmp_path, changes):
    """A name is part of a file's: it made files outside of the folder."""
    replay = open_replay(tmp_path / "a" / "data")
    replay.insert(simple(1, 0, 4))
    replay.close()
    path = tmp_path / "a" / "data" / SIGNATURE_FILE
    content = json.loads(path.read_text())
    field = content["fields"][0]
    entries = content["layout"]["entries"]
    entries[changes.get("name", field["name"])] = entries.pop(field["name"])
    content |= {"fields": [field | changes, *content["fields"][1:]]}
    del content["crc32c"]
    path.write_text(json.dumps(content | {"crc32c": _content_sum(content)}))
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path / "a" / "data")
    assert [each.name for each in tmp_path.rglob("*") if each.parent != path.parent] == ["a", "data"]


def test_a_signature_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / SIGNATURE_FILE)
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path)


@pytest.mark.parametrize(
    "text", [DEEP, "[]", json.dumps({"format": 2, "files": [3], "items": 0, "layout": {}})]
)
def test_a_crafted_snapshot_is_refused(tmp_path, text):
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="no snapshot that can be read"):
        restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "data")


@pytest.mark.parametrize("name", ["default.items", "default.priorities"])
def test_random_items_are_left_out(tmp_path, name):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    replay.close()
    path = tmp_path / name
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    replay = open_replay(tmp_path)
    table = replay.tables["default"]
    assert (table.size, table.damage.items) == ((0, 50) if name == "default.items" else (4, 0))
    assert table.damage.priorities == table.size
    check_everything(replay)
