"""Who of a run has said nothing for a while: a process that hangs is running all the same."""

from __future__ import annotations

import time
from typing import Any

from troupe.common.runtime.files import SILENT_S, silent_after_s

_SERVICES = ("actor", "replay", "evaluator")


class Silence:
    """Measures the age of the learner's status file, and what it says of the others."""

    def __init__(self, liveness_s: float) -> None:
        """`liveness_s`: the learner forgets a service that is silent for so long."""
        # Before the learner forgets it: afterwards its silence would no longer stand in the status.
        self._max_s = 0.75 * liveness_s
        self._written_ns = 0
        self._written_s = 0.0
        self._heard: dict[str, tuple[float, float]] = {}  # when last, and how long each may be silent

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
        if now_s - self._written_s >= SILENT_S:
            return {"learner": now_s - self._written_s}
        return {
            name: now_s - heard_s
            for name, (heard_s, limit_s) in self._heard.items()
            if now_s - heard_s >= limit_s
        }

    def _take(self, peers: list[dict[str, Any]], now_s: float) -> None:
        here = {
            p["name"]: (now_s - p["seen_s_ago"], min(silent_after_s(p), self._max_s))
            for p in peers
            if p["role"] in _SERVICES
        }
        # Who left said so while it was heard of; who fell silent first is given up, and silent still.
        gone = {
            name: (heard_s, limit_s)
            for name, (heard_s, limit_s) in self._heard.items()
            if name not in here and now_s - heard_s >= 0.9 * limit_s
        }
        self._heard = gone | here
