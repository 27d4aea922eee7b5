"""Returns in training by who made them: each actor process, and the slot that explores least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np

from troupe.common.runtime.metrics import LEAST_EXPLORING_RETURN
from troupe.services.learner.control.reports import Report

MAX_ACTORS = 16
"""Actor processes with a curve of their own: those that were the first to finish a game."""

Explores = Callable[[list[int]], np.ndarray]
"""The exploration `[S]` of slots of the run, by `Agent.slot_epsilons`."""


class ActorReturns:
    """Collects games until the next row is due.

    What all slots return together, exploration included, says little of what has been learned where some act
    mostly at random. Readers of Ape-X watch its least exploring actor instead (Horgan et al. 2018, figure 2);
    here that is a slot.
    """

    def __init__(self, explores: Explores | None = None) -> None:
        """Without `explores`, nothing is known of slots."""
        self._explores = explores
        self._names: set[str] = set()
        self._of_actors: dict[str, list[float]] = defaultdict(list)
        self._of_slots: list[tuple[int, int, float]] = []

    def take(self, report: Report) -> None:
        """Take in the games of a report."""
        games = report.fields.episodes
        if report.role != "actor" or not games:
            return
        # A curve for each of a thousand actors would make TensorBoard unusable, and names are a peer's
        # choice.
        if len(self._names) < MAX_ACTORS:
            self._names.add(report.source)
        if report.source in self._names:
            self._of_actors[report.source] += [game.episode_return for game in games]
        self._of_slots += [
            (report.incarnation, game.slot, game.episode_return) for game in games if game.slot is not None
        ]

    def rows(self, leases: Mapping[int, set[int]]) -> dict[str, dict[str, float]]:
        """Metrics by source since the last call; `leases` are the slots of every actor by its incarnation."""
        rows = {source: {"actor/episode_return": float(np.mean(r))} for source, r in self._of_actors.items()}
        least = self._least_exploring(leases)
        # The actor that reports the game may not hold the slot, or not any more.
        scores = [
            r for process, slot, r in self._of_slots if slot == least and slot in leases.get(process, ())
        ]
        if scores:
            rows["actors"] = {LEAST_EXPLORING_RETURN: float(np.mean(scores))}
        self._of_actors.clear()
        self._of_slots.clear()
        return rows

    def _least_exploring(self, leases: Mapping[int, set[int]]) -> int:
        """The slot on lease with the smallest exploration; -1 where all explore alike."""
        slots = sorted(set().union(*leases.values()))
        if self._explores is None or len(slots) < 2:
            return -1
        epsilons = self._explores(slots)
        return slots[int(epsilons.argmin())] if epsilons.min() < epsilons.max() else -1
