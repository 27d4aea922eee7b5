"""How far the run is: steps, updates, versions. The only place that counts them."""

from __future__ import annotations

from typing import Any


class RunCounters:
    """Steps of all actors, learner updates and the parameter version, across restarts of anyone.

    Every actor process reports the steps that it has made since it was started, as a running total. Keeping
    the last total of each incarnation makes a repeated or late report harmless, and a report that follows the
    learner's own restart is counted from where the checkpoint left off.
    """

    def __init__(self, frames_per_step: int) -> None:
        self.frames_per_step = frames_per_step
        self.steps = 0
        self.updates = 0
        self.version = 0
        self._reported: dict[int, int] = {}

    @property
    def frames(self) -> int:
        """Emulator frames of the run."""
        return self.steps * self.frames_per_step

    def report_steps(self, incarnation: int, total: int) -> None:
        """Takes note that this actor process has made `total` steps since it was started."""
        before = self._reported.pop(incarnation, 0)
        self._reported[incarnation] = max(before, total)  # moves it to the end: forgotten last
        self.steps += max(0, total - before)

    def to_meta(self) -> dict[str, Any]:
        """JSON values for the checkpoint."""
        # JSON keys are text; the newest 1,000 actor processes are more than can still report.
        reported = {str(k): v for k, v in list(self._reported.items())[-1000:]}
        return {"steps": self.steps, "updates": self.updates, "version": self.version, "reported": reported}

    def load_meta(self, meta: dict[str, Any]) -> None:
        """Takes over what `to_meta` gave."""
        self.steps = int(meta["steps"])
        self.updates = int(meta["updates"])
        self.version = int(meta["version"])
        self._reported = {int(k): int(v) for k, v in meta.get("reported", {}).items()}
