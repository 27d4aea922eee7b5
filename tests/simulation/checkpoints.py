"""What the learner has been told is on the disk, and what it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from troupe.services.learner.saving.counters import RunCounters

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger


class Checkpoints:
    """Checks that learners go on from states that one had, and from none before the last that was saved."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._run = ""
        self._saved = {"updates": -1, "version": -1, "steps": -1}

    def saved(self, meta: Mapping[str, Any]) -> None:
        """This is on the disk, as the learner is told."""
        self._saved = {name: max(before, int(meta[name])) for name, before in self._saved.items()}

    def resumed(self, run: str, digest: str, counters: RunCounters) -> None:
        """A learner begins with this, as its checkpoint says or anew."""
        ledger, saved = self._ledger, self._saved
        found = {name: getattr(counters, name) for name in saved}
        if any(found[name] < saved[name] for name in saved):
            ledger.wrong(f"a learner goes on from {found}, and {saved} had been saved")
        if self._run and run != self._run and saved["updates"] >= 0:
            ledger.wrong(f"a learner has begun run {run}, and {self._run} had been saved")
        self._run = run
        if ledger.lineage.updates_of(digest) != counters.updates:
            ledger.wrong(f"a learner has a state that nobody had after {counters.updates} updates")
