"""What a sweep ends with: tables and a picture of its runs, the best trial, and what to do next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from troupe.common.config.text import format_value
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime.files import atomic_write
from troupe.common.runtime.metrics import EVALUATION_RETURN
from troupe.services.experiments import groups, plot, report, search, suites
from troupe.services.experiments.jobs import RUNS, VALUES, Job, as_options
from troupe.services.experiments.plan import Sweep
from troupe.services.experiments.runs import Series
from troupe.services.launcher.workspace import own_command, shell_path


class SweepError(TroupeError):
    """Some runs failed: what each of them ended with is in its own record."""

    exit_code = 6


def summary(jobs: Sequence[Job], sweep: Sweep, folder: Path, more: Sequence[str] = ()) -> list[str]:
    """Tables of all runs and of their groups; written to `summary.txt`, `summary.json` and `curves.png`.

    Args:
        jobs: the runs.
        sweep: that they are of.
        folder: of the sweep.
        more: lines below the tables, such as who went on as whom in a population.
    """
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
    lines += ["", *more] if more else []
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
    if any(job.state in ("stopped", "waiting", "running", "paused") for job in jobs):
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
