"""Asynchronous successive halving: which trials go on from a rung, and which have ended early.

ASHA, algorithm 2 of Li et al. 2020 (https://arxiv.org/abs/1810.05934): a trial pauses at each rung, which is
a number of steps. Whoever has room for a run takes the best paused trial that is among the top 1/eta of all
that have reached its rung so far, from the highest rung on that has one; otherwise one that has not begun.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from troupe.common.errors import ConfigError


def rungs_of(first_steps: int, eta: int, total_steps: int) -> list[int]:
    """The steps at which trials pause: `first_steps`, and eta times as many each, before the end."""
    rungs = []
    while first_steps < total_steps:
        rungs.append(first_steps)
        first_steps *= eta
    return rungs


def check_enough(trials: int, first_steps: int, eta: int, total_steps: int) -> None:
    """Refuse rungs of which no trial would reach all steps.

    Raises:
        ConfigError: says how many trials it takes.
    """
    rungs = rungs_of(first_steps, eta, total_steps)
    if not rungs:
        raise ConfigError(
            f"halving begins at {first_steps:,} steps, and runs have {total_steps:,}: lower first_steps"
        )
    left = trials
    for _ in rungs:
        left //= eta
    if not left:
        raise ConfigError(
            f"halving with eta = {eta} leaves none of {trials} trials after {len(rungs)} rungs "
            f"({', '.join(f'{rung:,}' for rung in rungs)} steps): it takes {eta ** len(rungs):,} trials, or "
            "a higher first_steps"
        )


class Halving:
    """What each trial was worth at the rungs that it has reached, and what follows.

    Args:
        rungs: steps, increasing.
        eta: of the trials that reach a rung one in so many goes on.
    """

    def __init__(self, rungs: Sequence[int], eta: int) -> None:
        self.rungs, self.eta = list(rungs), eta
        self._scores: dict[str, list[float]] = {}
        self._promoted: dict[str, int] = {}

    def rung(self, name: str) -> int | None:
        """The steps at which a trial pauses next; None where it goes on to the end."""
        passed = len(self._scores.get(name, ()))
        return self.rungs[passed] if passed < len(self.rungs) else None

    def before(self, name: str) -> int:
        """The steps of the last rung that a trial has reached; 0 before the first."""
        passed = len(self._scores.get(name, ()))
        return self.rungs[passed - 1] if passed else 0

    def reached(self, name: str, score: float) -> None:
        """A trial is at its next rung, and worth this much there: higher is better."""
        self._scores.setdefault(name, []).append(score)

    def is_paused(self, name: str) -> bool:
        """Whether it has reached a rung from which it has not gone on."""
        return len(self._scores.get(name, ())) > self._promoted.get(name, 0)

    def promotable(self, among: Collection[str]) -> str | None:
        """The trial that goes on next, if one of these should: the best of the highest rung that has one."""
        for rung in reversed(range(len(self.rungs))):
            scores = {name: passed[rung] for name, passed in self._scores.items() if len(passed) > rung}
            # Of two alike the one that came first, since the sort is stable.
            best = sorted(scores, key=lambda name: -scores[name])[: len(scores) // self.eta]
            for name in best:
                if self._promoted.get(name, 0) <= rung and name in among:
                    return name
        return None

    def promote(self, name: str) -> None:
        """It goes on from its rung."""
        self._promoted[name] = len(self._scores[name])

    def record(self) -> dict[str, Any]:
        """Everything, for `restored`."""
        return {
            "rungs": self.rungs,
            "eta": self.eta,
            "scores": self._scores,
            "promoted": self._promoted,
        }

    def restore(self, record: Mapping[str, Any], names: Collection[str]) -> None:
        """Take up what an earlier call has recorded of these trials.

        Raises:
            ConfigError: it had other rungs.
        """
        rungs = record["rungs"]
        same = all(mine == theirs for mine, theirs in zip(self.rungs, rungs, strict=False))
        if not same or record["eta"] != self.eta:
            raise ConfigError(
                f"the sweep was started with rungs at {rungs} steps and eta = {record['eta']}, not "
                f"{self.rungs} and {self.eta}: choose another --dir"
            )
        # With fewer steps in all there may be fewer rungs now.
        self._scores = {
            name: scores[: len(self.rungs)] for name, scores in record["scores"].items() if name in names
        }
        self._promoted = {
            name: min(passed, len(self.rungs)) for name, passed in record["promoted"].items() if name in names
        }
