"""What has gone wrong in the environments of a run."""

from __future__ import annotations

from typing import Any, ClassVar

from troupe.services.learner.control.server import Telemetry

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

    def take(self, telemetry: Telemetry) -> None:
        """The totals of one process, which only grow, and what went wrong last."""
        if telemetry.role != "actor":
            return
        counts = self._of.pop(telemetry.incarnation, dict.fromkeys(self.NAMES, 0.0))
        for name, metric in self.NAMES.items():
            counts[name] = min(MAX_COUNTED, max(counts[name], telemetry.metrics.get(metric, 0.0)))
        self._of[telemetry.incarnation] = counts
        if len(self._of) > self.MOST:
            oldest = self._of.pop(next(iter(self._of)))
            self._former = {name: self._former[name] + oldest[name] for name in self.NAMES}
        if text := telemetry.fields.get("trouble"):
            self._last = f"{telemetry.source}: {text}"

    def status(self) -> dict[str, Any]:
        """Sums, and `last` in words."""
        sums = {
            name: int(self._former[name] + sum(counts[name] for counts in self._of.values()))
            for name in self.NAMES
        }
        return {**sums, "last": self._last}
