"""The runner of sweeps: several runs in one directory, one after the other or several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import MAX_JSON_BYTES, atomic_write, check_regular, lock_file, make_directory
from troupe.services.experiments import report, search
from troupe.services.experiments.course import Course
from troupe.services.experiments.ending import resume_command
from troupe.services.experiments.generations import Generations
from troupe.services.experiments.jobs import Job
from troupe.services.experiments.others import Others
from troupe.services.experiments.plan import RECORD, SECTION, Planned, Sweep, parse, with_options
from troupe.services.experiments.rungs import Rungs
from troupe.services.launcher.panel import lost_terminal_tolerated
from troupe.services.launcher.workspace import saved_steps

_VERSION = 1
_POLL_S = 0.5
_LINE_S = 60.0
# How long runs may take to stop: each writes a checkpoint.
_STOP_S = 120.0
_OVER = ("done", "failed", "pruned")


@contextlib.contextmanager
def claimed(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Make the directory of a sweep, and hold it against a second runner, or only one that does not share."""
    make_directory(folder, "directory of the sweep")
    refusal = f"{folder} is in use by another `troupe sweep`; stop that one first, or start all with --share"
    with lock_file(folder / ".lock", refusal, shared=shared):
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
        shared: bool = False,
    ) -> None:
        """Take up what is there already.

        Args:
            sweep: what to run.
            folder: of the sweep; may have runs of an earlier call.
            stop: asks for an end.
            totals: steps of every run.
            retry: try again what failed.
            changed: fields that may have other values now than the runs began with.
            shared: other processes, on any machine, train runs of it too.

        Raises:
            ConfigError: the directory has another sweep.
        """
        self.sweep, self.folder, self._stop = sweep, folder, stop
        self.totals, self._changed = totals, changed
        record = read_record(folder)
        self.study = self._opened_study(record) if sweep.is_study else None
        self.course = self._opened_course(record)
        if self.study is None:
            self.jobs = [self._taken_up(planned, record, retry) for planned in sweep.runs()]
        else:
            self.jobs = self.study.jobs()
            for job in self.jobs:
                if job.name in record.get("runs", {}):
                    self._check_same(job.planned, record["runs"][job.name], record)
        for job in self.jobs:
            job.check_place()
        self.others = Others(self, retry=retry) if shared else None
        if shared and not record and not self._is_first():
            record = read_record(folder)
            for job in self.jobs:
                self._check_same(job.planned, record["runs"].get(job.name, {"fields": {}}), record)
        if shared and record and record["runs"].keys() != {job.name for job in self.jobs}:
            raise ConfigError(
                f"{folder} has a sweep of {len(record['runs'])} runs, not of these {len(self.jobs)}: start "
                "the same command on each machine; to change the runs, begin it once without --share"
            )
        # Their directories are somebody's results: they are named, and never deleted.
        self._left_alone = sorted(set(record.get("runs", {})) - {job.name for job in self.jobs})
        self._next_line_s = time.monotonic() + _LINE_S

    def _taken_up(self, planned: Planned, record: dict[str, Any], retry: bool) -> Job:
        if self.course is not None:
            planned = Planned(planned.name, self.course.planned(planned.name, planned.fields))
        job = Job(planned, self.folder)
        before = record.get("runs", {}).get(planned.name)
        if before is not None:
            self._check_same(planned, before, record)
            # What has failed would most likely fail again, and hold up the runs that have not been tried.
            if before["state"] in ("failed", "pruned") and not (retry and before["state"] == "failed"):
                job.state, job.error = before["state"], before["error"]
            if self.course is not None:
                self.course.take_up(job)
        run = job.run()
        if run is not None and run.state != "running":
            # A killed run reports more steps than its newest checkpoint has; those after the checkpoint are
            # made again.
            made = run.steps if run.state == "done" else saved_steps(job.run_dir)
            if made >= self.totals[planned.name]:
                job.state, job.error = "done", ""
        return job

    def _is_first(self) -> bool:
        """Whether no other has made the record: of two that begin at once, the second sees what is begun."""
        own = self.folder / f".{RECORD}.{secrets.token_hex(6)}"
        try:
            own.write_text(json.dumps(self.record(), default=str))
            os.link(own, self.folder / RECORD)
        except FileExistsError:
            return False
        except OSError:  # no links on this file system: as if there were no other
            self.save()
        finally:
            own.unlink(missing_ok=True)
        return True

    def _opened_study(self, record: dict[str, Any]) -> search.Study:
        now = self.sweep.section.search
        # Optuna cannot use trials of another space, and would go on without a word as if they were of this
        # one.
        if record and record["tables"][SECTION].get("search") != now:
            raise ConfigError(
                f"{self.folder} has a study with a different [sweep.search]; choose another --dir"
            )
        return search.Study(self.sweep, self.folder)

    def _opened_course(self, record: dict[str, Any]) -> Course | None:
        section = self.sweep.section
        kind = Rungs if section.halving else Generations if section.population else None
        return None if kind is None else kind(self, record.get(kind.key) or {}, self.totals)

    @property
    def planned(self) -> int:
        """Runs that there are in the end."""
        return len(self.jobs) if self.study is None else max(len(self.jobs), self.sweep.section.trials)

    def _check_same(self, planned: Planned, before: dict[str, Any], record: dict[str, Any]) -> None:
        """Refuse to go on with a run under other values than it began with."""
        # Compared as text and values of the sweep, not as whole configurations: a default that has changed
        # with the version does not make another run.
        kind = "deterministic"
        was = {**before["fields"], **record["overrides"], "preset": record["preset"]}
        was[kind] = record["tables"][SECTION].get(kind, False)
        now = {**planned.fields, **self.sweep.overrides, "preset": self.sweep.preset}
        now[kind] = self.sweep.section.deterministic
        for name in (*was, *now):
            if was.get(name) != now.get(name) and name not in self._changed:
                begun = f"has {name} = {was[name]}" if name in was else f"takes {name} from its preset"
                wanted = now.get(name, "its preset's")
                raise ConfigError(
                    f"{self.folder} has a sweep in which {planned.name} {begun}, not {wanted}; "
                    f"continue it with `{resume_command(self.folder)}`, or choose another --dir"
                )

    def for_others(self) -> list[Job]:
        """Prepare the runs that are left for others to start; without those that are under way already."""
        left = [job for job in self.jobs if job.state == "waiting"]
        left = [job for job in left if (run := job.run()) is None or run.state != "running"]
        for job in left:
            job.write_values()
        self.save()
        return left

    @property
    def unfinished(self) -> list[Job]:
        """The runs that are not over, also those that others have under way."""
        return [job for job in self.jobs if job.state not in _OVER]

    def run(self) -> None:
        """Run what is left, until all is over or a stop is asked for."""
        if self._left_alone:
            self.say(
                f"runs of an earlier call that are no longer in the sweep: {', '.join(self._left_alone)}"
            )
        self.save()
        try:
            while not self._stop and not self._all_over():
                with self._patient():
                    self._look()
                self._stop.wait(_POLL_S)
        finally:
            # In `finally`: an exception of the runner, as of a full disk, must not leave trainings that
            # nobody watches.
            self._stop_all()
            with self._patient(ending=self.others is not None):
                self.save()

    def _look(self) -> None:
        """Start what may begin, and take in what has ended. Where it is shared, a failed look is repeated."""
        if self.others is not None:
            self.others.look()
        self._start_some()
        for job in self.jobs:
            if job.poll():
                self._ended(job)
            # Pruned before it ends, so that `poll` does not take the stop for one from outside.
            elif self.study is not None and job.state == "running" and self.study.look(job):
                job.state = "pruned"
                job.stop()
            elif self.course is not None and job.state == "running":
                self.course.look(job)
        self._tell()

    def _patient(self, *, ending: bool = False) -> contextlib.AbstractContextManager[None]:
        if self.others is not None:
            return self.others.patient(ending=ending)
        # The end of one run that cannot be recorded must not keep others from their last checkpoints.
        return contextlib.suppress(OSError) if ending else contextlib.nullcontext()

    def _all_over(self) -> bool:
        # A pruned trial still writes its checkpoint; the next call would find its directory in use.
        over = all(job.state in _OVER and not job.alive for job in self.jobs)
        over = over and not (self.others is not None and self.others.wait)
        return over and len(self.jobs) >= self.planned

    def _start_some(self) -> None:
        if self.course is not None:
            self.course.go_on()
        for job in self.jobs:
            if job.state == "waiting" and self.has_room():
                self.begin(job)
        while self.study is not None and len(self.jobs) < self.planned and self.has_room():
            self.jobs.append(self.study.ask())
            self.begin(self.jobs[-1])

    def has_room(self) -> bool:
        """Whether another run may begin."""
        return sum(job.alive for job in self.jobs) < self.sweep.section.parallel

    def begin(self, job: Job) -> None:
        """Train a run, or have it go on; not now, where somebody else still holds it."""
        run = job.run()
        if run is not None and run.state == "running":
            return  # of an earlier call that was killed: it stops by itself
        if self.others is not None and not self.others.take(job):
            return
        verb = "trains" if run is None else "goes on"
        job.start(self.sweep.preset, self.sweep.overrides, *self.sweep.options)
        self.say(f"{job.name} {verb} ({self._count()})")
        self.save()

    def _ended(self, job: Job) -> None:
        # Somebody else sent the signal. Left as `stopped` it would never count as over, and the loop would
        # not end.
        if job.state == "stopped" and not self._stop:
            job.state, job.error = "failed", "stopped from outside"
        if self.others is not None:  # first: whatever fails below, the others are told
            self.others.ended(job)
        run = None
        with self._patient(ending=True):  # its end is told once: without figures, if they cannot be read
            run = job.run()
        if self.course is not None:
            self.course.ended(job)
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
        self.say(words)
        self.save()

    def _stop_all(self) -> None:
        """Stop what runs: each writes its checkpoint; a second signal, or too long a wait, makes it quick."""
        running = [job for job in self.jobs if job.alive]
        if not running:
            return
        runs = "1 run" if len(running) == 1 else f"{len(running)} runs"
        self._stop.set()  # also after an exception: the runs are stopped from here, and have not failed
        self.say(f"stopping {runs} (a second signal stops at once)")
        for job in running:
            job.stop()
        # A second Ctrl-C reaches this process only, since each run has a process group of its own: it is
        # passed on.
        deadline_s, signals = time.monotonic() + _STOP_S, self._stop.signals
        while any(job.alive for job in running) and time.monotonic() < deadline_s:
            with self._patient(ending=True):
                if self.others is not None:
                    self.others.look()
            for job in running:
                with self._patient(ending=True):
                    if job.poll():
                        self._ended(job)
                if job.alive and self._stop.signals > signals:
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
                share = min(1.0, run.steps / max(1, run.total_steps))  # a run may exceed its total a little
                scored = "" if run.score is None else f", return {report.number(run.score)}"
                parts.append(f"{job.name} {share:.0%}{scored}")
        self.say("; ".join(parts))

    def _count(self) -> str:
        over = sum(job.state in _OVER for job in self.jobs)
        return f"{over} of {self.planned} runs are over"

    def say(self, line: str) -> None:
        """Print a line with the time of day."""
        with lost_terminal_tolerated():
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)

    def save(self) -> None:
        """Record what was asked for, and the state of each run."""
        atomic_write(self.folder / RECORD, json.dumps(self.record(), indent=1, default=str).encode())

    def record(self) -> dict[str, Any]:
        """What was asked for, and the state of each run."""
        return {
            "version": _VERSION,
            "source": self.sweep.source,
            "preset": self.sweep.preset,
            "overrides": dict(self.sweep.overrides),
            "tables": self.sweep.tables(),
            **({} if self.course is None else {self.course.key: self.course.record()}),
            "runs": {
                job.name: {
                    "fields": job.planned.fields,
                    "state": job.state,
                    "error": job.error,
                }
                for job in self.jobs
            },
        }
