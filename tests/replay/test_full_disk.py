"""Full disks: real ones, of a few megabytes. Nothing dies of one, and room that is made is used."""

import subprocess
import sys

import numpy as np
import pytest

from tests.harness import leave, until
from tests.replay import processes
from troupe.common.errors import ConfigError
from troupe.common.wire.replay.client import ReplayClient
from troupe.services.replay.storage.opened import Opened

TABLE = ("--table", "default:capacity=500", "--max-bytes", "8000000")


@pytest.fixture
def shard(disk, tmp_path, context):
    """Starts a shard with its files on the disk; the process is `start.process`."""
    running, clients = [], []

    def start(*options):
        endpoint = f"ipc://{tmp_path}/replay"
        start.process = processes.start(disk / "data", endpoint, *(options or TABLE))
        running.append(start.process)
        clients.append(ReplayClient(endpoint, ctx=context, name="one", liveness_s=30.0))
        return clients[-1]

    yield start
    for each in clients:
        each.close(0)
    for process in running:
        process.kill()
        process.wait()


def noise(number):
    """A chunk that does not shrink."""
    chunk = processes.chunk(number)
    chunk.fields["obs"] = np.random.default_rng(number).integers(0, 256, chunk.fields["obs"].shape, np.uint8)
    return chunk


def insert_until(one, shard, condition, first=0):
    """Insert chunks from number `first` on until the condition holds; the number of the next one."""
    number = first

    def write():
        nonlocal number
        assert shard.process.poll() is None, "the shard died"
        number += one.insert(noise(number))
        one.poll(5)

    until(condition, step=write, why=lambda: one.blocked_reason)
    return number


@pytest.mark.parametrize("room", [0, 20_000, 60_000, 100_000, 150_000, 200_000])
def test_a_disk_that_is_full_at_the_first_insert_holds_it_until_there_is_room(disk, shard, room):
    one = shard()
    one.status(40)
    leave(disk, room)

    def settled():
        return "disk is full" in one.blocked_reason or one.counters["inserts"] >= 80

    made = insert_until(one, shard, settled)
    assert "disk is full" in one.blocked_reason or room, "there is no room for any chunk"
    (disk / "ballast").unlink()
    assert one.flush(60), one.blocked_reason
    status = one.status(60)
    assert status["tables"]["default"]["items"] == made * processes.STEPS - status["evicted_early_items"]
    insert_until(one, shard, lambda: one.status(60)["tables"]["default"]["items"] >= 450, made)
    assert one.flush(60), one.blocked_reason


def test_a_shard_goes_on_beside_others_and_grows_again(disk, shard):
    one = shard()
    one.status(40)
    made = insert_until(one, shard, lambda: one.counters["inserts"] >= 10)
    assert one.flush(60)
    leave(disk, 0)
    made = insert_until(one, shard, lambda: one.status(60)["evicted_early_items"] > 100, made)
    assert one.flush(60)
    kept = one.status(60)
    # It starts on a disk that is full, with what it has.
    processes.kill(shard.process)
    one = shard()
    assert one.status(40)["tables"]["default"]["items"] == kept["tables"]["default"]["items"]
    before = one.status(60)["bytes"]
    (disk / "ballast").unlink()
    insert_until(one, shard, lambda: one.status(60)["bytes"] > 2 * before, made)
    assert one.flush(60)


def test_an_empty_shard_starts_again_on_a_full_disk(disk, shard):
    shard().status(40)
    processes.kill(shard.process)
    leave(disk, 0)
    one = shard()
    one.status(40)
    (disk / "ballast").unlink()
    insert_until(one, shard, lambda: one.counters["inserts"] > 3)
    assert one.flush(60)


def test_a_disk_too_small_for_the_tables_is_refused_in_one_line(disk, tmp_path):
    leave(disk, 30_000)
    words = [
        "--bind",
        f"ipc://{tmp_path}/x",
        "--data-dir",
        str(disk / "data"),
        "--table",
        "default:capacity=100000",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "troupe.services.replay", "serve", *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert "disk limit" in run.stderr


def test_only_the_promise_to_survive_a_power_cut_needs_a_note_of_the_boot(disk):
    Opened(disk, "first").write("process")
    leave(disk, 0)
    Opened(disk, "first").write("process")
    Opened(disk, "second").write("process")
    assert Opened(disk, "second").lost_power
    with pytest.raises(ConfigError, match="disk is full: cannot write"):
        Opened(disk, "second").write("power")
