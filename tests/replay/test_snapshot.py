"""Snapshots of a running shard, from the client and from the command line."""

import contextlib
import subprocess
import sys

import pytest

from tests.replay import processes
from tests.replay.storage.replays import BUDGET, simple
from troupe.common.data.inserts import RefusedError
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.snapshots import Snapshots
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.snapshot import Snapshot

RUN = [sys.executable, "-m", "troupe.services.replay"]


def test_a_run_moves_with_its_snapshot(server, client, tmp_path):
    endpoint = server("--table", "default:capacity=500")
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
    words = [*RUN, "snapshot", endpoint, str(tmp_path / "second")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "400 items" in done.stdout
    assert str(tmp_path / "second") in done.stdout
    words = [*RUN, "snapshot", endpoint, "nosuch://bucket/path"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "Protocol not known: nosuch" in refused.stderr
    # What is there is not overwritten, nor taken for what is asked for, the last one included.
    for name in ("first", "second"):
        again = subprocess.run(
            [*RUN, "snapshot", endpoint, str(tmp_path / name)], capture_output=True, text=True, timeout=120
        )
        assert again.returncode == 2
        assert (again.stdout, again.stderr.count("\n")) == ("", 1)
        assert "already exists" in again.stderr

    words = ["--bind", f"ipc://{tmp_path}/c", "--restore", str(tmp_path / "second"), "--data-dir"]
    words = [*RUN, "serve", *words, str(tmp_path / "small"), "--table", "default:capacity=400"]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2
    assert "was made for the capacities" in refused.stderr
    assert not (tmp_path / "small").exists()

    elsewhere = server(
        "--table",
        "default:capacity=500",
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
    options = ("--table", "default:capacity=500", "--restore", str(tmp_path / "second"))
    other = client(server(*options, endpoint=f"ipc://{tmp_path}/again", folder="b"))
    assert other.status(120)["tables"]["default"]["items"] == 410
    # A folder with items is not written over.
    words = [
        *RUN,
        "serve",
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
            with pytest.raises(RefusedError, match="already exists"):
                snapshots.request(one, token)
        snapshots._snapshot.progress.state = "running"
        assert snapshots.request(one, "a")["state"] == "running"
        for place in (one, other):
            with pytest.raises(RefusedError, match="is being written already"):
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
            Snapshots(None, permitted)._permit(destination)
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


def test_no_snapshot_is_kept_in_the_shard_itself(tmp_path):
    """In its memory it would grow without bound; in its own folder it would be cleared with it."""
    own = tmp_path / "data"
    (tmp_path / "alias").symlink_to(own)
    with contextlib.closing(Replay(own, [TableConfig(capacity=100)], budget_bytes=BUDGET)) as replay:
        replay.insert(simple(1, 0, 5))
        snapshots = Snapshots(replay)
        for place in ("memory://x", "simplecache::memory://x", "MEMORY://x"):
            with pytest.raises(RefusedError, match="memory would fill it"):
                snapshots.request(place)
        for place in (str(own), str(own / "one"), f"file://{own}/one", str(tmp_path / "alias" / "one")):
            with pytest.raises(RefusedError, match="own --data-dir"):
                snapshots.request(place)
        assert not (own / "one").exists()
        assert snapshots.request(str(tmp_path / "database"))["state"] in ("running", "done")
        snapshots.close()


def test_no_link_leads_out_of_the_place_for_snapshots(tmp_path):
    """Neither one that was there, nor one that is put there when the place has been permitted."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    (good / "link").symlink_to(bad)
    (good / "dangling").symlink_to(bad / "new")
    (tmp_path / "alias").symlink_to(good)
    with contextlib.closing(
        Replay(tmp_path / "data", [TableConfig(capacity=100)], budget_bytes=BUDGET)
    ) as replay:
        replay.insert(simple(1, 0, 5))
        for permitted in (str(good), str(tmp_path / "alias"), f"file://{good}"):
            snapshots = Snapshots(replay, permitted)
            for name in ("link/one", "dangling", "dangling/one"):
                for scheme in ("", "file://", "local://"):
                    with pytest.raises(RefusedError, match="only below"):
                        snapshots.request(f"{scheme}{good}/{name}")
        assert list(bad.iterdir()) == []
        snapshots = Snapshots(replay, str(tmp_path / "alias"))
        place = snapshots.request(str(tmp_path / "alias" / "inside" / "one"), "a")["destination"]
        assert place == str(good / "inside" / "one"), "an own link is what it leads to"
        snapshots._snapshot.join(60)
        assert snapshots.progress()["state"] == "done"
        # Put there after the look, by whoever may write there.
        place = Snapshots(None, str(good))._permit(str(good / "later" / "one"))
        (good / "later").symlink_to(bad)
        with pytest.raises(ConfigError, match="cannot write"):
            Snapshot(replay, place)
        under_way = Snapshot(replay, str(good / "two"))
        (good / "two.incomplete").rename(good / "away")
        (good / "two.incomplete").symlink_to(bad)
        under_way.start()
        under_way.join(60)
        assert list(bad.iterdir()) == [], "what is written goes where it was begun"
