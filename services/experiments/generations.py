"""Population-based training of a sweep's runs: they pause after each interval, and some go on as others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from troupe.common import system
from troupe.common.config.text import format_value
from troupe.common.runtime.checkpoint import load_newest, newest_meta, save_checkpoint
from troupe.common.runtime.files import CONFIG_FILE, atomic_write, make_directory, run_config
from troupe.services.experiments import report
from troupe.services.experiments.course import Course
from troupe.services.experiments.groups import short_names
from troupe.services.experiments.jobs import LOGS, Job
from troupe.services.experiments.plan import Planned
from troupe.services.experiments.population import Population
from troupe.services.experiments.runs import is_run, without_score
from troupe.services.launcher.workspace import saved_steps

if TYPE_CHECKING:
    from troupe.services.experiments.sweep import Runner

_KEEP = 3


class Generations(Course):
    """See the base class."""

    key = "population"

    def __init__(self, runner: Runner, record: Mapping[str, Any], totals: Mapping[str, int]) -> None:
        super().__init__(runner, record, totals)
        sweep = runner.sweep
        assert sweep.section.population is not None
        space = sweep.space
        initial = {each.name: {name: each.fields[name] for name in space} for each in sweep.runs()}
        self.population = Population(space, initial, sweep.section.population.interval_steps)
        if record:
            self.population.restore(record)

    def record(self) -> dict[str, Any]:
        """Everything, for the next call."""
        return self.population.record()

    def planned(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a run, with the values that it has now."""
        return {**fields, **self.population.members[name].values}

    def take_up(self, job: Job) -> None:
        """Have a run that had made its interval wait for the others."""
        member = self.population.members[job.name]
        if self.population.open is not None:  # a copy, or whose checkpoint others have still to take
            job.state, job.error = "paused", ""
            return
        if job.state != "failed":
            member.error = ""  # it is tried again
        if member.score is not None:
            # After a call with fewer steps in all it may have been done before the interval's end.
            if saved_steps(job.run_dir) >= min(self.population.boundary, self._total):
                job.state = "paused"
            else:
                member.score = None

    def look(self, job: Job) -> None:
        """Pause a run that has made its interval, once there is a score of it."""
        boundary, run = self.population.boundary, job.run()
        if boundary >= self._total or run is None or run.steps < boundary:
            return
        if run.newest_since(self.population.members[job.name].since) is not None:
            job.state = "paused"
            job.stop()

    def ended(self, job: Job) -> None:
        """Note what a run is worth that has paused, is done or has failed."""
        member = self.population.members[job.name]
        if member.is_there:
            return
        if job.state in ("paused", "done"):
            run = job.run()
            score = None if run is None else run.newest_since(member.since)
            if job.state == "done" and run is not None and score is None:
                score = run.score
            # What the others would copy is the checkpoint, not what was seen in the run's record.
            if job.state == "paused" and saved_steps(job.run_dir) < self.population.boundary:
                why = f"its checkpoint at the end of the interval was not written: see {LOGS}/{job.name}.log"
                job.state, job.error = "failed", why
            elif score is None:
                job.state, job.error = "failed", without_score(run)
            else:
                member.score = score
        if job.state == "failed":
            member.error = job.error

    def go_on(self) -> None:
        """Where all have made the interval: make copies of the best, and have all go on."""
        jobs, population = self._runner.jobs, self.population
        for job in jobs:
            if not job.alive:
                self.ended(job)
        if population.open is None:
            # The processes of all have ended: nobody copies a checkpoint that is being written.
            complete = [job.name for job in jobs if job.state == "done"]
            is_due = population.is_due(complete) and population.boundary < self._total
            if not is_due or any(job.alive for job in jobs):
                return
            self._select(complete)
        # Left by an earlier call that was killed, and about to stop.
        if any((run := job.run()) is not None and run.state == "running" for job in jobs):
            return
        self._copy_and_begin()

    def _select(self, complete: Collection[str]) -> None:
        runner = self._runner
        ended = self.population.select(complete)
        for job in runner.jobs:
            copy = ended.copies.get(job.name)
            if copy is not None:
                job.planned = Planned(job.name, {**job.planned.fields, **copy.values})
                said = ", ".join(f"{name} = {format_value(value)}" for name, value in copy.values.items())
                worth = "failed" if job.name in ended.errors else report.number(ended.scores[job.name])
                better = report.number(ended.scores[copy.source])
                line = f"{job.name} ({worth}) goes on as {copy.source} ({better}) with {said}"
                runner.say(f"{ended.steps:,} steps: {line}")
        # Before the first copy: whoever goes on after a kill makes these copies, and draws no others. Without
        # copies, a record of this end and not of what begins then would be taken for the end of the next one.
        if ended.copies:
            runner.save()

    def _copy_and_begin(self) -> None:
        population, runner = self.population, self._runner
        by_name = {job.name: job for job in runner.jobs}
        generation = population.generations[-1]
        # All of them again after a kill: no source has gone on meanwhile.
        taken = {n: copied(by_name[n], by_name[copy.source]) for n, copy in generation.copies.items()}
        for name, checkpoint in taken.items():
            generation.copies[name].checkpoint = checkpoint
        # A run keeps the record of what it was before, whose values must not count for what it is now.
        steps = {job.name: run.steps for job in runner.jobs if (run := job.run()) is not None}
        population.begin(steps)
        for job in runner.jobs:
            job.state, job.error = "waiting", ""
            if saved_steps(job.run_dir) >= self._total:
                job.state = "done"
        runner.save()

    def table(self) -> list[str]:
        """Who went on as whom, a line for each copy; and where the best run comes from."""
        rows = []
        for generation in self.population.generations:
            for name, copy in generation.copies.items():
                short = short_names(copy.values)
                said = ", ".join(f"{short[field]} = {format_value(v)}" for field, v in copy.values.items())
                worth = [report.number(generation.scores[each]) for each in (name, copy.source)]
                rows.append([f"{generation.steps:,}", name, worth[0], copy.source, worth[1], said])
        headers = ["steps", "run", "return", "goes on as", "return", "with"]
        lines = [*report.table(headers, rows), ""] if rows else []
        return [*lines, *self._best()]

    def _best(self) -> list[str]:
        scored = {
            name: each.score for name, each in self.population.members.items() if each.score is not None
        }
        if not scored:
            return []
        name = max(scored, key=lambda each: scored[each])
        lines = [f"best: {name}, return {report.number(scored[name])}; where it comes from:"]
        for steps, run, values in self.population.ancestors(name):
            said = ", ".join(f"{field} = {format_value(value)}" for field, value in values.items())
            lines.append(f"  from {steps:,} steps on {run}, with {said}")
        return lines


def copied(job: Job, source: Job) -> str:
    """Have a run go on from the newest checkpoint of another; returns that checkpoint's name.

    The weights, the optimiser and how far the other is; the run keeps its own name for replay and trackers,
    its record and its checkpoints.

    Raises:
        CheckpointError: the other has none that is whole, or it cannot be written.
        ConfigError: the directory cannot be written.
    """
    whole = load_newest(source.run_dir / "checkpoints")
    own = newest_meta(job.run_dir / "checkpoints").get("run") or f"{system.random.getrandbits(64):016x}"
    if not is_run(job.run_dir):  # it has failed before it was one
        make_directory(job.run_dir, "run directory")
        atomic_write(job.run_dir / CONFIG_FILE, run_config(source.run_dir).read_bytes())
    run = source.run()
    keep = _KEEP if run is None else int(run.fields.get("learner.keep_checkpoints", _KEEP))
    save_checkpoint(job.run_dir / "checkpoints", whole.arrays, {**whole.meta, "run": own}, keep=keep)
    return whole.path.name
