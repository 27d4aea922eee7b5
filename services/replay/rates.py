"""Counters as rates, for logs, telemetry, the status page and Prometheus."""

from __future__ import annotations

from collections import deque
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from troupe.common import system
from troupe.common.runtime.usage import OwnUsage
from troupe.common.wire import messages
from troupe.common.wire.codec import fits
from troupe.services.replay.requests import WAITS_FOR, RequestHandlers
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.table import Table

PERIOD_S = 1.0
SHARES_S = 10.0
"""Shares of the time are those of so long: chunks come, and batches go, several at once."""

MAX_CHARS = 1000
"""Of a text that grows with the number of tables."""

DROPPED = (
    "damaged_chunks",
    "duplicate_inserts",
    "evicted_early_items",
    "invalid_priorities",
    "unknown_priorities",
)
"""Counters of what was not done, or not for long."""


TOLD_TABLES = 4
"""Whose numbers are in the run's record; Prometheus has those of all."""


class Rates:
    """Turns what a shard has done into numbers, once a second."""

    def __init__(self, replay: Replay, requests: RequestHandlers) -> None:
        self._replay = replay
        self._requests = requests
        self._usage = OwnUsage("replay")
        self._start_s = self._last_s = system.monotonic()
        self._last = self._totals()
        self._rates = dict.fromkeys(self._last, 0.0)
        self._waited = deque([(self._start_s, self._waits())])
        self._shares = dict.fromkeys(self._waits(), 0.0)

    def due(self) -> bool:
        """Whether a second is over; then the rates are new."""
        now_s = system.monotonic()
        span_s = now_s - self._last_s
        if span_s < PERIOD_S:
            return False
        totals = self._totals()
        self._rates = {key: (total - self._last[key]) / span_s for key, total in totals.items()}
        self._last, self._last_s = totals, now_s
        self._waited.append((now_s, waits := self._waits()))
        while now_s - self._waited[0][0] > SHARES_S and len(self._waited) > 2:
            self._waited.popleft()
        then_s, before = self._waited[0]
        self._shares = {
            name: min(1.0, (seconds - before[name]) / (now_s - then_s)) for name, seconds in waits.items()
        }
        return True

    def metrics(self) -> dict[str, float]:
        """Telemetry: few numbers about the whole."""
        replay = self._replay
        counters = replay.counters
        return {
            "replay/items": sum(table.size for table in replay.tables.values()),
            "replay/restored_items": replay.restored_items,
            "replay/steps_inserted_total": counters.inserted_steps,
            "replay/samples_total": counters.sampled_items,
            "replay/inserts_per_s": self._rates["", "inserted"],
            "replay/samples_per_s": self._rates["", "sampled"],
            "replay/bytes": replay.store.used_bytes if replay.store else 0,
            "replay/damaged_items_total": replay.damaged_items,
            "replay/dropped_items_total": sum(table.dropped_items for table in replay.tables.values()),
            "replay/evicted_early_per_s": self._rates["", "evicted_early"],
            **self._shares,
            **self._usage.metrics(),
        }

    def by_table(self) -> dict[str, float]:
        """Telemetry of the first `TOLD_TABLES` tables, each number by name and table."""
        found: dict[str, float] = {}
        for name, table in list(self._replay.tables.items())[:TOLD_TABLES]:
            values = {"fill_share": table.size / max(1, table.config.capacity)}
            if table.limiter.samples_per_insert:
                values["samples_per_insert"] = table.limiter.current
                values["samples_per_insert_offset"] = table.limiter.offset
            for what, quantiles in self._requests.statistics.quantiles(name).items():
                if quantiles:
                    values |= {f"item_{what}": quantiles["0.5"], f"item_{what}_p90": quantiles["0.9"]}
            found |= {f"replay/{what}/{name}": value for what, value in values.items()}
        return found

    def details(self) -> dict[str, float]:
        """More numbers about the whole, for Prometheus."""
        replay, requests = self._replay, self._requests
        values: dict[str, float] = {
            "replay/chunks": replay.store.chunks if replay.store else 0,
            "replay/bytes_limit": replay.budget_bytes,
            "replay/batches_total": replay.counters.sampled_batches,
            "replay/held_inserts": len(requests.held),
            "replay/parked_samples": requests.parked,
            "replay/waits_total": requests.waits,
            "replay/unsent_answers_total": requests.server.unsent,
        }
        values["replay/failed_handshakes_total"] = sum(requests.server.handshakes.values())
        return values | {f"replay/{name}_total": getattr(replay.counters, name) for name in DROPPED}

    def families(self) -> list[Metric]:
        """What has labels, for Prometheus: numbers by table, and messages refused by kind."""
        rejected = CounterMetricFamily("troupe_replay_rejected", "messages refused", labels=["kind"])
        for kind, count in self._requests.server.rejections.by_kind.items():
            rejected.add_metric([kind], count)
        by_name: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for table_name, table in self._replay.tables.items():
            values = {
                "items": table.size,
                "capacity": table.config.capacity,
                "inserted_total": table.limiter.inserted,
                "sampled_total": table.limiter.sampled,
                "dropped_total": table.dropped_items,
                "inserts_per_s": self._rates[table_name, "inserted"],
                "samples_per_s": self._rates[table_name, "sampled"],
                "samples_per_insert": table.limiter.current,
                "blocked_inserts_s_total": self._requests.blocked_s(table_name),
            }
            for name, value in values.items():
                family_class = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                stem = "troupe_replay_table_" + name.removesuffix("_total")
                family = by_name.setdefault(
                    name, family_class(stem, f"{name} of the table", labels=["table"])
                )
                family.add_metric([table_name], value)
        return [rejected, *by_name.values(), *self._requests.statistics.families()]

    def status(self) -> dict[str, Any]:
        """Everything, for people and scripts."""
        replay, requests = self._replay, self._requests
        counters = {name: value for name, value in vars(replay.counters).items() if isinstance(value, int)}
        return {
            "uptime_s": system.monotonic() - self._start_s,
            "cpu_s": system.process_time(),
            "run": replay.run,
            "chunks": replay.store.chunks if replay.store else 0,
            "bytes": replay.store.used_bytes if replay.store else 0,
            "bytes_limit": replay.budget_bytes,
            "restored_items": replay.restored_items,
            "inserts_per_s": self._rates["", "inserted"],
            "samples_per_s": self._rates["", "sampled"],
            **counters,
            "damaged_items": replay.damaged_items,
            "newest_version": requests.statistics.newest_version,
            "insert_blocked": "; ".join(requests.paused.values())[:MAX_CHARS],
            "insert_blocked_s": sum(requests.blocked_s(name) for name in replay.tables),
            "held_inserts": len(requests.held),
            "parked_samples": requests.parked,
            "waits": requests.waits,
            "unsent_answers": requests.server.unsent,
            **requests.server.rejections.status(),
            "tables": {name: self._table(name, table) for name, table in replay.tables.items()},
        }

    def _table(self, name: str, table: Table) -> dict[str, Any]:
        limiter, config = table.limiter, table.config
        return {
            "items": table.size,
            "capacity": config.capacity,
            "sampler": config.sampler,
            "remover": config.remover,
            "limiter": config.limiter,
            "when_full": config.when_full,
            "max_times_sampled": config.max_times_sampled,
            "total_priority": table.sampler.total,
            "inserted_total": limiter.inserted,
            "sampled_total": limiter.sampled,
            "dropped_total": table.dropped_items,
            "inserts_per_s": self._rates[name, "inserted"],
            "samples_per_s": self._rates[name, "sampled"],
            "min_items": limiter.min_items,
            "samples_per_insert": limiter.samples_per_insert,
            "current_samples_per_insert": limiter.current,
            "sampling_blocked": table.sample_blocked(1) or "",
            "insert_blocked": self._requests.paused.get(name, ""),
            "insert_blocked_s": self._requests.blocked_s(name),
            "quantiles": self._requests.statistics.quantiles(name),
        }

    def _waits(self) -> dict[str, float]:
        """Seconds in which writers had to pause, and in which requests waited, by metric."""
        waited_s = self._requests.waited_s
        paused_s = max(map(self._requests.blocked_s, self._replay.tables))
        waits = {f"replay/waits_for_{what}_share": waited_s[what] for what in WAITS_FOR}
        return {"replay/insert_paused_share": paused_s, **waits}

    def _totals(self) -> dict[tuple[str, str], float]:
        """What rates are made of, by table; the empty name stands for all of them."""
        counters = self._replay.counters
        totals: dict[tuple[str, str], float] = {
            ("", "inserted"): counters.inserted_items,
            ("", "sampled"): counters.sampled_items,
            ("", "evicted_early"): counters.evicted_early_items,
        }
        for name, table in self._replay.tables.items():
            totals[name, "inserted"] = table.limiter.inserted
            totals[name, "sampled"] = table.limiter.sampled
        return totals


def cut_to_fit(status: dict[str, Any]) -> dict[str, Any]:
    """`status` without what a message has no room for: quantiles first, then who was turned down."""
    if fits(messages.StatusOk(values=status).message()):
        return status
    tables = {name: table | {"quantiles": {}} for name, table in status["tables"].items()}
    status = status | {"tables": tables}
    if fits(messages.StatusOk(values=status).message()):
        return status
    return status | {"rejected_by_peer": {}}
