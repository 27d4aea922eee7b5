"""Files of a folder that were tampered with: one line, and no traceback."""

import json

import numpy as np
import pytest

from common.data.snapshot import MANIFEST_FILE, restore_snapshot
from common.data.store import SIGNATURE_FILE
from common.errors import CheckpointError, ConfigError
from tests.data.replays import open_replay, simple

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "{}", "7", '{"format": 1, "fields": [], "layout": 3}', '{"format": 1, "fields": 5}']
)
def test_a_crafted_signature_is_refused(tmp_path, text):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    replay.close()
    (tmp_path / SIGNATURE_FILE).write_text(text)
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path)


@pytest.mark.parametrize(
    "text", [DEEP, "[]", json.dumps({"format": 1, "files": [3], "items": 0, "layout": {}})]
)
def test_a_crafted_snapshot_is_refused(tmp_path, text):
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / MANIFEST_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="no snapshot that can be read"):
        restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "data")


@pytest.mark.parametrize("name", ["default.items", "default.priorities"])
def test_random_items_are_refused(tmp_path, name):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    replay.close()
    path = tmp_path / name
    path.write_bytes(np.random.default_rng(0).bytes(path.stat().st_size))
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path)
