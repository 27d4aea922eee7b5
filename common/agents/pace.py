"""How far acting may run ahead of learning, for agents that learn only from what the newest policies did."""

from __future__ import annotations

from typing import Any

HELD_LIMIT_S = 20.0
"""After so long without a newer version one more round begins: the learner may lack the unrolls of others."""


class Pace:
    """Holds acting back at the ends of unrolls until the learner has published a newer version.

    Every round of unrolls becomes a batch and every batch a version, so it is known which version will learn
    from a round: with `max_staleness` 0 the one that acts, with 1 at most the one after that.

    Args:
        unroll_steps: steps of a round.
        max_staleness: versions by which the one that learns may be newer than the one that acts.
    """

    def __init__(self, unroll_steps: int, max_staleness: int) -> None:
        self._unroll_steps = unroll_steps
        self._max_staleness = max_staleness
        self._learner: int | None = None  # version that learns from the round begun last
        self._steps = 0

    @staticmethod
    def of(agent: Any) -> Pace | None:
        """That which the section `agent` of a configuration wants, if it limits staleness."""
        limit = agent.allowed_staleness
        return None if limit is None else Pace(agent.unroll_steps, limit)

    def holds(self, version: int) -> bool:
        """Whether a round is complete and another one must not begin with `version`."""
        if self._steps or self._learner is None:
            return False
        return self._learner + 1 - version > self._max_staleness

    def stepped(self, version: int) -> None:
        """Count a step of all slots, chosen by `version`."""
        if self._steps == 0:
            self._learner = version if self._learner is None else max(version, self._learner + 1)
        self._steps = (self._steps + 1) % self._unroll_steps

    def release(self) -> None:
        """Let a round begin: what was acted does not fill the learner's batch, which wants more."""
        self._learner = None
