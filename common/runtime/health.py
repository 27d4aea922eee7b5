"""What this process last said about itself; `troupe.common.runtime.http` shows it where that is asked for.

One set of values per process, so that a main loop can report without knowing whether anybody looks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from prometheus_client import Metric

from troupe.common import system

STALE_AFTER_S = 120.0
"""A main loop that has not reported for so long counts as stuck."""

_lock = threading.Lock()
_values: dict[str, float] = {}
_families: Sequence[Metric] = ()
_reported_at: float | None = None


def report(metrics: Mapping[str, float] | None = None, families: Sequence[Metric] | None = None) -> None:
    """Say that the main loop is alive, with its newest values by name, and those that have labels."""
    global _reported_at, _families
    with _lock:
        # What a service has said once stays: a scrape between two reports must find every metric.
        _values.update(metrics or {})
        if families is not None:
            _families = families
        _reported_at = system.monotonic()


def values() -> dict[str, float]:
    """The newest value of everything that was reported."""
    with _lock:
        return dict(_values)


def families() -> Sequence[Metric]:
    """What was last reported with labels."""
    with _lock:
        return _families


def ready() -> tuple[bool, str]:
    """Whether the service does its work: it has reported once."""
    return (
        (True, "ok") if _reported_at is not None else (False, "starting, or waiting for a peer: see the log")
    )


def healthy() -> tuple[bool, str]:
    """Whether the main loop runs; a service that still waits to begin is healthy."""
    age_s = 0.0 if _reported_at is None else system.monotonic() - _reported_at
    return (
        (True, "ok") if age_s < STALE_AFTER_S else (False, f"the main loop has been silent for {age_s:.0f} s")
    )
