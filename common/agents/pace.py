"""How far acting may run ahead of learning, for agents that learn only from what the newest policies did."""

from __future__ import annotations

import math

from troupe.common.config.schema import Config

HELD_LIMIT_S = 20.0
"""After so long without a newer version one more round begins: the learner may lack the unrolls of others."""


class Pace:
    """Holds acting back at the ends of unrolls until the learner has published a newer version.

    Every round of unrolls becomes a batch and every batch a version, so it is known which version will learn
    from a round: with `max_staleness` 0 the one that acts, with 1 at most the one after that. A slot whose
    environment fails loses its unroll, and the batch would wait for it: a round with too few unrolls is
    followed by another one for the same batch, and what that has too many counts towards later rounds.

    Args:
        unrolls: of a batch; as many as slots, where one round makes a batch.
        unroll_steps: steps of a round.
        max_staleness: versions by which the one that learns may be newer than the one that acts.
    """

    def __init__(self, unrolls: int, unroll_steps: int, max_staleness: int) -> None:
        self._batch = unrolls
        self._unroll_steps = unroll_steps
        self._max_staleness = max_staleness
        self._learner: int | None = None  # version that learns from the round begun last
        self._steps = 0
        self._unrolls = 0  # complete, and not yet counted as part of a batch
        self._lacks = False

    @staticmethod
    def of(config: Config, slots: int) -> Pace | None:
        """That which a run wants of `slots` of its slots, if its algorithm limits staleness."""
        limit = config.agent.allowed_staleness
        if limit is None:
            return None
        tables = config.replay.sampled_tables()
        fresh = [table.share or config.replay.batch_size for table in tables if table.is_queue]
        # With fewer slots than a batch has fresh unrolls, several rounds make one batch.
        # This actor's share of a batch: all actors together have `total_slots`.
        unrolls = math.ceil(max(fresh, default=0) * slots / config.total_slots)
        return Pace(max(slots, unrolls), config.agent.unroll_steps, limit)

    @property
    def between_batches(self) -> bool:
        """Whether the next step begins a batch: only there may parameters change."""
        return not (self._steps or self._lacks)

    def holds(self, version: int) -> bool:
        """Whether a round is complete and another one must not begin with `version`."""
        if self._learner is None or not self.between_batches:
            return False
        return self._learner + 1 - version > self._max_staleness

    def stepped(self, version: int) -> bool:
        """Count a step of all slots, chosen by `version`; whether it ends a round.

        If it does, every complete unroll is to be handed over: the learner makes the newer version of them.
        """
        if self._steps == 0:
            # A round that lacks unrolls is completed by this one, so both go into the same version.
            next_learner = version if self._learner is None else self._learner + (not self._lacks)
            # At least the version that acts: this actor may have been away while others went on.
            self._learner = max(version, next_learner)
        self._steps = (self._steps + 1) % self._unroll_steps
        return self._steps == 0

    def completed(self, unrolls: int) -> None:
        """Count the unrolls that were handed over after the step counted last."""
        self._unrolls += unrolls
        if self._steps == 0:
            self._lacks = self._unrolls < self._batch
            if not self._lacks:
                # What is left over counts, or the surplus of every round would be lost, and the count fall
                # behind the learner's.
                self._unrolls -= self._batch

    def release(self) -> None:
        """Let a round begin: what was acted does not fill the learner's batch, which wants more."""
        self._learner = None
