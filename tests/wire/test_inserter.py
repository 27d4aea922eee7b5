from __future__ import annotations

import numpy as np
import pytest

from common.data.fields import Chunk
from common.wire import inserter as inserter_module
from common.wire.inserter import Inserter


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

    def insert(self, chunk: Chunk) -> bool:
        if not self.credit:
            return False
        self.credit -= 1
        self.outstanding += 1
        self.taken.append(chunk.version)
        return True

    def poll(self, timeout_ms: int) -> None:
        self.polls += 1

    def flush(self, timeout_s: float) -> bool:
        self.outstanding = 0 if self.credit else self.outstanding
        return self.outstanding == 0

    def close(self) -> None:
        self.closed = True


def inserter_of(**shards: FakeShard) -> Inserter:
    inserter = Inserter(shards.__getitem__)
    inserter.set_shards(list(shards))
    return inserter


def test_chunks_go_round_the_shards() -> None:
    a, b = FakeShard(), FakeShard()
    inserter = inserter_of(a=a, b=b)
    inserter.put([chunk(i) for i in range(5)])
    assert (a.taken, b.taken) == ([0, 2, 4], [1, 3])
    assert (inserter.waiting, inserter.chunks_total) == (0, 5)
    assert inserter.finish(1.0) == 0
    inserter.close()
    assert a.closed
    assert b.closed


def test_a_shard_without_credit_is_passed_over() -> None:
    a, b = FakeShard(credit=1), FakeShard()
    inserter = inserter_of(a=a, b=b)
    inserter.put([chunk(i) for i in range(4)])
    assert (a.taken, b.taken) == ([0], [1, 2, 3])
    assert inserter.waiting == 0


def test_what_nobody_takes_waits_in_order() -> None:
    a = FakeShard(credit=1, blocked_reason="replay is full")
    inserter = inserter_of(a=a)
    inserter.put([chunk(i) for i in range(3)])
    assert inserter.waiting == 2
    assert inserter.reason() == "replay is full"
    a.credit = 5
    inserter.pump(timeout_ms=1)
    assert a.taken == [0, 1, 2]
    assert inserter.waiting == 0


def test_no_shard_at_all() -> None:
    inserter = Inserter(lambda endpoint: FakeShard())
    inserter.put([chunk(0)])
    inserter.pump(timeout_ms=1)
    assert inserter.waiting == 1
    assert "no replay shard" in inserter.reason()
    assert inserter.finish(0.05) == 1
    inserter.set_shards(["late"])
    inserter.pump()
    assert inserter.waiting == 0


def test_finish_counts_what_is_lost() -> None:
    a = FakeShard(credit=1)
    inserter = inserter_of(a=a)
    inserter.put([chunk(i) for i in range(3)])
    assert inserter.finish(0.1) == 3  # two never sent, one never acknowledged


def test_a_limit_that_will_not_give_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserter_module, "PATIENCE_S", 0.05)
    inserter = inserter_of(a=FakeShard(credit=0))
    inserter.put([chunk(0)])
    assert inserter.finish(1e6) == 1


def test_a_shard_that_is_back_in_time_gets_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inserter_module, "PATIENCE_S", 0.0)
    a = FakeShard(credit=0, blocked_reason="does not answer")

    def poll(timeout_ms: int) -> None:
        a.polls += 1
        a.credit = 5 if a.polls > 10 else 0

    monkeypatch.setattr(a, "poll", poll)
    inserter = inserter_of(a=a)
    inserter.put([chunk(0)])
    assert inserter.finish(60.0) == 0
    assert a.taken == [0]
