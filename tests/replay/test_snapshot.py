"""Snapshots of a running shard, from the client and from the command line."""

import contextlib
import subprocess
import sys

import pytest

from common.data.inserts import RefusedError
from common.data.replay import Replay
from common.data.table_config import TableConfig
from common.errors import ConfigError
from services.replay.snapshots import Snapshots
from tests.data.test_replay import BUDGET, simple
from tests.replay import processes

RUN = [sys.executable, "-m", "services.replay"]


def test_a_run_moves_with_its_snapshot(server, client, tmp_path):
    endpoint = server("--capacity", "500")
    one = client(endpoint)
    one.status(120)
    with pytest.raises(ConfigError, match="nothing"):
        one.snapshot(str(tmp_path / "early"), 60)
    for number in range(30):
        processes.insert(one, number)
    assert one.flush(60)
    progress = one.snapshot(str(tmp_path / "first"), 120)
    assert progress["state"] == "done"
    assert progress["items"] == 300
    for number in range(30, 40):
        processes.insert(one, number)
    assert one.flush(60)
    words = [*RUN, "--snapshot", endpoint, str(tmp_path / "second")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "400 items" in done.stdout
    assert str(tmp_path / "second") in done.stdout
    words = [*RUN, "--snapshot", endpoint, "nosuch://bucket/path"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "Protocol not known: nosuch" in refused.stderr
    # What is there is not overwritten, nor taken for what is asked for, the last one included.
    for name in ("first", "second"):
        again = subprocess.run(
            [*RUN, "--snapshot", endpoint, str(tmp_path / name)], capture_output=True, text=True, timeout=120
        )
        assert again.returncode == 2
        assert (again.stdout, again.stderr.count("\n")) == ("", 1)
        assert "there already" in again.stderr

    words = ["--bind", f"ipc://{tmp_path}/c", "--restore", str(tmp_path / "second"), "--data-dir"]
    words = [*RUN, *words, str(tmp_path / "small"), "--capacity", "400"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "was made for the capacities" in refused.stderr
    assert not (tmp_path / "small").exists()

    elsewhere = server(
        "--capacity",
        "500",
        "--restore",
        str(tmp_path / "second"),
        endpoint=f"ipc://{tmp_path}/other",
        folder="b",
    )
    other = client(elsewhere)
    status = other.status(120)
    assert status["restored_items"] == 400
    for _ in range(10):
        processes.check(other.sample(64, timeout_s=60))
    processes.insert(other, 40)
    assert other.flush(60)
    assert other.status(60)["tables"]["default"]["items"] == 410
    # The command of a restart may be that of the start.
    assert processes.stop(server.process) == 0
    options = ("--capacity", "500", "--restore", str(tmp_path / "second"))
    other = client(server(*options, endpoint=f"ipc://{tmp_path}/again", folder="b"))
    assert other.status(120)["tables"]["default"]["items"] == 410
    # A folder with items is not written over.
    words = [
        *RUN,
        "--bind",
        f"ipc://{tmp_path}/c",
        "--data-dir",
        str(tmp_path / "data"),
        "--restore",
        "first",
    ]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "not empty" in refused.stderr


def test_a_request_that_is_sent_again_means_the_same_snapshot(tmp_path):
    with contextlib.closing(
        Replay(tmp_path / "data", [TableConfig(capacity=100)], budget_bytes=BUDGET)
    ) as replay:
        replay.insert(simple(1, 0, 5))
        snapshots = Snapshots(replay)
        one, other = str(tmp_path / "one"), str(tmp_path / "other")
        assert snapshots.request(one, "a")["destination"] == one
        snapshots._snapshot.join(60)
        done = snapshots.request(one, "a")
        assert (done["state"], done["items"]) == ("done", 5)
        assert snapshots.request("") == done
        for token in ("b", ""):
            with pytest.raises(RefusedError, match="there already"):
                snapshots.request(one, token)
        snapshots._snapshot.progress.state = "running"
        assert snapshots.request(one, "a")["state"] == "running"
        for place in (one, other):
            with pytest.raises(RefusedError, match="on its way"):
                snapshots.request(place, "b")
        snapshots._snapshot.progress.state = "failed"
        assert snapshots.request(one, "a")["state"] == "failed", "not begun again under the client's feet"
        assert snapshots.request(other, "b")["destination"] == other
        snapshots.close()


def test_snapshots_may_be_restricted(server, client, tmp_path):
    endpoint = server("--snapshot-to", str(tmp_path / "good"))
    one = client(endpoint)
    one.status(120)
    processes.insert(one, 0)
    assert one.flush(60)
    for place in (str(tmp_path / "bad"), str(tmp_path / "good" / ".." / "bad"), str(tmp_path / "goodish")):
        with pytest.raises(ConfigError, match="only below"):
            one.snapshot(place, 60)
    assert one.snapshot(str(tmp_path / "good" / "one"), 60)["items"] == 10
    with pytest.raises(ConfigError):
        one.snapshot("good/two", 60)


def test_the_place_for_snapshots_is_what_it_leads_to(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def permits(permitted, destination):
        try:
            Snapshots(None, permitted)._check(destination)
        except RefusedError:
            return False
        return True

    inside = str(tmp_path / "good" / "one")
    assert all(
        permits(place, inside) for place in ("good", "./good/", str(tmp_path / "x" / ".." / "good"), "/")
    )
    assert not permits("good", str(tmp_path / "goodish"))
    assert permits("s3://bucket/good/", "s3://bucket/good/one")
    assert not permits("s3://bucket/good", "s3://bucket/good/../bad")
    assert not permits("file:///good", "file:///good/a://../../bad"), "that folder would be made, and left"
    assert not permits("/good", "/good/a://../../bad")
