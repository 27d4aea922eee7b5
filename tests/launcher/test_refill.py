"""A resumed run says what replay has kept."""

import time

import pytest

from tests.harness import Context
from troupe.common.data.table_config import TableConfig
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, decode
from troupe.services.launcher.refill import Refill, items_before_learning, refill_line


@pytest.mark.parametrize(
    ("restored", "line"),
    [
        (0, "replay starts empty, refills 50,000 items before learning goes on"),
        (12_345, "replay: 12,345 items restored, learning goes on at 50,000"),
        (60_000, "replay: 60,000 items restored"),
    ],
)
def test_the_line(restored, line):
    assert refill_line(restored, 50_000) == line


def test_asks_every_shard_and_waits_for_none(tmp_path):
    context = Context()
    endpoints = [f"ipc://{tmp_path}/{index}" for index in range(2)]
    refill = Refill(endpoints, min_items=20)
    try:
        assert refill.line() is None  # nobody is there yet
        shards = [sockets.make_router(context, endpoint) for endpoint in endpoints]
        deadline = time.monotonic() + 20
        for count, shard in enumerate(shards):
            while not shard.poll(10):
                assert refill.line() is None
                assert time.monotonic() < deadline
            peer, *frames = sockets.receive_frames(shard)
            message = decode(frames)
            assert message.type == messages.STATUS
            fields = {"restored_items": 15 + count}
            sockets.send(shard, Message(messages.STATUS_OK, fields, {}, message.request_id), peer.bytes)
        while (line := refill.line()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert line == "replay: 31 items restored"
    finally:
        refill.close()
        context.destroy(linger=0)


def test_items_before_learning_are_those_of_all_tables():
    queue = TableConfig("fresh", limiter="queue", capacity=8, share=4)
    again = TableConfig("again", capacity=100, min_items=30, share=4)
    assert items_before_learning([again]) == 30
    assert items_before_learning([queue]) == 0
    assert items_before_learning([queue, again]) == 8 + 30
