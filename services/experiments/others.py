"""The runs of a sweep that other processes have under way, where several share it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from troupe.common.errors import ConfigError, PeerError
from troupe.services.experiments.claims import FREE, HELD, Claims
from troupe.services.experiments.jobs import Job

if TYPE_CHECKING:
    from troupe.services.experiments.sweep import Runner

_LOOK_S = 2.0
PATIENCE_S = 600.0
"""With a file system that fails: a server of files is back within minutes."""


class Others:
    """What the others do, for a runner that shares its sweep with them.

    A run that another process has is `running` here, without a process.

    Args:
        runner: of this process.
        retry: try again what has failed until now.
    """

    def __init__(self, runner: Runner, *, retry: bool) -> None:
        self._runner = runner
        self._claims = Claims(runner.folder)
        self._next_s = 0.0
        self._failing_since_s: float | None = None
        newest = self._claims.newest()
        self._again: dict[str, int] = {}
        for job in runner.jobs:
            claim = newest.get(job.name)
            if claim is None or job.state == "done":
                continue
            # What claims say is newer than the sweep's record, which all of them write.
            job.state, job.error = ("running" if claim.state == HELD else "waiting"), ""
            if claim.state == "failed" and not retry:
                job.state, job.error = "failed", claim.error
            elif claim.state in ("failed", "done"):  # done with fewer steps than are wanted now
                self._again[job.name] = claim.number

    @property
    def wait(self) -> bool:
        """Whether they have still to be told what became of a run."""
        return self._claims.owes

    def take(self, job: Job) -> bool:
        """Claim a run that is to begin; returns whether this process has it now."""
        # It has the claim already where it failed to start the run.
        taken = self._claims.has(job.name) or self._claims.take(job.name, again=self._again.get(job.name, -1))
        if taken:
            self._again.pop(job.name, None)
        else:
            self._next_s = 0.0
            job.state = "running"  # until a closer look
        return taken

    def look(self) -> None:
        """Keep the claims of this process, and take in what became of those of others."""
        for name in self._claims.beat():
            [job] = [each for each in self._runner.jobs if each.name == name]
            self._runner.say(
                f"{name}: another process took it over, because this one was silent for too long"
            )
            job.abandon()
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _LOOK_S
        newest = self._claims.newest()
        for job in self._runner.jobs:
            claim = newest.get(job.name)
            # Its own may be without a process, where that could not be started.
            if claim is None or self._claims.has(job.name) or job.state not in ("waiting", "running"):
                continue
            if claim.state in (HELD, FREE):
                job.state = "running" if claim.state == HELD else "waiting"
            elif self._again.get(job.name) != claim.number:
                job.state, job.error = claim.state, claim.error

    def ended(self, job: Job) -> None:
        """Say what became of a run of this process."""
        is_over = job.state in ("done", "failed")
        with self.patient(ending=True):  # what cannot be written now, the next look writes
            self._claims.give_back(job.name, job.state if is_over else FREE, job.error)

    @contextlib.contextmanager
    def patient(self, *, ending: bool = False) -> Iterator[None]:
        """Around what is done again at the next look where the file system fails: one of a network may.

        Args:
            ending: nothing is raised: the runner goes on without what fails.

        Raises:
            PeerError: it has failed for too long.
        """
        try:
            yield
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if not isinstance(cause, OSError):
                raise
            now_s, folder = time.monotonic(), self._runner.folder
            if self._failing_since_s is None:
                self._failing_since_s = now_s
                self._runner.say(f"the file system of {folder} fails, trying again: {cause}")
            if now_s - self._failing_since_s > PATIENCE_S and not ending:
                raise PeerError(
                    f"the file system of {folder} has failed for {PATIENCE_S / 60:.0f} minutes ({cause}): "
                    "fix it, then repeat the command, which resumes the runs"
                ) from error
        else:
            self._failing_since_s = None
