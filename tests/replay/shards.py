"""Several shards, and a client of all."""

from contextlib import ExitStack

import numpy as np
import pytest

from tests.harness import Shard, insert
from troupe.common.data.schema import Chunk
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.sharded import ShardedReplayClient

TABLE = {"capacity": 10_000, "priority_exponent": 0.7}


@pytest.fixture
def start(context, tmp_path):
    running = {}

    def make(name, **options):
        if name in running:
            running[name].end()
        endpoint = f"ipc://{tmp_path}/{name}.socket"
        running[name] = Shard(context, tmp_path / name, endpoint, **TABLE, **options)
        return running[name]

    yield make
    with ExitStack() as ending:  # all of them, though one has failed
        for shard in running.values():
            ending.callback(shard.end)


@pytest.fixture
def connect(context):
    clients = []

    def make(*shards, **options):
        endpoints = [shard.endpoint for shard in shards]
        clients.append(ShardedReplayClient(endpoints, ctx=context, seed=1, name="learner", **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close(0)


def chunk(values, priorities):
    count = len(values)
    items = np.arange(count, dtype=np.int32)
    fields = {"value": np.asarray(values, np.float64)}
    return Chunk(fields, count, items, np.ones(count, np.int32), np.asarray(priorities, np.float64))


def fill(context, shard, values, priorities):
    client = ReplayClient(shard.endpoint, ctx=context)
    insert(client, chunk(values, priorities))
    assert client.flush(60)
    client.close(0)
