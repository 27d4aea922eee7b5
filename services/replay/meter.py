"""Counters as rates, for logs, telemetry, `--status` and Prometheus."""

from __future__ import annotations

import time
from typing import Any

from common.data.replay import Replay
from services.replay.requests import Requests

PERIOD_S = 1.0


class Meter:
    """Turns what a shard has done into numbers, once a second.

    Attributes:
        bad_messages: messages that were not served, by kind.
    """

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._start_s = self._last_s = time.monotonic()
        self._last: dict[str, float] = {}
        self._rates: dict[str, float] = {"inserts_per_s": 0.0, "samples_per_s": 0.0}

    def due(self) -> bool:
        """Whether a second is over; then the rates are new."""
        now_s = time.monotonic()
        span_s = now_s - self._last_s
        if span_s < PERIOD_S:
            return False
        counters = self._replay.counters
        totals = {"inserts_per_s": counters.inserted_items, "samples_per_s": counters.sampled_items}
        for name, total in totals.items():
            self._rates[name] = (total - self._last.get(name, 0)) / span_s
            self._last[name] = total
        self._last_s = now_s
        return True

    def metrics(self) -> dict[str, float]:
        """Telemetry."""
        replay = self._replay
        counters = replay.counters
        return {
            "replay/items": sum(table.size for table in replay.tables.values()),
            "replay/steps_inserted_total": counters.inserted_steps,
            "replay/samples_total": counters.sampled_items,
            "replay/inserts_per_s": self._rates["inserts_per_s"],
            "replay/samples_per_s": self._rates["samples_per_s"],
            "replay/bytes": replay.store.used_bytes if replay.store else 0,
        }

    def status(self, requests: Requests | None) -> dict[str, Any]:
        """Everything, for people and scripts."""
        replay = self._replay
        counters = replay.counters
        tables = {}
        for name, table in replay.tables.items():
            limiter = table.limiter
            tables[name] = {
                "items": table.size,
                "capacity": table.config.capacity,
                "total_priority": table.sampler.total,
                "inserted_total": limiter.inserted,
                "sampled_total": limiter.sampled,
                "min_items": limiter.min_items,
                "samples_per_insert": limiter.samples_per_insert,
                "sampling_blocked": table.sample_blocked(1) or "",
            }
        status = {
            "uptime_s": time.monotonic() - self._start_s,
            "cpu_s": time.process_time(),
            "chunks": replay.store.chunks if replay.store else 0,
            "bytes": replay.store.used_bytes if replay.store else 0,
            "bytes_limit": replay.budget_bytes,
            "restored_items": replay.restored_items,
            **self._rates,
            **{name: value for name, value in vars(counters).items() if isinstance(value, int)},
            "tables": tables,
        }
        if requests is not None:
            status |= {
                "insert_blocked": "; ".join(requests.paused.values()),
                "insert_blocked_s": sum(requests.blocked_s(name) for name in replay.tables),
                "held_inserts": len(requests.held),
                "parked_samples": requests.parked,
                "waits": requests.waits,
                "unsent_answers": requests.unsent,
                "rejected": dict(requests.rejected),
            }
        return status
