"""Which shard is asked for a batch.

Every batch comes from one shard, drawn with a chance in proportion to the sum of the weights in its table, as
far as it is known from its last batch. An item's probability is that chance times the one within its shard:
whatever the sums have become since the draw, it is the probability with which the item was really chosen, so
importance weights made of it are right. They have one scale, whichever shard a batch is from: the least
probability in the last batches of all shards. With one shard that is the batch's own.

A shard whose limiter has nothing to give takes part in no draw for a while: its requests are drawn anew from
the others. One that does not answer, or answers what cannot be used, is lost: others are asked instead, and
it takes part in no draw until it has answered what it owes, or the request that it is tried with. A batch
that comes so late answers the next request for as many rows: what a queue has given is nowhere else. Figures
over all shards are over those that took part in the draw of the batch.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from troupe.common import system
from troupe.common.data.sample import Share
from troupe.common.runtime.logging import Throttle
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.codec import SampleBatch
from troupe.common.wire.sockets import Backoff

_log = logging.getLogger(__name__)

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

MAX_LATE = 64
"""Batches of lost shards that are kept for later requests."""

_Key: TypeAlias = tuple[tuple[str, int], ...]


@dataclass
class _Wanted:
    """A batch that was asked for, and the chance of each shard that it could be asked of."""

    shares: Mapping[str, int]  # rows by table
    asked_s: float = 0.0
    chances: Mapping[Shard, float] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """The first table, whose weights decide about the shard."""
        return next(iter(self.shares))

    @property
    def key(self) -> _Key:
        """What makes it wait or not."""
        return tuple(self.shares.items())


@dataclass(eq=False)
class Shard:
    """One shard, and what is known about it."""

    client: ReplayClient
    # By table, what its last batch said: sum of the weights, and items.
    weights: dict[str, float] = field(default_factory=dict)
    items: dict[str, int] = field(default_factory=dict)
    # By shares and table, the least probability in its last batch.
    least: dict[_Key, dict[str, float]] = field(default_factory=dict)
    took_s: float = 0.0  # from request to batch, of all batches
    lost: bool = False  # what it owes was asked of others
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


class Draws:
    """The batches that somebody wants, each asked of a shard that was drawn for it.

    Attributes:
        shards: by address.
    """

    def __init__(self, seed: int | None = None) -> None:
        """`seed` is that of the choice of shards."""
        self.shards: dict[str, Shard] = {}
        self._unassigned: deque[_Wanted] = deque()
        self._late: deque[tuple[_Key, SampleBatch]] = deque(maxlen=MAX_LATE)  # what lost shards have given
        self._ready: deque[SampleBatch] = deque()  # of these, what was asked for since
        self._draws = system.generator(seed).random()
        self._throttle = Throttle(_LOG_PERIOD_S)

    @property
    def outstanding(self) -> int:
        """Batches requested and not received."""
        asked = sum(len(shard.wanted) for shard in self.shards.values() if not shard.lost)
        return len(self._unassigned) + asked + len(self._ready)

    def add(self, endpoint: str, client: ReplayClient) -> None:
        """Draw from this shard, too."""
        self.shards[endpoint] = Shard(client)

    def remove(self, endpoint: str) -> ReplayClient:
        """Draw from this shard no more: what was asked of it is asked of others. Its client."""
        shard = self.shards.pop(endpoint)
        self._unassigned.extend([] if shard.lost else shard.wanted.values())
        shard.client.cancel_samples()
        return shard.client

    def request(self, shares: Mapping[str, int]) -> None:
        """Ask a shard, which the first table's weights decide about, for so many rows of each table."""
        wanted = _Wanted(shares)
        for at, (key, batch) in enumerate(self._late):
            if key == wanted.key:
                self._ready.append(batch)
                del self._late[at]
                return
        self._unassigned.append(wanted)
        self.assign()

    def next(self) -> SampleBatch | None:
        """The next batch that has come, if one has; see `ShardedReplayClient.receive`."""
        if self._ready:
            return self._ready.popleft()
        # The oldest request first. In a fixed order, or by what each owes, one shard's batches would always
        # overtake another's where they come faster than they are taken: it would not be heard.
        for endpoint, shard in sorted(self.shards.items(), key=lambda each: each[1].oldest_s):
            batch = shard.client.receive(0)
            if shard.client.fault and shard.wanted:
                shard.trial = next(iter(shard.wanted.values())).shares
                shard.trial_s = system.monotonic() + shard.backoff.next_s()
                self._lose(endpoint, shard, shard.client.fault)
                shard.wanted.clear()
                shard.client.cancel_samples()
                continue
            self._draw_again(endpoint, shard)
            if batch is not None and self._complete(endpoint, shard, batch):
                return batch
        self._look_after()
        return None

    def cancel(self) -> None:
        """Forget the batches that were requested and not received."""
        self._unassigned.clear()
        self._ready.clear()
        for shard in self.shards.values():
            if not shard.lost:  # there it shows whether the shard is back
                shard.wanted.clear()
                shard.client.cancel_samples()

    def _chances(self, table: str, endpoints: Sequence[str]) -> dict[str, float]:
        """The chance of each of these shards to be asked for a batch of `table`, by address."""
        found = {endpoint: self.shards[endpoint].weights.get(table, 0.0) for endpoint in endpoints}
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
        live = {endpoint: shard for endpoint, shard in self.shards.items() if not shard.lost}
        ready = [endpoint for endpoint, shard in live.items() if shard.takes(key, now_s)]
        if not ready:  # one is as good as the other, and each may be the first to have something
            for shard in live.values():
                shard.waits_until_s.pop(key, None)
        return ready or list(live)

    def assign(self) -> None:
        """Ask shards for what has not been asked of any."""
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
            self._ask(self.shards[candidates[at]], wanted, chances)

    def _ask(self, shard: Shard, wanted: _Wanted, chances: Mapping[str, float]) -> None:
        wanted.asked_s = system.monotonic()
        wanted.chances = {self.shards[endpoint]: chance for endpoint, chance in chances.items()}
        if not shard.wanted:
            shard.answered_s = wanted.asked_s
        shard.wanted[shard.client.request_sample(wanted.shares)] = wanted

    def _draw_again(self, endpoint: str, shard: Shard) -> None:
        """Have others asked for what `shard` has just not given."""
        for number in shard.client.take_turned_down():
            wanted, late = self._answered(endpoint, shard, number)
            shard.waits_until_s[wanted.key] = shard.answered_s + WAIT_S
            if not late:
                self._unassigned.append(wanted)

    @staticmethod
    def _answered(endpoint: str, shard: Shard, number: int) -> tuple[_Wanted, bool]:
        """What `shard` has just answered, and whether others were asked for it since."""
        shard.answered_s = system.monotonic()
        wanted, late = shard.wanted.pop(number), shard.lost
        if late and not shard.wanted:
            _log.info("replay at %s is back", endpoint)
            shard.lost = False
            shard.backoff.reset()
        return wanted, late

    def _complete(self, endpoint: str, shard: Shard, batch: SampleBatch) -> bool:
        """Note what `batch` says, and make its figures those of all shards; False if it comes too late."""
        for share in batch.shares:
            shard.weights[share.table] = share.total_priority
            shard.items[share.table] = share.table_items
        wanted, late = self._answered(endpoint, shard, batch.request_id)
        shard.waits_until_s.pop(wanted.key, None)
        shard.took_s += shard.answered_s - wanted.asked_s
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
        if late:
            self._late.append((wanted.key, batch))
        return not late

    @staticmethod
    def _of_all(share: Share, shards: Collection[Shard]) -> Share:
        """`share` with the figures of the table over all `shards`; unheard ones count as average."""
        known = [each for each in shards if each.items.get(share.table)]
        items = sum(each.items[share.table] for each in known) * len(shards) / len(known)
        total = sum(each.weights[share.table] for each in known) * len(shards) / len(known)
        return replace(share, table_items=round(items), total_priority=total)

    def _look_after(self) -> None:
        """Ask others where a shard does not answer, and try those that are lost."""
        now_s = system.monotonic()
        for endpoint, shard in self.shards.items():
            if now_s >= shard.trial_s:
                shard.trial_s, shard.client.fault = math.inf, ""
                # As if drawn from it and those that answer.
                drawn = [each for each, known in self.shards.items() if known is shard or not known.lost]
                wanted = _Wanted(shard.trial)
                self._ask(shard, wanted, self._chances(wanted.table, drawn))
            others = any(not each.lost for each in self.shards.values() if each is not shard)
            if shard.lost or not shard.wanted or not others:
                continue
            if shard.client.silent_s >= LOST_S or now_s - shard.answered_s >= NO_BATCH_S:
                self._lose(endpoint, shard, "it does not answer")
        self.assign()

    def _lose(self, endpoint: str, shard: Shard, why: str) -> None:
        """Ask others for what was asked of `shard`."""
        if shard.lost:
            return
        if self._throttle(endpoint):
            _log.warning("lost replay at %s, sampling the other shards: %s", endpoint, why)
        shard.lost = True
        shard.waits_until_s.clear()
        self._unassigned.extend(_Wanted(each.shares) for each in shard.wanted.values())
