"""Bugs to be found in what the learner keeps on its disk; see `planted.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.simulation.plants import Change, around, near
from troupe.common.runtime import checkpoint
from troupe.common.runtime.checkpoint import Checkpoint, load_checkpoint
from troupe.services.learner.saving import checkpoints
from troupe.services.learner.saving.checkpoints import RunCheckpoints
from troupe.services.learner.saving.counters import RunCounters


@near("", "power_cut learn")
def a_checkpoint_is_named_before_it_is_on_the_disk() -> Change:
    return checkpoint, "fsync_path", lambda path: None


@near("", "kill learn")
def a_restart_goes_on_from_the_oldest_checkpoint() -> Change:
    def load(directory: Path) -> Checkpoint:
        return load_checkpoint(min(directory.glob("step-*")))

    return checkpoints, "load_newest", load


@near("", "kill learn")
def a_restart_counts_updates_anew() -> Change:
    def load(real: Any, self: Any, meta: Any) -> None:
        real(self, {**meta, "updates": 0})

    return around(RunCounters, "load_meta", load)


@near("", "kill learn", "power_cut learn", early_s=4.5)
def a_run_is_told_before_it_is_saved() -> Change:
    def save(real: Any, self: Any) -> None:
        if self._counters.updates:
            real(self)

    return around(RunCheckpoints, "save", save)
