"""`troupe sweep` makes runs; `troupe runs`, `compare` and `plot` say what came of them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from troupe.common.config import load_config
from troupe.common.config.field_options import parse_with_fields
from troupe.common.config.names import canonical
from troupe.common.config.presets import preset_id
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.parser import Parser, integer, real
from troupe.services.experiments import ending, groups, plan, report, suites
from troupe.services.experiments import plot as drawing
from troupe.services.experiments import sweep as running
from troupe.services.experiments.runs import find_runs, read_run
from troupe.services.launcher.workspace import shell_path
from troupe.services.slurm import script
from troupe.services.slurm.resources import add_resources, resources

_RUNS = "run directories, or directories that contain runs, such as those of sweeps"


def runs_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe runs`."""
    parser = Parser(prog="troupe runs", description="List run directories, the most recently written last.")
    parser.add_argument(
        "directories", metavar="DIR", type=Path, nargs="*", help="where to look (default: runs)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each run")
    return parser


def runs(words: Sequence[str]) -> int:
    """List run directories."""
    options = runs_parser().parse_args(words)
    found: list[tuple[str, groups.Run | str]] = []
    for path in find_runs(options.directories or [Path("runs")]):
        try:
            found.append((str(path), read_run(path)))
        except ConfigError as error:
            found.append((str(path), f"unreadable: {error}"))
    # Newest last: that is where the cursor is after a long list.
    found.sort(key=lambda each: 0.0 if isinstance(each[1], str) else each[1].changed_s)
    if options.json:
        for name, run in found:
            print(json.dumps({"run": name, **report.run_values(run)}))
    else:
        print("\n".join(report.overview(found)))
    return 0


def compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe compare`."""
    parser = _parser(
        "compare",
        "Compare runs. Runs that differ only in their seeds form a group. The table shows for each group\n"
        "the mean and the interquartile mean (IQM) of the last values of its runs, with 95 % bootstrap\n"
        "intervals over runs, the mean of their best values, steps and minutes. For several tasks with\n"
        "known scores of random play and of humans it adds normalised scores, resampled task by task.",
    )
    parser.add_argument(
        "--suite", metavar="NAME | FILE", help="normalise by the scores of a suite (see `troupe sweep`)"
    )
    parser.add_argument(
        "--steps",
        metavar="FROM-TO",
        type=_span,
        help="compare by the mean of what each run recorded between these steps, instead of its last value",
    )
    parser.add_argument("--out", metavar="PICTURE", type=Path, help="draw the curves as well")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def compare(words: Sequence[str]) -> int:
    """Print a table of groups of runs."""
    options = compare_parser().parse_args(words)
    if options.out is not None:
        drawing.check_picture(options.out)
    suite = suites.load(options.suite) if options.suite else None
    comparison = _comparison(options)
    compared = comparison.over(*options.steps) if options.steps else comparison
    if options.json:
        print(json.dumps(report.as_values(compared, suite)))
    else:
        print("\n".join(report.page(compared, suite)))
    if options.out is not None:
        drawing.draw(comparison, options.out, drawing.Style())
    return 0


def plot_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe plot`."""
    parser = _parser(
        "plot",
        "Draw returns against steps and against minutes: the mean of each group of runs that differ only in\n"
        "their seeds, with its 95 % bootstrap interval over runs, and each run as a thin line behind it.\n"
        "Or draw the figures of rliable: a performance profile, or aggregates with their intervals.",
    )
    add = parser.add_argument
    add(
        "--kind",
        choices=("curves", "profile", "aggregates"),
        default="curves",
        help="learning curves; the share of runs above each score; or median, IQM, mean and optimality "
        "gap as bars (default: curves)",
    )
    add(
        "--out",
        metavar="PICTURE",
        type=Path,
        default=Path("curves.png"),
        help=f"file to write, {', '.join(drawing.KINDS)} (default: curves.png)",
    )
    add("--csv", metavar="FILE", type=Path, help="also write the plotted numbers")
    add("--x", choices=drawing.AXES, help="one axis instead of both")
    add("--title", default="", help="title above the figure")
    add(
        "--labels",
        metavar="NAME,NAME",
        type=lambda text: text.split(","),
        default=[],
        help="names of the groups, in the order of `troupe compare`",
    )
    add("--size", metavar="WxH", type=_size, help="size of the figure in inches, such as 6x4")
    add(
        "--smooth",
        metavar="SHARE",
        type=real(0, 1),
        default=0.0,
        help="each value becomes the mean over this share of the axis before it, such as 0.05 (default: 0)",
    )
    add("--no-runs", dest="single", action="store_false", help="hide the single runs behind the means")
    add("--suite", metavar="NAME | FILE", help="normalise by the scores of a suite (profile, aggregates)")
    return parser


def plot(words: Sequence[str]) -> int:
    """Draw the learning curves of runs, or their scores."""
    options = plot_parser().parse_args(words)
    drawing.check_picture(options.out)
    comparison = _comparison(options)
    if not any(series for group in comparison.groups for series in group.series):
        raise ConfigError(
            f"these runs have no values of {comparison.metric} yet: wait for them, or choose --metric"
        )
    if options.labels:
        comparison = comparison.renamed(options.labels)
    style = drawing.Style(
        title=options.title,
        x=[options.x] if options.x else [],
        smooth=options.smooth,
        runs=options.single,
        size=options.size,
    )
    if options.kind == "curves":
        lines = drawing.draw(comparison, options.out, style)
    else:
        suite = suites.load(options.suite) if options.suite else None
        scores, normalised = report.scores(comparison, suite)
        axis = drawing.NORMALISED if normalised else comparison.metric
        draw = drawing.draw_profile if options.kind == "profile" else drawing.draw_aggregates
        lines = draw(scores, axis, options.out, style)
    if options.csv is not None:
        drawing.write_csv(lines, options.csv)
    written = [str(path) for path in (options.out, options.csv) if path is not None]
    print("\n".join([*written, *report.notes(comparison)]))
    return 0


def _size(text: str) -> tuple[float, float]:
    try:
        width, height = (float(each) for each in text.split("x"))
    except ValueError:
        width = height = 0.0
    if not (0 < width <= 100 and 0 < height <= 100):
        raise argparse.ArgumentTypeError(f"should be width and height in inches, such as 6x4, not {text!r}")
    return width, height


def sweep(words: Sequence[str]) -> int:
    """Train many runs."""
    options, overrides = parse_with_fields(sweep_parser(), words)
    overrides = {canonical(name): text for name, text in overrides.items()}
    keys = {name: getattr(options, name) for name in ("seeds", "suite", "parallel", "trials", "halving")}
    keys["grid"] = dict(options.grid) or None
    if (options.source is None) == (options.resume is None):
        raise ConfigError("name a sweep file, a preset, or the directory of a sweep with --resume")
    if options.resume is not None:
        wanted = running.recorded_sweep(options.resume, keys, overrides)
        folder = options.resume
    else:
        wanted = plan.read(options.source, keys, overrides)
        folder = options.dir or Path("runs") / f"sweep-{Path(options.source).stem}"
    totals = running.check(wanted)
    if options.slurm and (wanted.is_study or wanted.section.halving):
        what = "a study" if wanted.is_study else "halving"
        raise ConfigError(f"--slurm: the trials of {what} follow from each other, and are no job array")
    # Of a sweep that has begun there may be nothing left to submit.
    if options.slurm and not options.dry_run and not folder.exists():
        script.check_installed()
    if options.dry_run and not options.slurm:
        runs = [f"{name}  {steps:,} steps" for name, steps in totals.items()]
        print(f"{wanted.section.trials} trials" if wanted.is_study else "\n".join(runs))
        return 0
    # Only `--resume` may change fields of runs that have begun: with a file, another value is more likely a
    # mistake.
    changed = overrides if options.resume is not None else ()
    # A second signal must not end this process: the runs are children that still write checkpoints, see
    # `Runner._stop_all`.
    stop = StopSignal(force_after_s=None).install()
    with running.claimed(folder):
        runner = running.Runner(wanted, folder, stop, totals, retry=options.retry, changed=changed)
        if options.slurm and (left := runner.for_others()):
            _submit(options, wanted, folder, [job.name for job in left])
            return 0
        if options.slurm and (others := runner.unfinished):  # never to be trained here as well
            print(f"{len(others)} runs are under way: the same command prints the table when they are over")
            return 0
        print(f"{runner.planned} runs in {folder}, {wanted.section.parallel} at a time", flush=True)
        runner.run()
        print("\n".join(["", *ending.summary(runner.jobs, wanted, folder)]))
        if runner.study is not None:
            print("\n".join(ending.best_trial(runner.study, wanted, folder)))
        print("\n".join(ending.how_to_go_on(runner.jobs, folder)), flush=True)
    ending.check_failures(runner.jobs, folder, is_study=wanted.is_study)
    return 0


def _submit(options: argparse.Namespace, wanted: plan.Sweep, folder: Path, names: Sequence[str]) -> None:
    """Hand runs to Slurm, as one job array; in a dry run only write the script of it."""
    job = script.SweepJob(
        folder=folder.absolute(),
        preset=preset_id(wanted.preset),
        names=names,
        fields=wanted.overrides,
        parallel=wanted.section.parallel,
        cpus=options.cpus,
        gpu=load_config(wanted.preset, None, wanted.overrides, os.environ).learner.device != "cpu",
        resources=resources(options),
    )
    script.write(job.file, script.sweep_script(job, script.program_path()))
    if options.dry_run:
        print(f"script of {len(names)} runs: {shell_path(job.file)}")
        print(f"submit it: sbatch {shell_path(job.file)}")
        return
    number = script.submit(job.file)
    print(f"submitted {len(names)} runs as job array {number}: `squeue --job {number}`")
    print(f"afterwards, or to submit again what is left: {ending.resume_command(folder)} --slurm")


def sweep_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe sweep`."""
    parser = Parser(
        takes_fields=True,
        prog="troupe sweep",
        usage="troupe sweep FILE | PRESET [OPTION ...] [--SECTION.FIELD VALUE ...]\n"
        "       troupe sweep --resume DIR [OPTION ...] [--SECTION.FIELD VALUE ...]",
        description="Train many runs: a grid, a list or a search over fields, seeds, a suite of tasks.\n"
        "docs/sweeps.md describes the file. To continue, repeat the command or use --resume: completed runs\n"
        "are left alone, stopped runs are resumed. Fields on the command line apply to every run and\n"
        "override the file.",
        epilog="Every field of the configuration is an option, as for `troupe train`: --section.field\n"
        "VALUE; --seed and --total-steps are short for --run.seed and --run.total_steps.",
    )
    parser.add_argument(
        "source", metavar="FILE | PRESET", nargs="?", help="TOML file with a section [sweep], or a preset"
    )
    parser.add_argument("--seeds", type=_seeds, metavar="N | A,B", help="number of seeds, or a list of seeds")
    parser.add_argument(
        "--suite",
        metavar="NAME | FILE",
        help=f"one run per environment of a suite: {', '.join(suites.SUITES)}",
    )
    parser.add_argument("--parallel", type=integer(1, 64), metavar="N", help="runs at a time (default: 1)")
    parser.add_argument(
        "--grid",
        type=_grid,
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of a field to try; several --grid options multiply",
    )
    parser.add_argument("--trials", type=integer(1), metavar="N", help="of [sweep.search]")
    parser.add_argument(
        "--halving",
        type=_halving,
        metavar="STEPS[,ETA]",
        help="compare trials after STEPS, then after ETA times as many each (default: 3); the best 1/ETA "
        "continue",
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of the sweep (default: runs/sweep-NAME)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the sweep in this directory")
    parser.add_argument("--retry", action="store_true", help="try failed runs again")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only print the runs and their steps; with --slurm, write the script and submit nothing",
    )
    parser.add_argument(
        "--slurm", action="store_true", help="submit one Slurm job array, with a job for each run"
    )
    parser.add_argument(
        "--cpus",
        type=integer(1),
        default=4,
        metavar="C",
        help="with --slurm: cores of each run (default: %(default)s)",
    )
    add_resources(parser)
    return parser


