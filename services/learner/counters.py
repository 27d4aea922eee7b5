"""How far the run is: steps, updates, versions."""

from __future__ import annotations

from typing import Any

from troupe.common.wire.control.budget import StepBudget


class RunCounters:
    """Steps of all actors, learner updates and the parameter version, across restarts of anyone."""

    def __init__(self, frames_per_step: int, budget: StepBudget) -> None:
        self.frames_per_step = frames_per_step
        self.budget = budget
        self.updates = 0
        self.version = 0

    @property
    def steps(self) -> int:
        """Environment steps of the run."""
        return self.budget.steps

    @property
    def frames(self) -> int:
        """Emulator frames of the run."""
        return self.steps * self.frames_per_step

    def to_meta(self) -> dict[str, Any]:
        """JSON values for the checkpoint."""
        return {**self.budget.to_meta(), "updates": self.updates, "version": self.version}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Take over what `to_meta` gave."""
        self.budget.load_meta(meta)
        self.updates = int(meta["updates"])
        self.version = int(meta["version"])
