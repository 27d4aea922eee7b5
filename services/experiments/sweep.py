"""The runner of sweeps: several runs in one directory, one after the other or several at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import load_layers
from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import MAX_JSON_BYTES, atomic_write, check_regular, lock_file, make_directory
from troupe.common.runtime.metrics import EVALUATION_RETURN
from troupe.services.experiments import groups, plot, report, search, suites
from troupe.services.experiments.jobs import RUNS, VALUES, Job, as_options
from troupe.services.experiments.plan import SECTION, Planned, Sweep, parse, values_file
from troupe.services.experiments.runs import Series
from troupe.services.experiments.space import ends
from troupe.services.launcher.panel import lost_terminal_tolerated
from troupe.services.launcher.training import check_runnable
from troupe.services.launcher.workspace import own_command, saved_steps, shell_path

RECORD = "sweep.json"
_VERSION = 1
_POLL_S = 0.5
_LINE_S = 60.0
# How long runs may take to stop: each writes a checkpoint.
_STOP_S = 120.0
_OVER = ("done", "failed", "pruned")


class SweepError(TroupeError):
    """Some runs failed: what each of them ended with is in its own record."""

    exit_code = 6


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
    return totals


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
    chosen = {name: value for name, value in options.items() if value is not None}
    # As parsed then, not read again: the file may have changed, or gone, since.
    tables = {**tables, SECTION: {**tables[SECTION], **chosen}}
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

    def _start_some(self) -> None:
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


def summary(jobs: Sequence[Job], sweep: Sweep, folder: Path) -> list[str]:
    """Tables of all runs and of their groups; written to `summary.txt`, `summary.json` and `curves.png`."""
    begun = [(job, run) for job in jobs if (run := job.run()) is not None]
    suite = suites.load(sweep.section.suite) if sweep.section.suite else None
    lines: list[str] = []
    comparison = None
    if begun:
        comparison = groups.compare([run for _, run in begun])
    series: dict[str, Series] = {}
    if comparison is not None:
        for group in comparison.groups:
            series.update({run.name: each for run, each in zip(group.runs, group.series, strict=True)})
    lines += report.run_rows(
        [(job.name, job.run(), job.state, series.get(job.name, Series())) for job in jobs]
    )
    if comparison is not None and any(series.values()):
        if comparison.metric != EVALUATION_RETURN:
            lines.append(f"no run was evaluated: these are values of {comparison.metric}")
        lines += ["", *report.page(comparison, suite)]
        values = report.as_values(comparison, suite)
        atomic_write(folder / "summary.json", json.dumps(values, indent=1).encode(), durable=False)
    atomic_write(folder / "summary.txt", ("\n".join(lines) + "\n").encode(), durable=False)
    if comparison is not None and any(series.values()):
        try:
            plot.draw(comparison, folder / "curves.png", plot.Style(title=folder.name))
            lines += ["", f"curves: {shell_path(folder.absolute() / 'curves.png')}"]
        except ConfigError as error:
            lines += ["", f"no curves: {error}"]
    return lines


def best_trial(study: search.Study, sweep: Sweep, folder: Path) -> list[str]:
    """What a study has found, and how to train with it."""
    best = study.best()
    if best is None:
        return ["no trial is over yet"]
    name, value, setting = best
    evaluated = all(run.is_evaluated for job in study.jobs() if (run := job.run()) is not None)
    what = "return" if evaluated else "return in training (without evaluators)"
    said = ", ".join(f"{field} = {format_value(chosen)}" for field, chosen in setting.items())
    file = shell_path(folder.absolute() / VALUES / f"{name}.toml")
    fields = shlex.join([*as_options(sweep.overrides), "--run.seed", "2"])
    # Another seed: the best of many trials is partly luck, and its own seed would only repeat it.
    again = f"{own_command()} train {shlex.quote(sweep.preset)} --sweep {file} {fields}"
    return [f"best: {name}, {what} {report.number(value)}: {said}", f"train with it: {again}"]


def how_to_go_on(jobs: Sequence[Job], folder: Path) -> list[str]:
    """Commands for what is left, and for a look at what there is."""
    lines = [
        f"TensorBoard: {own_command('tensorboard')} --logdir {shell_path((folder / RUNS).absolute())}",
    ]
    if any(job.state in ("stopped", "waiting", "running") for job in jobs):
        lines.append(f"go on: {resume_command(folder)}")
    return lines


def check_failures(jobs: Sequence[Job], folder: Path, *, is_study: bool = False) -> None:
    """Raise what the command ends with where runs failed."""
    failed = [job for job in jobs if job.state == "failed"]
    if failed:
        first = failed[0]
        what, option = ("others", "--trials N") if is_study else ("again", "--retry")
        raise SweepError(
            f"{len(failed)} of {len(jobs)} runs failed, {first.name}: {first.error}; "
            f"try {what} with `{resume_command(folder)} {option}`"
        )


def resume_command(folder: Path) -> str:
    """What goes on with the sweep in this directory, from the user's own."""
    return f"{own_command()} sweep --resume {shell_path(folder.absolute())}"