def _seeds(text: str) -> int | list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"should be a number, or several with commas, not {text!r}"
        ) from None
    return numbers[0] if "," not in text else numbers


def _grid(text: str) -> tuple[str, list[Any]]:
    try:
        return plan.grid_option(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"should be a field and its values, agent.learning_rate=1e-3,3e-4, not {text!r}"
        ) from None


def _halving(text: str) -> dict[str, int]:
    try:
        return plan.halving_option(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"should be steps, or steps and of how many trials one goes on: 10_000,3, not {text!r}"
        ) from None


def _span(text: str) -> tuple[int, int]:
    first, _, last = text.replace("_", "").partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(
            f"should be two numbers of steps, such as 20_000-40_000, not {text!r}"
        )
    return int(first), int(last)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(prog=f"troupe {command}", description=description)
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help=_RUNS)
    parser.add_argument(
        "--by",
        metavar="FIELD[,FIELD]",
        default="",
        help="group by these fields (default: the fields in which runs differ)",
    )
    parser.add_argument(
        "--metric",
        default="",
        metavar="NAME",
        help="column of metrics.csv (default: eval/episode_return, or train/episode_return without "
        "evaluations)",
    )
    return parser


def _comparison(options: argparse.Namespace) -> groups.Comparison:
    found = [read_run(path) for path in find_runs(options.runs)]
    return groups.compare(found, [name for name in options.by.split(",") if name], options.metric)
