"""How far the run is: steps, updates, versions."""

from __future__ import annotations

import math
from typing import Any

from troupe.services.learner.control.budget import StepBudget


class RunCounters:
    """Steps of all actors, learner updates and the parameter version, across restarts of anyone."""

    def __init__(self, frames_per_step: int, budget: StepBudget) -> None:
        self.frames_per_step = frames_per_step
        self.budget = budget
        self.updates = 0
        self.version = 0
        self.learned_steps = 0.0
        """Steps of the unrolls that were learned from, each counted once; see `Mixture.once`."""

    @property
    def steps(self) -> int:
        """Environment steps of the run."""
        return self.budget.steps

    @property
    def frames(self) -> int:
        """Emulator frames of the run."""
        return self.steps * self.frames_per_step

    def progress(self, *, learned: bool) -> float:
        """The share of the run that is done, 0 to 1: by the steps that were learned from, or all made.

        When steps are reported depends on the clock. Where each is learned from once, in order, what was
        learned says how far the run is, and says the same in every run of one seed.
        """
        done = self.learned_steps if learned else self.steps
        return min(1.0, max(0.0, done / self.budget.total))

    def to_meta(self) -> dict[str, Any]:
        """JSON values for the checkpoint."""
        return {
            **self.budget.to_meta(),
            "updates": self.updates,
            "version": self.version,
            "learned_steps": self.learned_steps,
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Take over what `to_meta` gave. Raises ValueError, among others, for what it cannot have given."""
        self.budget.load_meta(meta)
        self.updates = int(meta["updates"])
        self.version = int(meta["version"])
        # Checkpoints that are older than this number: nearly all that was made had been learned from.
        self.learned_steps = float(meta.get("learned_steps", self.steps))
        if min(self.updates, self.version, self.learned_steps) < 0 or not math.isfinite(self.learned_steps):
            raise ValueError("a negative number")
