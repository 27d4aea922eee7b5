"""Snapshots: whole, of one moment, and back again elsewhere."""

import json
import os
import shutil
import sys
import threading

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.replay.storage import replays
from tests.replay.storage.replays import (
    BUDGET,
    check_everything,
    check_windows,
    contents,
    first_steps,
    several,
    simple,
)
from tests.runtime.power import Disk
from troupe.common.data.inserts import HeldError
from troupe.common.data.table_config import parse_table
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.installation import install_command
from troupe.services.replay.folder import clear
from troupe.services.replay.snapshots import Snapshots
from troupe.services.replay.storage import snapshot as snapshots
from troupe.services.replay.storage.destinations import open_destination
from troupe.services.replay.storage.snapshot import MANIFEST_FILE, Snapshot, restore_snapshot

TABLES = ("default:capacity=300", "best:capacity=20,remover=lowest", "queue:limiter=queue,capacity=1000")


def open_tables(folder, *texts, budget=BUDGET):
    return replays.open_tables(folder, *(texts or TABLES), budget=budget)


def fill(replay, chunks=50, first=1):
    rng = np.random.default_rng(first)
    for sequence in range(first, first + chunks):
        insert = several(sequence, sequence * 5, 5, "default", "best", "queue")
        for items in insert.items.values():
            items.priorities = rng.random(5) + 0.1
        assert replay.insert(insert)


def take(replay, destination):
    snapshot = Snapshot(replay, str(destination))
    snapshot.start()
    snapshot.join(60)
    return snapshot.progress


def state(replay):
    tables = {}
    for name, table in replay.tables.items():
        slots = table.filled()
        order = np.argsort(table.items(slots)["id"])
        tables[name] = (
            table.items(slots)["id"][order].tolist(),
            table.priorities(slots)[order].tolist(),
            table.items(slots)["sampled"][order].tolist(),
            (table.limiter.inserted, table.limiter.sampled),
        )
    return tables


@pytest.mark.parametrize("kind", ["directory", "file", "memory"])
def test_another_machine_gets_everything(tmp_path, kind):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    replay.sample({"default": 30})
    place = {
        "directory": str(tmp_path / "a" / "snapshot"),
        "file": f"file://{tmp_path}/b/snapshot",
        "memory": f"memory://{tmp_path.name}/snapshot",
    }[kind]
    progress = take(replay, place)
    assert (progress.state, progress.detail) == ("done", "")
    assert progress.bytes_done >= progress.bytes_total > 0
    assert progress.items == 250 + 20 + 250
    replay.sample({"queue": 40})
    fill(replay, 30, first=51)
    tables = [parse_table(text) for text in TABLES]
    assert restore_snapshot(place, tmp_path / "there", tables=tables) == progress.items
    copy = open_tables(tmp_path / "there")
    assert copy.restored_items == progress.items
    check_everything(copy)
    check_windows(copy.sample({"default": 100, "best": 10}))
    assert set(first_steps(copy, "default")) == set(range(5, 255))
    assert set(first_steps(copy, "queue")) == set(range(5, 255))
    # It goes on where the first one was: the producer sends again what it does not know to be stored.
    assert not copy.insert(simple(50, 0, 5))
    fill(copy, 60, first=51)
    check_everything(copy)
    check_windows(copy.sample({"default": 100}))


def test_state_is_that_of_one_moment(tmp_path):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    before, windows = state(replay), contents(replay)
    assert take(replay, tmp_path / "snapshot").state == "done"
    restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "there")
    copy = open_tables(tmp_path / "there")
    assert state(copy) == before
    assert contents(copy) == windows


