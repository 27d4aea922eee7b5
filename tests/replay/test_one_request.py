"""No single request ends a shard, whatever it asks for."""

import resource
from pathlib import Path

import numpy as np
import pytest

from tests.replay.strangers import kinds
from troupe.common.data.schema import Chunk


@pytest.mark.parametrize(
    "fields",
    [
        [["x", [], [], 0, 0, "raw"]],
        [["x", {}, [], 0, 0, "raw"]],
        [["x", "float64", [], 0, 0, []]],
        [[[], "float64", [], 0, 0, "raw"]],
        [["x", "float64", [[]], 0, 0, "raw"]],
        [["x", "float64", [], None, 0, "raw"]],
        [["x/../y", "float64", [], 0, 0, "raw"]],
        [[]],
        [5],
        {},
    ],
)
def test_fields_that_are_none_are_refused_before_they_are_used(server, stranger, fields):
    peer = stranger(server("--table", "default:capacity=100"))
    assert kinds(peer.insert(1, fields=fields)) == ("ERROR", 1, "bad_field")
    assert kinds(peer.insert(1)) == ("INSERTED", 1)
    assert server.process.poll() is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a\0b", "bad_field"), ("a\nb", "bad_field"), ("x" * 300, "snapshot")],
)
def test_a_snapshot_with_an_impossible_name_is_refused(server, stranger, tmp_path, name, kind):
    peer = stranger(server("--table", "default:capacity=100"))
    assert kinds(peer.insert(1)) == ("INSERTED", 1)
    answer = peer.ask("SNAPSHOT", 4, {"destination": f"{tmp_path}/{name}", "token": "t"})
    assert kinds(answer) == ("ERROR", 4, kind)
    assert kinds(peer.insert(2)) == ("INSERTED", 2)
    assert server.process.poll() is None


def test_a_batch_for_which_memory_does_not_suffice_is_refused_and_the_shard_goes_on(server, client):
    endpoint = server("--table", "default:capacity=100")
    writer = client(endpoint, map_files=False)
    item = np.zeros(1, np.int32)
    chunk = Chunk({"wide": np.ones((1, 1 << 14))}, 1, item, np.ones(1, np.int32), np.ones(1))  # 128 KiB
    while not writer.insert(chunk):
        writer.poll(20)
    assert writer.flush(60)
    pid = server.process.pid
    in_use = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    unlimited = resource.prlimit(pid, resource.RLIMIT_AS, (in_use + (1 << 27), resource.RLIM_INFINITY))
    assert writer.receive(0) is None
    number = writer.request_sample(4096)  # 512 MiB
    reader_waits = 0
    while "memory" not in writer.wait_reason:
        assert writer.receive(0.05) is None
        reader_waits += 1
        assert reader_waits < 1000
    assert server.process.poll() is None
    resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
    batch = writer.receive(60)  # it was asked for again
    assert batch.request_id == number
    assert len(batch.ids) == 4096
    assert writer.status(60)["rejected"]["memory"] >= 1
