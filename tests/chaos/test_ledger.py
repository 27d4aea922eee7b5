"""The ledger and its audit on a small shard: they find what was taken away, and nothing else."""

import json
import subprocess
import sys

import numpy as np
import pytest

from tests.chaos.ledger import audit
from tests.harness import Context, until
from tests.replay import processes
from tests.replay.ports import free_port
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security

ENOUGH = 60
"""Acknowledged inserts before the shard is killed, and as many again after it."""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A shard's folder and the ledger's journal, after a kill and an end in order."""
    keys, path = tmp_path_factory.mktemp("keys"), tmp_path_factory.mktemp("shard")
    make_keys(keys)
    endpoint, journal = f"tcp://127.0.0.1:{free_port()}", path / "journal"
    words = ("--keys", str(keys), "--table", "default:capacity=100000")
    replay = processes.start(path / "data", endpoint, *words)
    context = Context()
    # The first chunk says which fields there are: the ledger asks for them.
    security = Security(keys=load_keys(keys, "actor"))
    actor = ReplayClient(endpoint, ctx=context, name="actor", security=security)
    processes.insert(actor, 0)
    assert actor.flush(60)
    actor.close(0)
    context.destroy(linger=0)
    settings = {
        "endpoint": endpoint,
        "server_key": (keys / "replay.public").read_text().strip(),
        "secret_key": (keys / "actor.secret").read_text().strip(),
        "journal": str(journal),
        "period_s": 0.01,
    }
    command = [sys.executable, "-P", "-m", "tests.chaos.ledger", json.dumps(settings)]
    ledger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def acknowledged():
        return len(journal.read_text().splitlines()) - 1 if journal.exists() else 0

    try:
        until(lambda: acknowledged() >= ENOUGH, 60)
        processes.kill(replay)
        replay = processes.start(path / "data", endpoint, *words)
        until(lambda: acknowledged() >= 2 * ENOUGH, 60)
        ledger.terminate()
        told = json.loads(ledger.communicate(timeout=120)[0])
    finally:
        ledger.kill()
        assert processes.stop(replay) == 0
    assert told["acknowledged"] == acknowledged()
    return path / "data", journal


def test_finds_nothing_wrong_after_a_kill(written):
    found = audit(*written, removes=False)
    assert found.acknowledged >= 2 * ENOUGH
    assert not found.lost
    assert not found.doubled
    assert not found.changed
    assert found.rows == found.acknowledged + 1
    assert (found.gone, found.gaps) == (0, 0)


def test_names_a_chunk_that_is_gone_and_one_that_is_another(written, tmp_path):
    folder, journal = written
    copy = tmp_path / "data"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    text = journal.read_text()
    never = int(text.split()[-1]) + 7
    (tmp_path / "journal").write_text(f"{text}{never}\n")
    stored = np.memmap(copy / "obs.raw", np.uint8, "r+")
    stored[: 2 * 256 * 13] += 1
    stored.flush()
    found = audit(copy, tmp_path / "journal", removes=True)
    assert found.lost == [never]
    assert found.changed


def test_refuses_records_that_it_would_misread(written, tmp_path):
    folder, journal = written
    copy = tmp_path / "data"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    records = copy / "chunks.records"
    data = bytearray(records.read_bytes())
    data[40] ^= 1
    records.write_bytes(data)
    with pytest.raises(AssertionError, match="1 records do not match"):
        audit(copy, journal, removes=False)
