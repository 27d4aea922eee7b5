"""Spreads chunks over the replay shards, and holds those that no shard takes yet."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from common.data.fields import Chunk, FieldSpec
from common.wire.replay_client import ReplayClient
from common.wire.sockets import Context, Security, Socket, reachable_endpoint

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
"""At the end, shards that answer are given this long to take another chunk."""


class ShardClient(Protocol):
    """The part of `ReplayClient` that inserting needs."""

    @property
    def outstanding(self) -> int:
        """Inserts that are not acknowledged yet."""

    @property
    def blocked_reason(self) -> str:
        """Why an insert would be refused now; empty where it would not."""

    @property
    def paused(self) -> bool:
        """Whether the shard answers, and wants no inserts at present."""

    @property
    def socket(self) -> Socket:
        """To be polled for what the shard sends."""

    def insert(self, chunk: Chunk) -> bool:
        """Send, or return False where credit or the outstanding inserts do not permit it."""

    def poll(self, timeout_ms: int) -> None:
        """Handle what the shard sent, waiting for at most `timeout_ms`."""

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged."""

    def close(self) -> None:
        """Close the socket."""


def connect_shard(
    endpoint: str,
    ctx: Context,
    name: str,
    incarnation: int,
    fields: Sequence[FieldSpec],
    *,
    compress: bool,
    max_outstanding: int,
    via: str = "",
    security: Security | None = None,
) -> ShardClient:
    """An inserter's connection to a shard.

    Args:
        endpoint: of the shard.
        ctx: ZeroMQ context.
        name: of the service, for logs.
        incarnation: of the service, which names its inserts.
        fields: what a chunk holds.
        compress: whether pixels are compressed.
        max_outstanding: most inserts of a shard sent and not acknowledged.
        via: an address on the host for which a wildcard host stands.
        security: keys.
    """
    return ReplayClient(
        reachable_endpoint(endpoint, via),
        ctx=ctx,
        name=name,
        incarnation=incarnation,
        specs=[replace(spec, compress=spec.compress and compress) for spec in fields],
        max_outstanding=max_outstanding,
        security=security,
    )


class Inserter:
    """Chunk `k` goes to shard `k mod n`, or to the next one with credit.

    Nothing is ever dropped: what no shard takes waits here, in order, and who acts pauses meanwhile.
    """

    def __init__(self, connect: Callable[[str], ShardClient]) -> None:
        self.chunks_total = 0
        self._connect = connect
        self._clients: dict[str, ShardClient] = {}
        self._waiting: deque[Chunk] = deque()

    @property
    def waiting(self) -> int:
        """Chunks that no shard has taken yet."""
        return len(self._waiting)

    @property
    def sockets(self) -> list[Socket]:
        """The present sockets: something to `pump` is on one that is readable."""
        return [client.socket for client in self._clients.values()]

    def set_shards(self, endpoints: list[str]) -> None:
        """Connect to shards that are new. One that has gone keeps its client, which knows what to re-send."""
        for endpoint in endpoints:
            if endpoint not in self._clients:
                log.info("inserts go to replay at %s", endpoint)
                self._clients[endpoint] = self._connect(endpoint)

    def put(self, chunks: list[Chunk]) -> None:
        """Take over `chunks`, and send what can be sent."""
        self._waiting.extend(chunks)
        self.pump()

    def pump(self, timeout_ms: int = 0) -> None:
        """Handle acknowledgements, waiting for at most `timeout_ms` where nothing can be sent, and send."""
        clients = list(self._clients.values())
        for client in clients:
            client.poll(0)
        self._send(clients)
        if self._waiting and timeout_ms:
            if not clients:
                time.sleep(timeout_ms / 1000)
            for client in clients:
                client.poll(max(1, timeout_ms // len(clients)))
            self._send(clients)

    def _send(self, clients: list[ShardClient]) -> None:
        while self._waiting and clients:
            first = self.chunks_total % len(clients)
            if not any(client.insert(self._waiting[0]) for client in clients[first:] + clients[:first]):
                return
            self._waiting.popleft()
            self.chunks_total += 1

    def reason(self) -> str:
        """Why chunks wait, for a log line."""
        if not self._clients:
            return "no replay shard has joined the run"
        reasons = {client.blocked_reason for client in self._clients.values()} - {""}
        return "; ".join(sorted(reasons)) or "inserts are not acknowledged"

    def finish(self, timeout_s: float) -> int:
        """Send and await as much as `timeout_s` permits; how many chunks were lost.

        Once all shards answer and none has taken anything for `PATIENCE_S`, the limit on samples per insert
        holds: with the learner gone it will not give way, so there is nothing to wait for.
        """
        deadline = time.monotonic() + timeout_s
        sent, sent_at = self.chunks_total, time.monotonic()
        while self._waiting and time.monotonic() < deadline:
            self.pump(timeout_ms=50)
            if self.chunks_total != sent:
                sent, sent_at = self.chunks_total, time.monotonic()
            paused = self._clients and all(client.paused for client in self._clients.values())
            if paused and time.monotonic() - sent_at > PATIENCE_S:
                break
        lost = self.waiting
        for client in self._clients.values():
            client.flush(max(0.0, deadline - time.monotonic()))
            lost += client.outstanding
        return lost

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
