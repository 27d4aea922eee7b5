"""Totals that only other processes can count: what failed in environments, and what shards stored."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from troupe.services.learner.control.reports import Report

_log = logging.getLogger(__name__)

MAX_PROCESSES = 1000
"""Processes that are told apart; of older ones the sums remain."""
MAX_COUNTED = 2.0**53
"""Limit on a total of one process, whatever it claims."""
SLACK_STEPS = 10_000
"""What may be on its way: in chunks that are not full, inserts that wait, a shard's next report."""
FACTOR = 2


class _Totals:
    """Sums over processes of totals that only grow."""

    def __init__(self, names: Collection[str]) -> None:
        self._former = dict.fromkeys(names, 0.0)
        self._of: dict[int, dict[str, float]] = {}

    def take(self, incarnation: int, reported: Mapping[str, float]) -> None:
        """Take in the totals of one process; a smaller one than before comes late."""
        counts = self._of.pop(incarnation, dict.fromkeys(self._former, 0.0))
        self._of[incarnation] = {
            name: min(MAX_COUNTED, max(count, reported.get(name, 0.0))) for name, count in counts.items()
        }
        if len(self._of) > MAX_PROCESSES:
            oldest = self._of.pop(next(iter(self._of)))
            self._former = {name: former + oldest[name] for name, former in self._former.items()}

    def sum(self, name: str) -> float:
        """Over all processes that have ever reported."""
        return self._former[name] + sum(counts[name] for counts in self._of.values())


class Troubles:
    """Failures and hangs of environments, over all actor processes."""

    NAMES: ClassVar = {"failures": "actor/env_restarts_total", "hangs": "actor/env_hangs_total"}

    def __init__(self) -> None:
        self._totals = _Totals(self.NAMES.values())
        self._episodes = 0
        self._last = ""

    def take(self, report: Report) -> None:
        """The totals of one process, which only grow, and what went wrong last."""
        if report.role != "actor":
            return
        self._totals.take(report.incarnation, report.metrics)
        self._episodes += len(report.fields.episodes)
        if text := report.fields.trouble:
            self._last = f"{report.source}: {text}"

    def status(self) -> dict[str, Any]:
        """Sums, the `episodes` that ended without a failure, and `last` in words."""
        sums = {name: int(self._totals.sum(metric)) for name, metric in self.NAMES.items()}
        return {**sums, "episodes": self._episodes, "last": self._last}


class StoredSteps:
    """Compares the steps that the learner counts with those that shards store.

    The first is what holders of an actor's key claim. A run that counts what nobody stored reaches its total
    without having learned from it: its record has to say so.
    """

    METRIC = "replay/steps_inserted_total"

    def __init__(self, steps: int) -> None:
        self._start = steps
        self._totals = _Totals([self.METRIC])
        self.missing = False

    def take(self, report: Report, steps: int) -> None:
        """Take in the total of a shard process, and the steps that the run counts now."""
        if report.role != "replay" or self.METRIC not in report.metrics:
            return
        self._totals.take(report.incarnation, report.metrics)
        counted, stored = steps - self._start, self._totals.sum(self.METRIC)
        # Half of them may be missing: steps are lost with environments that fail and with unrolls that are
        # never finished, and that is no fraud.
        missing = counted > FACTOR * stored + SLACK_STEPS
        if missing and not self.missing:
            _log.warning(
                "%d steps were counted and %d stored: the rest was claimed by actors that stored nothing; "
                "the log names those whose claims were refused",
                counted,
                int(stored),
            )
        self.missing = missing


def tell_unlearned(steps: int, learned: float) -> None:
    """Say so where a run is complete whose steps, each to be learned from once, mostly were not."""
    if steps > FACTOR * learned + SLACK_STEPS:
        _log.warning(
            "the run is complete with %d steps and has learned from %d of them: a shard acknowledged steps "
            "that it did not hand out, or actors claimed steps that they did not make",
            *(steps, int(learned)),
        )
