from __future__ import annotations

import numpy as np
import pytest

from troupe.common.data.schema import Chunk
from troupe.common.wire.replay import outbox as outbox_module
from troupe.common.wire.replay import sharded
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.sharded import ShardedReplayClient


def chunk(number: int) -> Chunk:
    empty = np.zeros(0)
    return Chunk({}, 1, empty.astype(np.int32), empty.astype(np.int32), empty, version=number)


class FakeShard:
    """Takes `credit` chunks; a poll acknowledges what was sent."""

    def __init__(self, credit: int = 1000, blocked_reason: str = "no credit") -> None:
        self.credit = credit
        self.taken: list[int] = []
        self.outstanding = 0
        self.polls = 0
        self.closed = False
        self._reason = blocked_reason

    @property
    def blocked_reason(self) -> str:
        return "" if self.credit else self._reason

    @property
    def paused(self) -> bool:
        return not self.credit and self._reason != "does not answer"

    def insert(self, chunk: Chunk, table: str) -> bool:
        if not self.credit:
            return False
        self.credit -= 1
        self.outstanding += 1
        self.taken.append(chunk.version)
        return True

    def poll(self, timeout_ms: float) -> None:
        self.polls += 1
        self.outstanding = 0 if self.credit else self.outstanding

    def close(self, linger_s: float) -> None:
        self.closed = True


class Connected:
    """An outbox, and a client of these shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch

    def __call__(self, **shards: FakeShard) -> Outbox:
        self.monkeypatch.setattr(sharded, "ReplayClient", lambda name, **_: shards[name])
        self.client = ShardedReplayClient(list(shards))
        return Outbox(self.client)


@pytest.fixture
def outbox_to(monkeypatch: pytest.MonkeyPatch) -> Connected:
    return Connected(monkeypatch)


def test_chunks_go_round_the_shards(outbox_to: Connected) -> None:
    a, b = FakeShard(), FakeShard()
    outbox = outbox_to(a=a, b=b)
    outbox.put([chunk(i) for i in range(5)])
    assert (a.taken, b.taken) == ([0, 2, 4], [1, 3])
    assert (outbox.waiting, outbox.chunks_total) == (0, 5)
    assert outbox.finish(1.0) == 0
    outbox_to.client.close()
    assert a.closed
    assert b.closed


def test_a_shard_without_credit_is_passed_over(outbox_to: Connected) -> None:
    a, b = FakeShard(credit=1), FakeShard()
    outbox = outbox_to(a=a, b=b)
    outbox.put([chunk(i) for i in range(4)])
    assert (a.taken, b.taken) == ([0], [1, 2, 3])
    assert outbox.waiting == 0


def test_what_nobody_takes_waits_in_order(outbox_to: Connected) -> None:
    a = FakeShard(credit=1, blocked_reason="replay is full")
    outbox = outbox_to(a=a)
    outbox.put([chunk(i) for i in range(3)])
    assert outbox.waiting == 2
    assert outbox.reason == "replay is full"
    a.credit = 5
    outbox.pump(timeout_ms=1)
    assert a.taken == [0, 1, 2]
    assert outbox.waiting == 0


def test_no_shard_at_all(monkeypatch: pytest.MonkeyPatch, outbox_to: Connected) -> None:
    outbox = outbox_to()
    outbox.put([chunk(0)])
    outbox.pump(timeout_ms=1)
    assert outbox.waiting == 1
    assert "no replay shard" in outbox.reason
    assert outbox.finish(0.05) == 1
    monkeypatch.setattr(sharded, "ReplayClient", lambda name, **_: FakeShard())
    outbox_to.client.set_shards(["late"])
    outbox.pump()
    assert outbox.waiting == 0


def test_finish_counts_what_is_lost(outbox_to: Connected) -> None:
    a = FakeShard(credit=1)
    outbox = outbox_to(a=a)
    outbox.put([chunk(i) for i in range(3)])
    assert outbox.finish(0.1) == 3  # two never sent, one never acknowledged


def test_a_limit_that_will_not_give_way_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, outbox_to: Connected
) -> None:
    monkeypatch.setattr(outbox_module, "PATIENCE_S", 0.05)
    outbox = outbox_to(a=FakeShard(credit=0))
    outbox.put([chunk(0)])
    assert outbox.finish(1e6) == 1
    held = outbox_to(a=FakeShard(credit=1))
    held.put([chunk(0)])  # taken, and not acknowledged: the credit is used up
    assert held.finish(1e6) == 1


def test_a_shard_that_is_back_in_time_gets_its_chunks(
    monkeypatch: pytest.MonkeyPatch, outbox_to: Connected
) -> None:
    monkeypatch.setattr(outbox_module, "PATIENCE_S", 0.0)
    a = FakeShard(credit=0, blocked_reason="does not answer")

    def poll(timeout_ms: int) -> None:
        a.polls += 1
        a.credit = 5 if a.polls > 10 else 0
        a.outstanding = 0

    monkeypatch.setattr(a, "poll", poll)
    outbox = outbox_to(a=a)
    outbox.put([chunk(0)])
    assert outbox.finish(60.0) == 0
    assert a.taken == [0]
