"""Several replay shards as one: inserts go round, samples come in proportion to priority over all of them.

Every batch comes from one shard, drawn with a chance in proportion to the sum of the weights in its table, as
far as it is known from its last batch. An item's probability is that chance times the one within its shard:
whatever the sums have become since the draw, it is the probability with which the item was really chosen, so
importance weights made of it are right. They have one scale, whichever shard a batch is from: the least
probability in the last batches of all shards. With one shard that is the batch's own.

A shard whose limiter has nothing to give takes part in no draw for a while: its requests are drawn anew from
the others. One that does not answer, or answers what cannot be used, is lost: it takes part in none until it
has given the batch that it is tried with now and then. Figures over all shards are over those that took part
in the draw of the batch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import zmq
from numpy.typing import ArrayLike

from troupe.common import system
from troupe.common.data.sample import Share
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.errors import PeerError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire.replay.batch_reader import ArrayPool
from troupe.common.wire.replay.client import COUNTERS, ReplayClient
from troupe.common.wire.replay.codec import SampleBatch
from troupe.common.wire.replay.sampler import Sampler
from troupe.common.wire.sockets import Backoff, Socket

_log = logging.getLogger(__name__)

NO_SHARD = "no replay shard has joined"

LOST_S = 3.0
"""A shard that has been silent for so long is not asked for batches that somebody waits for."""

NO_BATCH_S = 60.0
"""Nor is one that speaks, but has answered no request for so long."""

FAULT_S = (1.0, 60.0)
"""A shard whose answers cannot be used is tried again after this; each time the pause doubles, up to that."""

_LOG_PERIOD_S = 10.0

WAIT_S = 2.0
"""A shard that had nothing to sample takes part in no draw for so long, and then gets one request to try."""

EVEN_SHARE = 0.01
"""Share of the batches that is drawn evenly, so that no shard is ever out of sight."""


_Key: TypeAlias = tuple[tuple[str, int], ...]


@dataclass
class _Wanted:
    """A batch that was asked for, and the chance of each shard that it could be asked of."""

    shares: Mapping[str, int]  # rows by table
    asked_s: float = 0.0
    chances: Mapping[_Shard, float] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """The first table, whose weights decide about the shard."""
        return next(iter(self.shares))

    @property
    def key(self) -> _Key:
        """What makes it wait or not."""
        return tuple(self.shares.items())


@dataclass(eq=False)
class _Shard:
    """What is known about one shard."""

    client: ReplayClient
    # By table, what its last batch said: sum of the weights, and items.
    weights: dict[str, float] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    # By shares and table, the least probability in its last batch.
    least: dict[_Key, dict[str, float]] = field(default_factory=dict)
    took_s: float = 0.0  # from request to batch, of all batches
    lost: bool = False
    trial: Mapping[str, int] = field(default_factory=dict)  # what is asked of it to see whether it is back
    trial_s: float = math.inf  # when
    backoff: Backoff = field(default_factory=lambda: Backoff(*FAULT_S))
    answered_s: float = 0.0  # when it answered, or was asked and owed nothing before
    wanted: dict[int, _Wanted] = field(default_factory=dict)  # by the client's number of the request
    waits_until_s: dict[_Key, float] = field(default_factory=dict)  # where it had nothing to sample

    @property
    def oldest_s(self) -> float:
        """When the oldest of its requests was asked; a shard that is tried again comes before all others."""
        if self.lost:
            return -math.inf
        return min((each.asked_s for each in self.wanted.values()), default=math.inf)

    def takes(self, key: _Key, now_s: float) -> bool:
        """Whether it takes part in a draw: after a wait, for one request at a time."""
        until_s = self.waits_until_s.get(key, 0.0)
        return not until_s or (now_s >= until_s and all(each.key != key for each in self.wanted.values()))


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
        self._shards: dict[str, _Shard] = {}
        self._gone: dict[str, ReplayClient] = {}
        self._unassigned: deque[_Wanted] = deque()
        self._draws = system.generator(seed).random()
        self._turn = 0
        self._throttle = Throttle(_LOG_PERIOD_S)
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
                self._shards[endpoint] = _Shard(client)
        for endpoint in [known for known in self._shards if known not in endpoints]:
            _log.info("%s no longer uses replay at %s", self._name, endpoint)
            shard = self._shards.pop(endpoint)
            self._unassigned.extend(shard.wanted.values())
            shard.client.cancel_samples()
            if shard.client.counters["inserts"]:
                # Its numbers go on when it is back: the shard would take a new client's for repeats.
                self._gone[endpoint] = shard.client
            else:
                shard.client.close()
        self._assign()

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
        return len(self._unassigned) + sum(len(shard.wanted) for shard in self._shards.values())

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
        self._unassigned.append(_Wanted(shares))
        self._assign()

    def receive(self, timeout_s: float) -> SampleBatch | None:
        """The next batch from any shard; None after `timeout_s` (see `wait_reason`).

        Its `probabilities`, `table_items` and `total_priority` are those over all shards that it could
        have come from, and its `min_probabilities` are the least in the last batches of these.
        """
        deadline_s = system.monotonic() + timeout_s
        while True:
            # The oldest request first. In a fixed order, or by what each owes, one shard's batches would
            # always overtake another's where they come faster than they are taken: it would not be heard.
            for endpoint, shard in sorted(self._shards.items(), key=lambda each: each[1].oldest_s):
                batch = shard.client.receive(0)
                if shard.client.fault and (shard.wanted or (shard.lost and shard.trial_s == math.inf)):
                    self._lose(endpoint, shard, shard.client.fault, shard.backoff.next_s())
                    continue
                self._draw_again(endpoint, shard)
                if batch is not None and self._complete(endpoint, shard, batch):
                    return batch
            self._look_after()
            left_s = deadline_s - system.monotonic()
            if left_s <= 0:
                return None
            self.poll(min(left_s * 1000 + 1, 200))

    def cancel_samples(self) -> None:
        """Forget the batches that were requested and not received."""
        self._unassigned.clear()
        for shard in self._shards.values():
            shard.wanted.clear()  # what comes nevertheless is given back
            if not shard.lost:  # there it is the test whether the shard is back
                shard.client.cancel_samples()

    def update(
        self, batch: SampleBatch, priorities: ArrayLike, tables: Collection[str] | None = None
    ) -> None:
        """As that of `ReplayClient`, if the shard of `batch` is still there."""
        shard = self._shards.get(batch.shard)
        if shard is not None:
            shard.client.update(batch, priorities, tables)

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

    # ---------------------------------------------------------------- which shard

    def _chances(self, table: str, endpoints: Sequence[str]) -> dict[str, float]:
        """The chance of each of these shards to be asked for a batch of `table`, by address."""
        found = {endpoint: self._shards[endpoint].weights.get(table, 0.0) for endpoint in endpoints}
        known = [weight for weight in found.values() if weight > 0]
        # A shard that has said nothing yet counts as average: at 0 it would never be asked, and never say
        # anything.
        usual = sum(known) / len(known) if known else 1.0
        weights = {endpoint: weight or usual for endpoint, weight in found.items()}
        total = sum(weights.values())
        return {
            endpoint: (1 - EVEN_SHARE) * weight / total + EVEN_SHARE / len(weights)
            for endpoint, weight in weights.items()
        }

    def _candidates(self, key: _Key) -> list[str]:
        """Addresses of the shards to draw from: those that answer, and of them those that need not wait."""
        now_s = system.monotonic()
        live = {endpoint: shard for endpoint, shard in self._shards.items() if not shard.lost}
        ready = [endpoint for endpoint, shard in live.items() if shard.takes(key, now_s)]
        if not ready:  # one is as good as the other, and each may be the first to have something
            for shard in live.values():
                shard.waits_until_s.pop(key, None)
        return ready or list(live)

    def _assign(self) -> None:
        while self._unassigned:
            candidates = self._candidates(self._unassigned[0].key)
            if not candidates:
                return
            wanted = self._unassigned.popleft()
            chances = self._chances(wanted.table, candidates)
            # Steps of the golden ratio: each draw is uniform, and a few of them are spread evenly already.
            self._draws = (self._draws + 0.6180339887498949) % 1.0
            bounds = np.cumsum(list(chances.values()))
            at = min(int(np.searchsorted(bounds, self._draws * bounds[-1], side="right")), len(bounds) - 1)
            wanted.chances = {self._shards[endpoint]: chances[endpoint] for endpoint in candidates}
            shard = self._shards[candidates[at]]
            if not shard.wanted:
                shard.answered_s = system.monotonic()
            wanted.asked_s = system.monotonic()
            shard.wanted[shard.client.request_sample(wanted.shares)] = wanted

    def _draw_again(self, endpoint: str, shard: _Shard) -> None:
        """Have others asked for what `shard` has just not given."""
        for number in shard.client.take_turned_down():
            shard.answered_s = system.monotonic()
            self._is_back(endpoint, shard)
            wanted = shard.wanted.pop(number, None)
            if wanted is not None:
                shard.waits_until_s[wanted.key] = system.monotonic() + WAIT_S
                self._unassigned.append(wanted)

    @staticmethod
    def _is_back(endpoint: str, shard: _Shard) -> None:
        if shard.lost:
            _log.info("replay at %s is back", endpoint)
            shard.lost, shard.trial_s = False, math.inf
            shard.backoff.reset()

    def _complete(self, endpoint: str, shard: _Shard, batch: SampleBatch) -> bool:
        """Note what `batch` says, and make its figures those of all shards; False if nobody wants it."""
        for share in batch.shares:
            shard.weights[share.table] = share.total_priority
            shard.items[share.table] = share.table_items
        shard.answered_s = system.monotonic()
        self._is_back(endpoint, shard)
        wanted = shard.wanted.pop(batch.request_id, None)
        if wanted is not None:
            shard.waits_until_s.pop(wanted.key, None)
            shard.took_s += shard.answered_s - wanted.asked_s
        if wanted is None:  # a test whether the shard is there
            self.recycle(batch)
            return False
        batch.shard = endpoint
        # The chances at the time of the draw, which are kept with the request: by now the weights have
        # changed.
        batch.probabilities = batch.probabilities * wanted.chances[shard]
        shard.least[wanted.key] = batch.min_probabilities
        # The batch's own alone would make up for the chance of its shard: an improbable batch would weigh as
        # much as any other.
        batch.min_probabilities = {
            table: min(
                chance * each.least[wanted.key][table]
                for each, chance in wanted.chances.items()
                if table in each.least.get(wanted.key, {})
            )
            for table in batch.min_probabilities
        }
        batch.shares = [self._of_all(share, wanted.chances) for share in batch.shares]
        batch.table_items = batch.shares[0].table_items
        batch.total_priority = batch.shares[0].total_priority
        return True

    @staticmethod
    def _of_all(share: Share, shards: Collection[_Shard]) -> Share:
        """`share` with the figures of the table over all `shards`; unheard ones count as average."""
        known = [each for each in shards if each.items.get(share.table)]
        items = sum(each.items[share.table] for each in known) * len(shards) / len(known)
        total = sum(each.weights[share.table] for each in known) * len(shards) / len(known)
        return replace(share, table_items=round(items), total_priority=total)

    def _look_after(self) -> None:
        """Ask others where a shard does not answer, and try those that are lost."""
        now_s = system.monotonic()
        for endpoint, shard in self._shards.items():
            if now_s >= shard.trial_s:
                shard.trial_s, shard.client.fault = math.inf, ""
                shard.client.cancel_samples()
                shard.client.request_sample(shard.trial)
            others = any(not each.lost for each in self._shards.values() if each is not shard)
            if shard.lost or not shard.wanted or not others:
                continue
            if shard.client.silent_s >= LOST_S or now_s - shard.answered_s >= NO_BATCH_S:
                self._lose(endpoint, shard, "it does not answer", 0.0)
        self._assign()

    def _lose(self, endpoint: str, shard: _Shard, why: str, pause_s: float) -> None:
        """Ask others for what was asked of `shard`, and try it with one request after a pause."""
        if not shard.lost and self._throttle(endpoint):
            _log.warning("replay at %s is lost, others are sampled: %s", endpoint, why)
        if shard.wanted:
            shard.trial = next(iter(shard.wanted.values())).shares
        shard.lost, shard.trial_s = True, system.monotonic() + pause_s
        shard.waits_until_s.clear()
        shard.client.cancel_samples()
        self._unassigned.extend(shard.wanted.values())
        shard.wanted.clear()
