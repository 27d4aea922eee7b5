"""What shards hold, compared with what they have acknowledged."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.configuration import BATCH
from tests.simulation.plan import Plan

if TYPE_CHECKING:
    from tests.simulation.ledger import Key, Ledger

INSERT_ITEMS = 3
"""Items of the longest insert: a kill may leave the table without what has made room for one."""


class Contents:
    """Follows what shards hold through kills and power cuts.

    A full table makes room for an insert when that arrives, not when it is on the disk. So after a power cut
    its oldest inserts may be gone, and those that took their places as well. Whatever is acknowledged and was
    in the table at that moment has to be there.
    """

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self._ledger, self._plan = ledger, plan
        self._held: dict[str, set[Key]] = {}
        """By shard whose power was cut: what it held then, until it is there again."""
        self._gone: dict[str, set[Key]] = defaultdict(set)
        """By shard: what it did not hold when its power was cut last, and has not stored since."""
        self._order: dict[Key, int] = {}
        """Ages of inserts in their tables. After a power cut one may come again, and is the newest then."""
        self._ages = itertools.count(1)

    def stored(self, address: str, insert: Any) -> None:
        """A shard has stored this."""
        key = address, insert.incarnation, insert.sequence
        self._gone[address].discard(key)
        self._order[key] = next(self._ages)

    def loses_power(self, address: str, replay: Any, kills: int) -> None:
        """The power of this shard is cut."""
        present = _present(address, replay)
        if self._plan.table == "small" and replay.store is not None:
            self._check_removed(address, present, replay.tables["default"], kills)
        self._held[address] = present
        self._gone[address] = {key for key in self._ledger.sent if key[0] == address} - present

    def opened(self, address: str, replay: Any) -> None:
        """A shard has opened its folder: a kill leaves nothing of it damaged, at whatever line."""
        damaged = replay.counters.damaged_chunks, replay.damaged_items, replay._producers.damaged
        if any(damaged) and not self._ledger.power_cuts:
            self._ledger.wrong(f"{address} finds chunks, items or producers damaged: {damaged}")
        present = _present(address, replay)
        self._gone[address] -= present
        for key in present - self._order.keys():  # its process was killed as soon as that was stored
            self._order[key] = next(self._ages)
        # What a queue has handed out goes, whoever got it.
        held = set() if self._plan.table == "queue" else self._held.pop(address, set())
        lost = (held & self._ledger.acked) - present
        if lost:
            self._ledger.wrong(f"acknowledged inserts are gone after a power cut: {sorted(lost)[:3]}")

    def check(self, address: str, replay: Any, kills: int) -> None:
        """Compare a shard's contents with what it has acknowledged."""
        ledger = self._ledger
        acked = {key for key in ledger.acked if key[0] == address}
        if replay.store is None:
            if acked:
                ledger.wrong(f"{address} has nothing of {len(acked)} acknowledged inserts")
            return
        chunks, table = self._check_live(address, replay.store), replay.tables["default"]
        present = _present(address, replay)
        missing = acked - present
        if self._plan.table == "queue":
            self._check_queue(missing, kills)
        elif self._plan.table == "small":
            self._check_removed(address, present, table, kills)
        else:
            if missing:
                ledger.wrong(f"acknowledged inserts are gone: {sorted(missing)[:3]} of {len(acked)}")
            items = sum(len(ledger.sent[key]) for key in chunks & ledger.sent.keys())
            if table.size != items:
                ledger.wrong(f"{address} has {table.size} items of {items} in its chunks")
            if not kills and table.limiter.inserted != items:
                ledger.wrong(f"{address} counts {table.limiter.inserted} inserted items of {items}")

    def _check_live(self, address: str, store: Any) -> set[Key]:
        """Check each chunk by itself; the inserts that they are of."""
        ledger, live = self._ledger, store.live()
        keys = _keys(address, live)
        twice = [key for key, count in Counter(keys).items() if count > 1]
        if twice:
            ledger.wrong(f"inserts are stored twice: {twice[:3]}")
        if len(np.unique(live["commit"])) < len(live):
            ledger.wrong(f"chunks share a commit: {sorted(live['commit'].tolist())}")
        strange = set(keys) - ledger.sent.keys()
        if strange:
            ledger.wrong(f"inserts are stored that nobody sent: {sorted(strange)[:3]}")
        numbers = store.columns["number"]._data
        for key, row in zip(keys, live, strict=True):
            start = int(row["starts"][1])
            found = tuple(numbers[start : start + int(row["steps"])].tolist())
            if found != ledger.sent.get(key):
                ledger.wrong(f"insert {key} holds {found}, sent was {ledger.sent.get(key)}")
        return set(keys)

    def _check_queue(self, missing: set[Key], kills: int) -> None:
        sent, given = self._ledger.sent, self._ledger.given
        lost = sum(1 for key in missing for number in sent[key] if not given[number])
        if lost > kills * BATCH:
            self._ledger.wrong(f"{lost} acknowledged items have left a queue, and nobody got them")

    def _check_removed(self, address: str, present: set[Key], table: Any, kills: int) -> None:
        """A full table drops its oldest, and one that has room drops nothing."""
        acked = {key for key in self._ledger.acked if key[0] == address}
        there = [key in present for key in sorted(acked, key=lambda key: self._order.get(key, 0))]
        if there != sorted(there):
            self._ledger.wrong(f"others than the oldest inserts are gone: {there}")
        capacity = table.config.capacity
        least = capacity - INSERT_ITEMS if kills else capacity
        if acked - present - self._gone[address] and table.size < least:
            self._ledger.wrong(
                f"inserts are gone from a table of {table.size} items, {capacity} may be there"
            )


def _present(address: str, replay: Any) -> set[Key]:
    """Inserts of which items are in the table; a chunk that a reader may be reading outlives its items."""
    store, table = replay.store, replay.tables["default"]
    if store is None:
        return set()
    rows = np.unique(table.items(table.filled())["row"])
    return set(_keys(address, store._records[rows[store.commits[rows] != 0]]))


def _keys(address: str, records: np.ndarray) -> list[Key]:
    return [(address, int(each["incarnation"]), int(each["sequence"])) for each in records]
