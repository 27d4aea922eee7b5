"""Several replay shards as one: inserts go round, samples come in proportion to priority over all of them.

`troupe.common.wire.replay.draws` says how these are drawn.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import zmq
from numpy.typing import ArrayLike

from troupe.common import system
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.errors import PeerError
from troupe.common.wire.replay.batch_reader import ArrayPool
from troupe.common.wire.replay.client import COUNTERS, ReplayClient
from troupe.common.wire.replay.codec import SampleBatch
from troupe.common.wire.replay.draws import Draws
from troupe.common.wire.replay.sampler import Sampler
from troupe.common.wire.sockets import Socket

_log = logging.getLogger(__name__)

NO_SHARD = "no replay shard has joined"


class ShardedReplayClient(Sampler):
    """`ReplayClient` for any number of shards, which may come and go. For use by one thread."""

    def __init__(
        self,
        shards: Sequence[str] = (),
        *,
        seed: int | None = None,
        pool: ArrayPool | None = None,
        **options: Any,
    ) -> None:
        """Connect to `shards`, addresses.

        Args:
            shards: see `set_shards`.
            seed: of the choice of shards.
            pool: where batches get their arrays from.
            options: of each `ReplayClient`.
        """
        self._pool = pool or ArrayPool()
        self._options = options
        self._name = options.get("name", "client")
        self._draws = Draws(seed)
        self._shards = self._draws.shards
        self._gone: dict[str, ReplayClient] = {}
        self._turn = 0
        self.set_shards(shards)

    @property
    def shards(self) -> list[str]:
        """Addresses of the shards."""
        return list(self._shards)

    @property
    def specs(self) -> Sequence[FieldSpec] | None:
        """The fields of the chunks to insert, if they were given."""
        return self._options.get("specs")

    def set_shards(self, endpoints: Sequence[str]) -> None:
        """Use these shards from now on. What was asked of one that has gone is asked of others.

        What that one has not acknowledged stays, and is sent again until it is: it alone knows what it has
        stored.
        """
        for endpoint in endpoints:
            if endpoint not in self._shards:
                _log.info("%s uses replay at %s", self._name, endpoint)
                client = self._gone.pop(endpoint, None) or self._connect(endpoint)
                self._draws.add(endpoint, client)
        for endpoint in [known for known in self._shards if known not in endpoints]:
            _log.info("%s no longer uses replay at %s", self._name, endpoint)
            client = self._draws.remove(endpoint)
            if client.counters["inserts"]:
                # Its numbers go on when it is back: the shard would take a new client's for repeats.
                self._gone[endpoint] = client
            else:
                client.close()
        self._draws.assign()

    def _connect(self, endpoint: str) -> ReplayClient:
        # Turned down by one shard, a request may be asked of another; a client of one would wait.
        return ReplayClient(endpoint, pool=self._pool, retry_samples=False, **self._options)

    def close(self, linger_s: float = 1.0) -> None:
        """Close all connections."""
        for client in self._clients():
            client.close(linger_s)

    def _clients(self) -> list[ReplayClient]:
        """Those of all shards, of the present ones first."""
        return [*(shard.client for shard in self._shards.values()), *self._gone.values()]

    # ---------------------------------------------------------------- inserting

    @property
    def outstanding(self) -> int:
        """Inserts that are not acknowledged yet."""
        return sum(client.outstanding for client in self._clients())

    @property
    def credit(self) -> int:
        """Inserts that the shards let this client have unacknowledged."""
        return sum(shard.client.credit for shard in self._shards.values())

    @property
    def paused(self) -> bool:
        """Whether all shards answer, and none wants inserts at present."""
        return bool(self._shards) and all(shard.client.paused for shard in self._shards.values())

    @property
    def blocked_reason(self) -> str:
        """Why the next insert would have to wait, empty where it would not."""
        reasons = {shard.client.blocked_reason for shard in self._shards.values()}
        return "" if "" in reasons else "; ".join(sorted(reasons)) or NO_SHARD

    def insert(self, chunk: Chunk, table: str = "default") -> bool:
        """Send `chunk` to the next shard that takes it; False where none does at present."""
        clients = [shard.client for shard in self._shards.values()]
        for i in range(len(clients)):
            at = (self._turn + i) % len(clients)
            if clients[at].insert(chunk, table):
                self._turn = at + 1
                return True
        return False

    def flush(self, timeout_s: float) -> bool:
        """Wait until every insert is acknowledged; False where some are not after `timeout_s`."""
        deadline_s = system.monotonic() + timeout_s
        done = [client.flush(deadline_s - system.monotonic()) for client in self._clients()]
        return all(done)  # each of them had its turn

    # ---------------------------------------------------------------- sampling

    @property
    def outstanding_samples(self) -> int:
        """Batches requested and not received."""
        return self._draws.outstanding

    @property
    def wait_reason(self) -> str:
        """Why there is no batch, as far as the shards say."""
        if not self._shards:
            return NO_SHARD
        return "; ".join(
            shard.client.silence
            or (shard.client.fault and f"replay at {endpoint}: {shard.client.fault}")
            or shard.client.wait_reason
            or f"replay at {endpoint} has just been asked"
            for endpoint, shard in self._shards.items()
        )

    @property
    def no_batch_reason(self) -> str:
        """Why no batch comes, for an error."""
        return f"no batch from replay: {self.wait_reason}"

    def request_sample(self, batch_size: int | Mapping[str, int], table: str = "default") -> None:
        """Ask for a batch; any number of requests may be on their way.

        `batch_size` may say how many rows to take from each of several tables. The whole batch is from one
        shard, drawn by the first table's weights.
        """
        shares = {table: batch_size} if isinstance(batch_size, int) else dict(batch_size)
        self._draws.request(shares)

    def receive(self, timeout_s: float) -> SampleBatch | None:
        """The next batch from any shard; None after `timeout_s` (see `wait_reason`).

        Its `probabilities`, `table_items` and `total_priority` are those over all shards that it could
        have come from, and its `min_probabilities` are the least in the last batches of these.
        """
        deadline_s = system.monotonic() + timeout_s
        while (batch := self._draws.next()) is None:
            left_s = deadline_s - system.monotonic()
            if left_s <= 0:
                return None
            self.poll(min(left_s * 1000 + 1, 200))
        return batch

    def cancel_samples(self) -> None:
        """Forget the batches that were requested and not received."""
        self._draws.cancel()

    def update(
        self,
        batch: SampleBatch,
        priorities: ArrayLike,
        tables: Collection[str] | None = None,
        *,
        chosen: bool = False,
    ) -> None:
        """As that of `ReplayClient`, if the shard of `batch` is still there."""
        shard = self._shards.get(batch.shard)
        if shard is not None:
            shard.client.update(batch, priorities, tables, chosen=chosen)

    def recycle(self, batch: SampleBatch) -> None:
        """Let a later batch use the arrays of this one, which has no fields any more."""
        fields, batch.fields = batch.fields, {}
        for array in fields.values():
            self._pool.give(array)

    def status(self, timeout_s: float = 5.0) -> dict[str, dict[str, Any]]:
        """`ReplayClient.status` of every shard that answers, by address. Raises PeerError where none does."""
        deadline_s = system.monotonic() + timeout_s
        found, silent = {}, NO_SHARD
        for endpoint, shard in self._shards.items():
            try:
                found[endpoint] = shard.client.status(max(deadline_s - system.monotonic(), 0.1))
            except PeerError as error:
                silent = str(error)
        if not found:
            raise PeerError(silent)
        return found

    @property
    def counters(self) -> dict[str, int]:
        """What happened to the clients of the shards, by name."""
        totals = dict.fromkeys(COUNTERS, 0)
        for client in self._clients():
            for name, count in client.counters.items():
                totals[name] += count
        return totals

    def links(self) -> dict[str, dict[str, float]]:
        """Totals of each shard by address: batches, bytes received, and seconds from request to batch."""
        return {
            endpoint: {
                "batches": shard.client.counters["batches"],
                "bytes": shard.client.counters["received_bytes"],
                "took_s": shard.took_s,
            }
            for endpoint, shard in self._shards.items()
        }

    @property
    def sockets(self) -> list[Socket]:
        """The present sockets, to be polled for reading together with others."""
        return [client.socket for client in self._clients()]

    def poll(self, timeout_ms: float = 0) -> None:
        """Wait for at most `timeout_ms` until some shard has said something, and handle it."""
        clients = self._clients()
        if len(clients) == 1:
            clients[0].poll(timeout_ms)
            return
        if not clients:
            # Without a shard there is no socket to wait on, and the caller would spin.
            system.sleep(timeout_ms / 1000)
        elif timeout_ms:
            poller = zmq.Poller()
            for socket in self.sockets:
                poller.register(socket, zmq.POLLIN)
            poller.poll(int(timeout_ms))
        for client in clients:
            client.poll(0)
