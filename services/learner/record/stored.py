"""Whether the steps that a run counts were stored: actors report the ones, shards the others."""

from __future__ import annotations

import logging

from troupe.services.learner.control.reports import Report

_log = logging.getLogger(__name__)

SLACK_STEPS = 10_000
"""What may be on its way: in chunks that are not full, inserts that wait, a shard's next report."""
FACTOR = 2
MAX_SHARDS = 1000
"""Shard processes that are told apart; of older ones the sum remains."""


class StoredSteps:
    """Compares the steps that the learner counts with those that shards store.

    The first is what holders of an actor's key claim. A run that counts what nobody stored reaches its total
    without having learned from it: its record has to say so.
    """

    def __init__(self, steps: int) -> None:
        self._start = steps
        self._former = 0.0
        self._of: dict[int, float] = {}
        self.missing = False

    def take(self, report: Report, steps: int) -> None:
        """Take in the total of a shard process, and the steps that the run counts now."""
        inserted = report.metrics.get("replay/steps_inserted_total")
        if report.role != "replay" or inserted is None:
            return
        # The larger one, since a report may come late; by process, since a shard that is restarted counts
        # from 0.
        self._of[report.incarnation] = max(inserted, self._of.pop(report.incarnation, 0.0))
        if len(self._of) > MAX_SHARDS:
            self._former += self._of.pop(next(iter(self._of)))
        counted, stored = steps - self._start, self._former + sum(self._of.values())
        # Half of them may be missing: steps are lost with environments that fail and with unrolls that are
        # never finished, and that is no fraud.
        missing = counted > FACTOR * stored + SLACK_STEPS
        if missing and not self.missing:
            _log.warning(
                "%d steps were counted and %d stored: the rest was claimed by actors that store nothing; the "
                "log names those whose claims were refused",
                counted,
                int(stored),
            )
        self.missing = missing