@pytest.mark.parametrize("remover", ["fifo", "uniform"])
def test_what_is_overwritten_meanwhile_is_left_out(tmp_path, remover):
    text = f"default:capacity=150,remover={remover}"
    replay = open_tables(tmp_path / "here", text)
    for sequence in range(1, 80):
        replay.insert(simple(sequence, sequence * 5, 5))
    known = contents(replay)
    snapshot = Snapshot(replay, str(tmp_path / "snapshot"))
    write, sequence = snapshot._write, 80

    def write_slowly(name, array):
        nonlocal sequence
        for _ in range(2):
            replay.insert(simple(sequence, sequence * 5, 5))
            replay.sample({"default": 8})
            sequence += 1
        write(name, array)

    snapshot._write = write_slowly
    snapshot._run()
    assert snapshot.progress.state == "done"
    restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "there")
    copy = open_tables(tmp_path / "there", text)
    found = contents(copy)
    assert 0 < len(found) < 150, "some have left meanwhile"
    assert copy.restored_items == snapshot.progress.items == len(found)
    assert found == {i: known[i] for i in found}, "what is there is what it was"
    check_windows(copy.sample({"default": 50}))
    check_everything(copy)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    progress = take(replay, tmp_path / "snapshot")
    monkeypatch.undo()
    assert progress.state == "failed"
    assert "No space left" in progress.detail
    assert {path.name for path in tmp_path.iterdir()} == {"here"}
    snapshot = Snapshot(replay, str(tmp_path / "snapshot"))
    snapshot._stop.set()
    snapshot._run()
    assert snapshot.progress.detail == "stopped"
    assert {path.name for path in tmp_path.iterdir()} == {"here"}


def test_places_that_cannot_be_used(tmp_path):
    replay = open_tables(tmp_path / "here")
    with pytest.raises(ConfigError, match="nothing"):
        Snapshot(replay, str(tmp_path / "snapshot"))
    fill(replay)
    for place, reason in (
        ("snapshot", "absolute"),
        (str(tmp_path), "already exists"),
        ("nosuch://bucket/path", "nosuch"),
        ("/proc/snapshot", "cannot write"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Snapshot(replay, place)
    take(replay, f"memory://{tmp_path.name}/once")
    progress = take(replay, f"memory://{tmp_path.name}/once")
    assert progress.state == "failed"
    assert progress.detail.endswith("already exists: a snapshot needs a new address")
    assert open_destination(f"memory://{tmp_path.name}/once").read(MANIFEST_FILE), "what is there stays"


def test_what_to_install_is_named(monkeypatch):
    def missing(address, package):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError) as error:
                open_destination(address, MANIFEST_FILE)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert install_command("s3") in missing("s3://bucket/path", "s3fs")
    assert "gcsfs" in missing("gs://bucket/path", "gcsfs")
    assert install_command("snapshot") in missing("gs://bucket/path", "fsspec.core")
    with pytest.raises(ConfigError, match=r"cannot be used: Protocol not known: nosuch$"):
        open_destination("nosuch://bucket/path")


def test_errors_of_other_libraries_are_told_like_those_of_files(tmp_path, monkeypatch):
    """That of botocore for absent credentials, for one, is no OSError."""

    def fail(*_, **__):
        raise LookupError("Unable to locate credentials\nTry again")

    monkeypatch.setattr(MemoryFileSystem, "_open", fail)
    with pytest.raises(CheckpointError, match=r"no snapshot that can be read: Unable to locate credentials$"):
        restore_snapshot("memory://nothing", tmp_path / "nowhere")
    monkeypatch.setattr(MemoryFileSystem, "exists", fail)
    with pytest.raises(CheckpointError, match=r"Unable to locate credentials$"):
        open_destination("memory://nothing", MANIFEST_FILE).prepare()


def test_a_network_that_does_not_answer_holds_up_the_thread_only(tmp_path, monkeypatch):
    asked, answer, askers = threading.Event(), threading.Event(), []

    def hang(*_):
        askers.append(threading.current_thread().name)
        asked.set()
        assert answer.wait(60)
        return False

    monkeypatch.setattr(MemoryFileSystem, "exists", hang)
    # Under another name, for a shard refuses to keep a snapshot in its own memory.
    fsspec.register_implementation("far", MemoryFileSystem, clobber=True)
    replay = open_tables(tmp_path / "here")
    fill(replay)
    requests = Snapshots(replay)
    assert requests.request(f"far://{tmp_path.name}/slow", "a")["state"] == "running"
    assert asked.wait(60)
    answer.set()
    requests._snapshot.join(60)
    assert requests.progress()["state"] == "done"
    assert set(askers) == {"snapshot"}
    requests.close()


def test_damage_is_told_and_nothing_is_restored(tmp_path):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    take(replay, tmp_path / "good")
    with pytest.raises(ConfigError, match="not empty"):
        restore_snapshot(str(tmp_path / "good"), tmp_path / "here")
    with pytest.raises(CheckpointError, match="no snapshot"):
        restore_snapshot(str(tmp_path / "nowhere"), tmp_path / "there")

    def damaged(change):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        change(tmp_path / "bad")
        with pytest.raises(CheckpointError) as error:
            restore_snapshot(str(tmp_path / "bad"), tmp_path / "there")
        assert "\n" not in str(error.value)
        assert {path.name for path in tmp_path.iterdir()} == {"here", "good", "bad"}
        return str(error.value)

    def flip(folder):
        data = bytearray((folder / "obs.blocks").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "obs.blocks").write_bytes(data)

    def escape(folder):
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
        manifest["files"][0]["name"] = "../escaped"
        (folder / MANIFEST_FILE).write_text(json.dumps(manifest))

    assert "obs.blocks" in damaged(flip)
    assert "not a file of replay" in damaged(escape)
    damaged(lambda folder: (folder / "action.raw").unlink())
    damaged(lambda folder: (folder / MANIFEST_FILE).write_text("{"))
    damaged(lambda folder: (folder / MANIFEST_FILE).unlink())


def test_other_tables_are_refused_before_anything_is_copied(tmp_path, monkeypatch):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    take(replay, tmp_path / "snapshot")
    monkeypatch.setattr(snapshots, "_copy", None)
    for texts in (TABLES[:2], ("default:capacity=301", *TABLES[1:])):
        with pytest.raises(ConfigError, match="snapshot was made for the capacities") as error:
            restore_snapshot(
                str(tmp_path / "snapshot"), tmp_path / "there", tables=[parse_table(text) for text in texts]
            )
        assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"here", "snapshot"}


