"""The runner of sweeps: several runs in one directory, one after the other or several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.common.config import load_layers
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import MAX_JSON_BYTES, atomic_write, check_regular, lock_file, make_directory
from troupe.services.experiments import report, search
from troupe.services.experiments.ending import resume_command
from troupe.services.experiments.halving import Halving, check_enough, rungs_of
from troupe.services.experiments.jobs import Job
from troupe.services.experiments.plan import RECORD, SECTION, Planned, Sweep, parse, values_file, with_options
from troupe.services.experiments.space import ends
from troupe.services.launcher.panel import lost_terminal_tolerated
from troupe.services.launcher.training import check_runnable
from troupe.services.launcher.workspace import saved_steps

_VERSION = 1
_POLL_S = 0.5
_LINE_S = 60.0
# How long runs may take to stop: each writes a checkpoint.
_STOP_S = 120.0
_OVER = ("done", "failed", "pruned")


def check(sweep: Sweep) -> dict[str, int]:
    """Refuse runs that could not begin, before any does; returns each run's total steps.

    Of a study there are no runs yet: the extreme values of its space are checked. Every environment is made
    once, and every network, but not each with each.

    Raises:
        ConfigError: names the field, and the file that it is from.
    """
    totals = {}
    seen: set[str] = set()
    planned = sweep.runs()
    if sweep.is_study:
        search.check_installed()
        if not sweep.space:
            raise ConfigError(f"{sweep.source}: the command line leaves nothing to search")
        planned = [sweep.with_fields(f"end-{i}", each) for i, each in enumerate(ends(sweep.space))]
    with tempfile.TemporaryDirectory(prefix="troupe-") as folder:
        values = Path(folder) / "values.toml"
        # Layers are merged as the run's own process will merge them, from a file of the same text, so that
        # what is refused there is refused here, hours earlier.
        for run in planned:
            values.write_text(values_file(run.fields), "utf-8")
            try:
                loaded = load_layers(sweep.preset, values, sweep.overrides, os.environ)
            except ConfigError as error:
                # The user wrote the sweep's file, and never saw the one in the temporary folder.
                raise ConfigError(str(error).replace(f"file {values}", f"file {sweep.source}")) from None
            totals[run.name] = loaded.config.run.total_steps
            # Making an environment or a network takes up to seconds. Runs that differ in neither, such as
            # those of further seeds, need no second look.
            parts = {repr(loaded.config.env), repr(loaded.config.agent)}
            if not parts <= seen:
                seen |= parts
                try:
                    check_runnable(loaded)
                except TroupeError as error:
                    raise type(error)(f"{run.name}: {error}") from None
    _check_halving(sweep, totals)
    return totals


def _check_halving(sweep: Sweep, totals: Mapping[str, int]) -> None:
    """Refuse trials that cannot be compared at the same steps, and too few of them."""
    halving = sweep.section.halving
    if halving is None:
        return
    if len(set(totals.values())) > 1:
        raise ConfigError(f"{sweep.source}: halving needs runs of the same run.total_steps")
    check_enough(len(totals), halving.first_steps, halving.eta, next(iter(totals.values())))


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the directory of a sweep, and hold it against a second runner."""
    make_directory(folder, "directory of the sweep")
    with lock_file(folder / ".lock", f"{folder} is in use by another `troupe sweep`; stop that one first"):
        yield


def read_record(folder: Path) -> dict[str, Any]:
    """The record of an earlier call; empty where there is none.

    Raises:
        ConfigError: it is damaged, or of another version of Troupe.
    """
    try:
        # Size and kind are looked at first: the folder may hold a pipe, which would block, or anything else
        # of that name.
        record = json.loads(check_regular(folder / RECORD, MAX_JSON_BYTES).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / RECORD}: {error}") from error
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        raise ConfigError(
            f"{folder / RECORD} is not a record of this version of Troupe: choose another --dir"
        )
    return record


