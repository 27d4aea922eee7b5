"""Who of a run has said nothing for a while: a process that hangs is running all the same."""

from __future__ import annotations

import time
from typing import Any

# Services report every second or so; a busy machine may keep one for several.
_LIMIT_S = 10.0
_SERVICES = ("actor", "replay", "evaluator")


class Silence:
    """Measures the age of the learner's status file, and what it says of the others."""

    def __init__(self, liveness_s: float) -> None:
        """`liveness_s`: the learner forgets a service that is silent for so long."""
        # Before the learner forgets it: afterwards its silence would no longer stand in the status.
        self._limit_s = min(_LIMIT_S, 0.75 * liveness_s)
        self._written_ns = 0
        self._written_s = 0.0
        self._heard: dict[str, float] = {}

    def look(self, status: dict[str, Any], written_ns: int) -> dict[str, float]:
        """Seconds of silence by name. While the learner is silent, nothing is known of the others.

        Args:
            status: what the learner wrote last, possibly empty.
            written_ns: when by the file's own clock; only whether it has changed matters.
        """
        now_s = time.monotonic()
        if not written_ns:
            return {}  # it has not begun to write
        if written_ns != self._written_ns:
            self._written_ns, self._written_s = written_ns, now_s
            self._take(status.get("peers", []), now_s)
        if now_s - self._written_s >= _LIMIT_S:
            return {"learner": now_s - self._written_s}
        ages = {name: now_s - heard_s for name, heard_s in self._heard.items()}
        return {name: age_s for name, age_s in ages.items() if age_s >= self._limit_s}

    def _take(self, peers: list[dict[str, Any]], now_s: float) -> None:
        here = {p["name"]: now_s - p["seen_s_ago"] for p in peers if p["role"] in _SERVICES}
        # Who left said so while it was heard of; who fell silent first is given up, and silent still.
        gone = {n: s for n, s in self._heard.items() if n not in here and now_s - s >= 0.9 * self._limit_s}
        self._heard = gone | here
