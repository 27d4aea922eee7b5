"""Holds chunks that replay does not take yet, in order: who acts pauses meanwhile, and nothing is dropped."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from troupe.common import system
from troupe.common.data.schema import Chunk
from troupe.common.data.table_config import TableConfig
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.sharded import ShardedReplayClient

PATIENCE_S = 1.0
"""At the end, shards that answer are given this long to take another chunk."""


class Outbox:
    """Chunks on their way into tables.

    Attributes:
        chunks_total: chunks that were sent.
    """

    def __init__(self, client: ReplayClient | ShardedReplayClient, *tables: str) -> None:
        """`client` may be shared with others, and remains theirs to close.

        A chunk's items go to all `tables`, to `default` where none is named.
        """
        self.chunks_total = 0
        self._client = client
        self._table, *self._others = tables or (TableConfig.name,)
        self._waiting: deque[Chunk] = deque()

    @property
    def waiting(self) -> int:
        """Chunks that no shard has taken yet."""
        return len(self._waiting)

    @property
    def reason(self) -> str:
        """Why chunks wait, for a log line."""
        return self._client.blocked_reason or "inserts are not acknowledged"

    def put(self, chunks: Sequence[Chunk], timeout_s: float = 0.0) -> bool:
        """Take over `chunks`, and send what can be sent within `timeout_s`; whether nothing waits."""
        for chunk in chunks:
            # The same items for each table: the data are sent and stored once.
            chunk.more |= dict.fromkeys(self._others, chunk.items)
        self._waiting.extend(chunks)
        deadline_s = system.monotonic() + timeout_s
        self.pump()
        while self._waiting and (left_s := deadline_s - system.monotonic()) > 0:
            self.pump(min(left_s * 1000 + 1, 50))
        return not self._waiting

    def pump(self, timeout_ms: float = 0) -> None:
        """Handle acknowledgements, waiting for at most `timeout_ms` while any is awaited, and send."""
        self._client.poll(0)
        self._send()
        if timeout_ms and self._left():
            self._client.poll(timeout_ms)
            self._send()

    def _send(self) -> None:
        # In order: steps of a slot reach a queue as they were made.
        while self._waiting and self._client.insert(self._waiting[0], self._table):
            self._waiting.popleft()
            self.chunks_total += 1

    def finish(self, timeout_s: float) -> int:
        """Send and await as much as `timeout_s` permits; how many chunks were lost.

        Once all shards answer and none has taken or acknowledged anything for `PATIENCE_S`, a limiter holds
        what there is: with the learner gone it will not give way, so there is nothing to wait for.
        """
        deadline_s = system.monotonic() + timeout_s
        left, changed_s = self._left(), system.monotonic()
        while left and system.monotonic() < deadline_s:
            self.pump(timeout_ms=50)
            before, left = left, self._left()
            if left != before:
                changed_s = system.monotonic()
            if self._client.paused and system.monotonic() - changed_s > PATIENCE_S:
                break
        return left

    def _left(self) -> int:
        """Chunks that are not acknowledged."""
        return self.waiting + self._client.outstanding