def recorded_sweep(folder: Path, options: Mapping[str, Any], overrides: Mapping[str, str]) -> Sweep:
    """The sweep that was begun in this directory, for `--resume`; with other words on the command line."""
    record = read_record(folder)
    if not record:
        raise ConfigError(f"there is no sweep in {folder}: it has no {RECORD}")
    tables = record["tables"]
    # As parsed then, not read again: the file may have changed, or gone, since.
    tables = with_options(record["source"], tables, options)
    return parse(record["source"], tables, {**record["overrides"], **overrides})


class Runner:
    """The runs of one sweep. Use within `claimed`."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        stop: StopSignal,
        totals: Mapping[str, int],
        *,
        retry: bool = False,
        changed: Collection[str] = (),
    ) -> None:
        """Take up what is there already.

        Args:
            sweep: what to run.
            folder: of the sweep; may have runs of an earlier call.
            stop: asks for an end.
            totals: steps of every run.
            retry: try again what failed.
            changed: fields that may have other values now than the runs began with.

        Raises:
            ConfigError: the directory has another sweep.
        """
        self.sweep, self.folder, self._stop = sweep, folder, stop
        self._totals, self._changed = totals, changed
        record = read_record(folder)
        self.study = self._opened_study(record) if sweep.is_study else None
        self.halving = self._restored_halving(record) if sweep.section.halving else None
        if self.study is None:
            self.jobs = [self._taken_up(planned, record, retry) for planned in sweep.runs()]
        else:
            self.jobs = self.study.jobs()
            for job in self.jobs:
                if job.name in record.get("runs", {}):
                    self._check_same(job.planned, record["runs"][job.name], record)
        for job in self.jobs:
            job.check_place()
        # Their directories are somebody's results: they are named, and never deleted.
        self._left_alone = sorted(set(record.get("runs", {})) - {job.name for job in self.jobs})
        self._next_line_s = time.monotonic() + _LINE_S

    def _taken_up(self, planned: Planned, record: dict[str, Any], retry: bool) -> Job:
        job = Job(planned, self.folder)
        before = record.get("runs", {}).get(planned.name)
        if before is not None:
            self._check_same(planned, before, record)
            # What has failed would most likely fail again, and hold up the runs that have not been tried.
            if before["state"] in ("failed", "pruned") and not (retry and before["state"] == "failed"):
                job.state, job.error = before["state"], before["error"]
            # One that had ended early may be among the best of more trials.
            if self.halving is not None and self.halving.is_paused(job.name) and job.state != "failed":
                job.state = "paused"
        run = job.run()
        if run is not None and run.state != "running":
            # A killed run reports more steps than its newest checkpoint has; those after the checkpoint are
            # made again.
            made = run.steps if run.state == "done" else saved_steps(job.run_dir)
            if made >= self._totals[planned.name]:
                job.state, job.error = "done", ""
        return job

    def _opened_study(self, record: dict[str, Any]) -> search.Study:
        now = self.sweep.section.search
        # Optuna cannot use trials of another space, and would go on without a word as if they were of this
        # one.
        if record and record["tables"][SECTION].get("search") != now:
            raise ConfigError(f"{self.folder} has a study of another [sweep.search]; choose another --dir")
        return search.Study(self.sweep, self.folder)

    def _restored_halving(self, record: dict[str, Any]) -> Halving:
        wanted = self.sweep.section.halving
        assert wanted is not None
        rungs = rungs_of(wanted.first_steps, wanted.eta, next(iter(self._totals.values())))
        halving = Halving(rungs, wanted.eta)
        if record.get("halving"):
            halving.restore(record["halving"], self._totals)
        return halving

    @property
    def planned(self) -> int:
        """Runs that there are in the end."""
        return len(self.jobs) if self.study is None else max(len(self.jobs), self.sweep.section.trials)

    def _check_same(self, planned: Planned, before: dict[str, Any], record: dict[str, Any]) -> None:
        """Refuse to go on with a run under other values than it began with."""
        # Compared as text and values of the sweep, not as whole configurations: a default that has changed
        # with the version does not make another run.
        was = {**before["fields"], **record["overrides"], "preset": record["preset"]}
        now = {**planned.fields, **self.sweep.overrides, "preset": self.sweep.preset}
        for name in (*was, *now):
            if was.get(name) != now.get(name) and name not in self._changed:
                begun = f"has {name} = {was[name]}" if name in was else f"takes {name} from its preset"
                wanted = now.get(name, "its preset's")
                raise ConfigError(
                    f"{self.folder} has a sweep in which {planned.name} {begun}, not {wanted}; "
                    f"go on with that by `{resume_command(self.folder)}`, or choose another --dir"
                )

    def for_others(self) -> list[Job]:
        """Prepare the runs that are left for others to start; without those that are under way already."""
        left = [job for job in self.jobs if job.state == "waiting"]
        left = [job for job in left if (run := job.run()) is None or run.state != "running"]
        for job in left:
            job.write_values()
        self._save()
        return left

    @property
    def unfinished(self) -> list[Job]:
        """The runs that are not over, also those that others have under way."""
        return [job for job in self.jobs if job.state not in _OVER]

    def run(self) -> None:
        """Run what is left, until all is over or a stop is asked for."""
        if self._left_alone:
            self._say(f"runs of an earlier call that the sweep has no more: {', '.join(self._left_alone)}")
        self._save()
        try:
            while not self._stop and not self._all_over():
                self._start_some()
                for job in self.jobs:
                    if job.poll():
                        self._ended(job)
                    # Pruned before it ends, so that `poll` does not take the stop for one from outside.
                    elif self.study is not None and job.state == "running" and self.study.look(job):
                        job.state = "pruned"
                        job.stop()
                    elif self.halving is not None and job.state == "running":
                        self._look_at_rung(self.halving, job)
                self._tell()
                self._stop.wait(_POLL_S)
        finally:
            # In `finally`: an exception of the runner, as of a full disk, must not leave trainings that
            # nobody watches.
            self._stop_all()
            self._save()

    def _all_over(self) -> bool:
        # A pruned trial still writes its checkpoint; the next call would find its directory in use.
        over = all(job.state in _OVER and not job.alive for job in self.jobs)
        return over and len(self.jobs) >= self.planned

    def _look_at_rung(self, halving: Halving, job: Job) -> None:
        """Pause a trial that has reached its next rung, unless it is the one that would go on from there."""
        run, rung = job.run(), halving.rung(job.name)
        if run is None or rung is None or run.steps < rung:
            return
        # What was played after the rung before: an older network says nothing of this one.
        values = run.series([run.metric])[run.metric]
        if not values or values.steps[-1] <= halving.before(job.name):
            return
        halving.reached(job.name, values.values[-1])
        said = f"{job.name} is worth {report.number(values.values[-1])} at {rung:,} steps"
        if halving.promotable([job.name, *self._paused()]) == job.name:
            halving.promote(job.name)
            self._say(f"{said}, and goes on")
        else:
            job.state = "paused"
            job.stop()
            self._say(f"{said}, and pauses")
        self._save()

    def _paused(self) -> list[str]:
        """Trials that may go on: one that still writes its checkpoint has not ended."""
        return [job.name for job in self.jobs if job.state == "paused" and not job.alive]

    def _promote_some(self, halving: Halving) -> None:
        """Have the best of the paused trials go on; where nothing else is left to do, the others are over."""
        by_name = {job.name: job for job in self.jobs}
        while self._has_room() and (name := halving.promotable(self._paused())):
            run = by_name[name].run()
            if run is not None and run.state == "running":
                return  # it is being stopped by an earlier call that was killed, and can go on after that
            halving.promote(name)
            self._begin(by_name[name])
        if not any(job.alive or job.state in ("waiting", "running") for job in self.jobs):
            for name in self._paused():
                by_name[name].state = "pruned"

    def _start_some(self) -> None:
        if self.halving is not None:
            self._promote_some(self.halving)
        for job in self.jobs:
            if job.state == "waiting" and self._has_room():
                self._begin(job)
        while self.study is not None and len(self.jobs) < self.planned and self._has_room():
            self.jobs.append(self.study.ask())
            self._begin(self.jobs[-1])

    def _has_room(self) -> bool:
        return sum(job.alive for job in self.jobs) < self.sweep.section.parallel

    def _begin(self, job: Job) -> None:
        run = job.run()
        if run is not None and run.state == "running":
            return  # of an earlier call that was killed: it stops by itself
        verb = "trains" if run is None else "goes on"
        job.start(self.sweep.preset, self.sweep.overrides)
        self._say(f"{job.name} {verb} ({self._count()})")
        self._save()

    def _ended(self, job: Job) -> None:
        # Somebody else sent the signal. Left as `stopped` it would never count as over, and the loop would
        # not end.
        if job.state == "stopped" and not self._stop:
            job.state, job.error = "failed", "stopped from outside"
        run = job.run()
        if self.halving is not None and run is not None and run.state == "done":
            job.state = "done"  # before it could pause, if it was to: it counts at the rungs that are left
            while self.halving.rung(job.name) is not None and run.score is not None:
                self.halving.reached(job.name, run.score)
                self.halving.promote(job.name)
        if self.study is not None:
            if self._stop and job.state == "done" and (run is None or run.score is None):
                job.state = "stopped"  # before its last games ended: it is tried again
            self.study.tell(job)
        words = f"{job.name}: {job.state}"
        if job.error:
            words += f": {job.error}"
        elif run is not None:
            score = report.number(run.score)
            words += f", return {score}, {run.steps:,} steps, {run.wall_s / 60:.1f} minutes"
        self._say(words)
        self._save()

    def _stop_all(self) -> None:
        """Stop what runs: each writes its checkpoint; a second signal, or too long a wait, makes it quick."""
        running = [job for job in self.jobs if job.alive]
        if not running:
            return
        runs = "1 run" if len(running) == 1 else f"{len(running)} runs"
        self._say(f"stopping {runs} with a checkpoint each (once more to stop at once)")
        for job in running:
            job.stop()
        # A second Ctrl-C reaches this process only, since each run has a process group of its own: it is
        # passed on.
        deadline_s, signals = time.monotonic() + _STOP_S, self._stop.signals
        while any(job.alive for job in running) and time.monotonic() < deadline_s:
            for job in running:
                if job.poll():
                    self._ended(job)
                elif self._stop.signals > signals:
                    job.stop()
            signals = self._stop.signals
            time.sleep(0.1)
        for job in running:
            job.kill()
            if job.state == "running":
                job.state = "stopped"

    def _tell(self) -> None:
        if time.monotonic() < self._next_line_s:
            return
        self._next_line_s = time.monotonic() + _LINE_S
        parts = [self._count()]
        for job in self.jobs:
            run = job.run() if job.state == "running" else None
            if run is not None:
                share = run.steps / max(1, run.total_steps)
                parts.append(f"{job.name} {share:.0%}, return {report.number(run.score)}")
        self._say("; ".join(parts))

    def _count(self) -> str:
        over = sum(job.state in _OVER for job in self.jobs)
        return f"{over} of {self.planned} runs are over"

    def _say(self, line: str) -> None:
        with lost_terminal_tolerated():
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def _save(self) -> None:
        record = {
            "version": _VERSION,
            "source": self.sweep.source,
            "preset": self.sweep.preset,
            "overrides": dict(self.sweep.overrides),
            "tables": self.sweep.tables(),
            "halving": None if self.halving is None else self.halving.record(),
            "runs": {
                job.name: {
                    "fields": job.planned.fields,
                    "state": job.state,
                    "error": job.error,
                }
                for job in self.jobs
            },
        }
        atomic_write(self.folder / RECORD, json.dumps(record, indent=1, default=str).encode())
