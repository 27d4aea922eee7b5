"""Distributions: how old and how stale sampled items are, and what priorities look like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from troupe.common import system
from troupe.common.data.sample import Sample
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.table import Table

AGE_BOUNDS_S = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0)
STALENESS_BOUNDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)

LOOK_AT = 4096
"""Quantiles are those of this many items, drawn at random."""

MAX_TRIES = 1 << 16
CHEAP_S = 0.005
"""Quantiles that took longer than this are told again until they have cost a twentieth of the time."""

EPOCH_S = 30.0
"""A version counts as the newest for one to two epochs, so that one of an abandoned future is forgotten."""


class Histogram:
    """Counts of values up to each of `bounds`, and above them all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    def observe(self, values: NDArray[np.float64]) -> None:
        """Count `values`."""
        at = np.searchsorted(self.bounds, values)
        self.counts += np.bincount(at, minlength=len(self.counts))
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Bounds and cumulative counts, as Prometheus has them."""
        bounds = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(bounds, np.cumsum(self.counts).astype(float).tolist(), strict=True))


class Statistics:
    """What is known about the items of every table beyond their number."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._rng = system.generator()
        self._ages = {name: Histogram(AGE_BOUNDS_S) for name in replay.tables}
        self._staleness = {name: Histogram(STALENESS_BOUNDS) for name in replay.tables}
        # From the items that are there: after a restart all of them would otherwise count as fresh.
        live = replay.store.live()["version"] if replay.store else np.zeros(0, np.int64)
        self._newest = self._newest_before = int(live.max(initial=0))
        self._epoch_s = system.monotonic()
        self._told: dict[str, tuple[float, dict[str, dict[str, float]]]] = {}

    @property
    def newest_version(self) -> int:
        """The newest parameters that anything inserted lately was made with."""
        return max(self._newest, self._newest_before)

    def inserted(self, version: int) -> None:
        """Note the version of an insert."""
        now_s = system.monotonic()
        if now_s - self._epoch_s > EPOCH_S:
            # A learner that went back to a checkpoint counts from there; a maximum for good would call all
            # its items stale.
            self._newest_before, self._newest, self._epoch_s = self._newest, 0, now_s
        self._newest = max(self._newest, version)

    def sampled(self, sample: Sample) -> None:
        """Count a batch."""
        at, now_s = 0, system.time()
        for share in sample.shares:
            rows = slice(at, at + share.count)
            self._ages[share.table].observe(np.maximum(now_s - sample.times_s[rows], 0.0))
            stale = self.newest_version - sample.versions[rows]
            self._staleness[share.table].observe(np.maximum(stale, 0).astype(np.float64))
            at += share.count

    def families(self) -> list[Metric]:
        """Histograms and quantiles of every table, for Prometheus."""
        prefix, by_table = "troupe_replay_", ["table"]
        ages = HistogramMetricFamily(
            f"{prefix}sampled_age_s", "seconds since sampled items came", labels=by_table
        )
        staleness = HistogramMetricFamily(
            f"{prefix}sampled_staleness", "versions since sampled items were made", labels=by_table
        )
        priorities = GaugeMetricFamily(
            f"{prefix}priority", "quantiles of the priorities", labels=[*by_table, "quantile"]
        )
        for name, table in self._replay.tables.items():
            for family, histogram in ((ages, self._ages[name]), (staleness, self._staleness[name])):
                family.add_metric([name], histogram.buckets(), histogram.sum)
            for quantile, value in _quantiles(table.priorities(self._some(table))).items():
                priorities.add_metric([name, quantile], value)
        return [ages, staleness, priorities]

    def quantiles(self, name: str) -> dict[str, dict[str, float]]:
        """Quantiles of the priorities, ages (in seconds) and staleness (in versions) of the items."""
        began_s = system.monotonic()
        until_s, found = self._told.get(name, (0.0, {}))
        if began_s >= until_s:  # a client may ask for the status again and again
            found = self._look(name)
            took_s = system.monotonic() - began_s
            self._told[name] = (began_s + (20 * took_s if took_s > CHEAP_S else 0.0), found)
        return found

    def _look(self, name: str) -> dict[str, dict[str, float]]:
        store, table = self._replay.store, self._replay.tables[name]
        slots = self._some(table)
        found = {"priority": _quantiles(table.priorities(slots))}
        if store is not None:
            rows = table.items(slots)["row"]
            found["age_s"] = _quantiles(system.time() - store.times_s[rows])
            found["staleness"] = _quantiles(np.maximum(self.newest_version - store.versions[rows], 0))
        return found

    def _some(self, table: Table) -> NDArray[np.int64]:
        """Slots of about `LOOK_AT` items of the table; of all of them where it has few."""
        slots = table.config.slots
        tries = min(LOOK_AT * slots // max(table.size, 1), MAX_TRIES)
        if table.size <= LOOK_AT or tries * table.size < slots * LOOK_AT // 16:
            return table.filled()
        # Drawn and not all of them: a status page must not hold up a shard of millions.
        some = self._rng.integers(0, slots, tries)
        return some[table.items(some)["commit"] != 0]


def _quantiles(values: NDArray) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"{q:g}": float(v) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}
