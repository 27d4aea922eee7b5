"""Successive halving of a sweep's runs: they pause at rungs, and the best of them go on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from troupe.services.experiments import report
from troupe.services.experiments.course import Course
from troupe.services.experiments.halving import Halving, rungs_of
from troupe.services.experiments.jobs import Job

if TYPE_CHECKING:
    from troupe.services.experiments.sweep import Runner


class Rungs(Course):
    """See the base class."""

    key = "halving"

    def __init__(self, runner: Runner, record: Mapping[str, Any], totals: Mapping[str, int]) -> None:
        super().__init__(runner, record, totals)
        wanted = runner.sweep.section.halving
        assert wanted is not None
        self._halving = Halving(rungs_of(wanted.first_steps, wanted.eta, self._total), wanted.eta)
        if record:
            self._halving.restore(record, totals)

    def record(self) -> dict[str, Any]:
        """Everything, for the next call."""
        return self._halving.record()

    def take_up(self, job: Job) -> None:
        """Have a trial wait for its promotion. One that had ended early may be among the best of more."""
        if self._halving.is_paused(job.name) and job.state != "failed":
            job.state = "paused"

    def look(self, job: Job) -> None:
        """Pause a trial that has reached its next rung, unless it is the one that would go on from there."""
        halving, runner = self._halving, self._runner
        run, rung = job.run(), halving.rung(job.name)
        if run is None or rung is None or run.steps < rung:
            return
        # What was played after the rung before: an older network says nothing of this one.
        value = run.newest_since(halving.before(job.name))
        if value is None:
            return
        halving.reached(job.name, value)
        said = f"{job.name} is worth {report.number(value)} at {rung:,} steps"
        if halving.promotable([job.name, *self._paused()]) == job.name:
            halving.promote(job.name)
            runner.say(f"{said}, and goes on")
        else:
            job.state = "paused"
            job.stop()
            runner.say(f"{said}, and pauses")
        runner.save()

    def ended(self, job: Job) -> None:
        """Note a trial that was done before it could pause: it counts at the rungs that are left."""
        halving, run = self._halving, job.run()
        if run is None or run.state != "done":
            return
        job.state = "done"
        while halving.rung(job.name) is not None and run.score is not None:
            halving.reached(job.name, run.score)
            halving.promote(job.name)

    def go_on(self) -> None:
        """Have the best of the paused trials go on; where nothing else is left to do, the others are over."""
        runner = self._runner
        by_name = {job.name: job for job in runner.jobs}
        while runner.has_room() and (name := self._halving.promotable(self._paused())):
            run = by_name[name].run()
            if run is not None and run.state == "running":
                return  # it is being stopped by an earlier call that was killed, and can go on after that
            self._halving.promote(name)
            runner.begin(by_name[name])
        if not any(job.alive or job.state in ("waiting", "running") for job in runner.jobs):
            for name in self._paused():
                by_name[name].state = "pruned"

    def _paused(self) -> list[str]:
        """Trials that may go on: one that still writes its checkpoint has not ended."""
        return [job.name for job in self._runner.jobs if job.state == "paused" and not job.alive]
