"""With `durable = "power"` an insert is acknowledged when the disk has it, and never if the disk refuses."""

import threading

import numpy as np
import pytest

from tests.harness import until
from tests.replay.storage.power import Disk
from tests.replay.storage.replays import BUDGET, SPECS, entry, features, make_insert
from troupe.common.data.schema import Chunk
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import SyncFailedError
from troupe.common.wire import sockets
from troupe.common.wire.codec import decode
from troupe.common.wire.replay.client import ReplayClient
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.storage.opened import FAILED_SYNC_FILE
from troupe.services.replay.storage.replay import Replay


def chunk(start, steps=4):
    fields = {
        "obs": np.stack([entry(start + i) for i in range(-3, steps + 2)]),
        "raw": np.stack([np.full(2, start + i, np.int32) for i in range(-1, steps)]),
        "action": np.arange(start, start + steps, dtype=np.int64),
        "features": features(np.arange(start, start + steps)),
    }
    every = np.arange(steps, dtype=np.int32)
    return Chunk(fields, steps, every, np.ones(steps, np.int32), np.ones(steps))


class Shard:
    """A shard in this process whose disk syncs when it may."""

    def __init__(self, folder, context, endpoint):
        self.may_sync = threading.Event()
        self.syncs = 0
        self.disk = Disk()
        self.router = sockets.make_router(context, endpoint)
        self.replay = Replay(
            folder, [TableConfig(capacity=100)], budget_bytes=BUDGET, durable="power", pager=self.pager
        )
        self.requests = RequestHandlers(self.replay, self.router, 1, dict)

    def pager(self, folder):
        pager, sync = self.disk.pager(folder), None
        sync = pager.sync

        def gated():
            assert self.may_sync.wait(60)
            self.syncs += 1
            sync()

        self.may_sync.set()
        pager.sync = gated
        return pager

    def turn(self):
        while (frames := sockets.receive_frames(self.router)) is not None:
            self.requests.serve(frames[0].bytes, decode(frames[1:]))
        self.requests.advance()


@pytest.fixture
def shard(tmp_path, context):
    shard = Shard(tmp_path / "data", context, f"ipc://{tmp_path}/replay")
    yield shard
    shard.may_sync.set()
    shard.replay.close()


def test_many_inserts_are_acknowledged_by_few_syncs_and_none_before_its_own(shard, context, tmp_path):
    shard.may_sync.clear()
    client = ReplayClient(f"ipc://{tmp_path}/replay", ctx=context, specs=SPECS, map_files=False)

    def turn():
        client.poll(1)
        shard.turn()
        return True

    until(lambda: turn() and client.credit > 0)
    for number in range(20):
        until(lambda number=number: turn() and client.insert(chunk(10 * number)))
    until(lambda: turn() and shard.requests.unsynced == 20)
    before = shard.syncs
    assert client.outstanding == 20
    client.request_sample(8)  # what is not acknowledged yet is served
    assert until(lambda: turn() and client.receive(0.001)) is not None
    assert client.outstanding == 20
    shard.may_sync.set()
    until(lambda: turn() and not client.outstanding)
    assert 1 <= shard.syncs - before <= 2
    shard.requests.close()
    client.close(0)


def test_a_disk_that_refuses_once_ends_the_shard_without_an_acknowledgement(shard, context, tmp_path):
    client = ReplayClient(f"ipc://{tmp_path}/replay", ctx=context, specs=SPECS, map_files=False)

    def turn():
        client.poll(1)
        shard.turn()
        return True

    until(lambda: turn() and client.credit > 0)
    shard.disk.broken = True
    client.insert(chunk(0))
    with pytest.raises(SyncFailedError, match="cannot force writes to the disk"):
        until(lambda: turn() and not client.outstanding)
    shard.disk.broken = False  # it seems to be well again
    with pytest.raises(SyncFailedError):
        shard.turn()
    with pytest.raises(SyncFailedError):
        shard.requests.close()
    client.poll(50)
    assert client.outstanding == 1
    assert (shard.replay.folder / FAILED_SYNC_FILE).exists()
    client.close(0)
    shard.replay.close()
    shard.disk = Disk()
    again = Replay(
        *(shard.replay.folder, [TableConfig(capacity=100)]),
        budget_bytes=BUDGET,
        durable="power",
        pager=shard.disk.pager,
    )
    assert not (shard.replay.folder / FAILED_SYNC_FILE).exists()  # all of it was written anew
    assert again.restored_items == 4
    again.close()


def test_a_full_disk_holds_inserts_and_loses_none(tmp_path):
    disk = Disk()
    replay = Replay(
        tmp_path, [TableConfig(capacity=100)], budget_bytes=BUDGET, durable="power", pager=disk.pager
    )
    assert replay.insert(make_insert(1, 0, 4, range(4), [1] * 4, [1.0] * 4))
    replay.sync()
    disk.full = True
    numbers = iter(range(2, 200))
    for number in numbers:  # what has been reserved suffices for some, then the oldest leave
        replay.insert(make_insert(number, 10 * number, 4, range(4), [1] * 4, [1.0] * 4))
        if replay.counters.evicted_early_items:
            break
    replay.sync()
    assert replay.sample({"default": 4})
    replay.close()