def test_a_power_cut_after_a_restore_leaves_it_whole_or_to_be_done_again(tmp_path, monkeypatch):
    """The command that starts the shard again has `--restore` as well."""
    replay, source = open_tables(tmp_path / "here"), str(tmp_path / "snapshot")
    fill(replay)
    take(replay, source)
    disk = Disk(tmp_path / "disk")
    with monkeypatch.context() as patch:
        disk.watch(patch)
        restore_snapshot(source, disk.root / "there")
    rng = np.random.default_rng(0)
    for trial in range(8):
        place = tmp_path / f"cut-{trial}"
        disk.cut(len(disk.events), place, lambda n: int(rng.integers(n)))
        assert restore_snapshot(source, place / "there") in (None, 520)
        copy = open_tables(place / "there")
        assert copy.restored_items == 520
        copy.close()


def test_a_restored_folder_is_known_by_the_snapshot_that_it_was_made_from(tmp_path):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    for name in ("one", "two"):
        take(replay, tmp_path / name)
    one, there = str(tmp_path / "one"), tmp_path / "there"
    assert restore_snapshot(one, there) == 520
    copy = open_tables(there)
    fill(copy, 1, first=51)
    before = state(copy)
    copy.close()
    assert restore_snapshot(one, there) is None
    shutil.move(one, tmp_path / "moved")
    assert restore_snapshot(str(tmp_path / "moved"), there) is None, "the same snapshot in another place"
    assert restore_snapshot(one, there) is None, "it cannot be read any more, and is not needed"
    copy = open_tables(there)
    assert state(copy) == before
    copy.close()
    for other in ("two", "nowhere"):
        with pytest.raises(ConfigError, match="not empty"):
            restore_snapshot(str(tmp_path / other), there)
    shutil.move(tmp_path / "two", one)
    with pytest.raises(ConfigError, match="not empty"):
        restore_snapshot(one, there)
    clear(there, ["default", "best", "queue"])
    assert restore_snapshot(one, there) == 520


def test_a_smaller_machine_keeps_what_it_gets_and_does_not_grow(tmp_path):
    replay = open_tables(tmp_path / "here")
    fill(replay)
    take(replay, tmp_path / "snapshot")
    restore_snapshot(str(tmp_path / "snapshot"), tmp_path / "there")
    copy = open_tables(tmp_path / "there", budget=replay.store.used_bytes)
    assert copy.restored_items == 520
    copy.sample({"queue": 250})
    used = copy.store.used_bytes
    held = 0
    for number in range(51, 151):
        try:
            fill(copy, 1, first=number)
        except HeldError:  # what is in the queue stays until it is sampled
            held += 1
            assert not isinstance(copy.sample({"queue": copy.tables["queue"].size}), str)
            fill(copy, 1, first=number)
    assert held
    assert copy.store.used_bytes == used
    check_everything(copy)
