"""What has gone wrong in the environments of a run."""

from __future__ import annotations

from typing import Any, ClassVar

from troupe.services.learner.control.reports import Report

MAX_COUNTED = 2.0**53
"""Whatever an actor claims."""


class Troubles:
    """Failures and hangs of environments, over all actor processes."""

    NAMES: ClassVar = {"failures": "actor/env_restarts_total", "hangs": "actor/env_hangs_total"}
    MOST = 1000
    """Actor processes that are told apart; of older ones the sums remain."""

    def __init__(self) -> None:
        self._former = dict.fromkeys(self.NAMES, 0.0)
        self._of: dict[int, dict[str, float]] = {}
        self._last = ""

    def take(self, report: Report) -> None:
        """The totals of one process, which only grow, and what went wrong last."""
        if report.role != "actor":
            return
        counts = self._of.pop(report.incarnation, dict.fromkeys(self.NAMES, 0.0))
        for name, metric in self.NAMES.items():
            # Totals of a process only grow, so a late report must not lower them.
            counts[name] = min(MAX_COUNTED, max(counts[name], report.metrics.get(metric, 0.0)))
        self._of[report.incarnation] = counts
        if len(self._of) > self.MOST:
            oldest = self._of.pop(next(iter(self._of)))
            self._former = {name: self._former[name] + oldest[name] for name in self.NAMES}
        if text := report.fields.trouble:
            self._last = f"{report.source}: {text}"

    def status(self) -> dict[str, Any]:
        """Sums, and `last` in words."""
        sums = {
            name: int(self._former[name] + sum(counts[name] for counts in self._of.values()))
            for name in self.NAMES
        }
        return {**sums, "last": self._last}
