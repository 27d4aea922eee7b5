"""What an actor measures and reports."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from services.actor.acting import Timing


class Meter:
    """Turns an actor's running totals into a report every `period_s`."""

    def __init__(self, period_s: float = 2.0) -> None:
        self._period_s = period_s
        self._last_s = time.monotonic()
        self._last = Timing()

    def due(self) -> bool:
        """Whether it is time for a report."""
        return time.monotonic() - self._last_s >= self._period_s

    def report(self, timing: Timing, staleness: int) -> tuple[dict[str, float], dict[str, Any]]:
        """Metrics and other fields since the last report; takes the episodes out of `timing`.

        `actor/steps` and `actor/insert_blocked_s` are totals since the process started, so that a lost
        report does no harm; the rest are means over the time since the last one.
        """
        now, last = time.monotonic(), self._last
        elapsed = max(1e-9, now - self._last_s)
        calls = max(1, timing.calls - last.calls)
        metrics = {
            "actor/steps": float(timing.steps),
            "actor/steps_per_s": (timing.steps - last.steps) / elapsed,
            "actor/env_ms": (timing.env_s - last.env_s) / calls * 1e3,
            "actor/inference_ms": (timing.inference_s - last.inference_s) / calls * 1e3,
            "actor/accumulate_ms": (timing.accumulate_s - last.accumulate_s) / calls * 1e3,
            "actor/insert_blocked_s": timing.blocked_s,
            "actor/insert_blocked_share": min(1.0, (timing.blocked_s - last.blocked_s) / elapsed),
            "actor/chunks_total": float(timing.chunks),
            "params/staleness": float(staleness),
        }
        episodes = [[episode.return_raw, episode.steps] for episode in timing.episodes]
        timing.episodes.clear()
        self._last_s, self._last = now, replace(timing)
        return metrics, {"episodes": episodes} if episodes else {}
