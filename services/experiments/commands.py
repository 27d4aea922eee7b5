"""`troupe runs`, `compare` and `plot`: what came of runs."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from troupe.common.errors import ConfigError
from troupe.common.runtime.logging import printable
from troupe.common.runtime.parser import Parser, real
from troupe.services.experiments import groups, report, suites
from troupe.services.experiments import plot as drawing
from troupe.services.experiments import sweep as running
from troupe.services.experiments.jobs import RUNS
from troupe.services.experiments.population import copies_in_words, generation_of
from troupe.services.experiments.runs import find_runs, read_each, read_run

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
        print("\n".join([*report.overview(found), *_copies([Path(name) for name, _ in found])]))
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
        paths = [run.path for group in compared.groups for run in group.runs]
        print("\n".join([*report.page(compared, suite), *_copies(paths)]))
    if options.out is not None:
        drawing.draw(comparison, options.out, drawing.Style())
    return 0


def _copies(runs: Sequence[Path]) -> list[str]:
    """Which of these runs went on as others, where they are of populations."""
    lines = []
    for folder in dict.fromkeys(path.absolute().parents[1] for path in runs if path.parent.name == RUNS):
        # Of anybody, and perhaps of another version: without it the runs are what they are.
        with contextlib.suppress(ConfigError, KeyError, TypeError, ValueError, AttributeError):
            told = running.read_record(folder).get("population") or {"generations": []}
            copies = copies_in_words(map(generation_of, told["generations"]))
            names = {path.name for path in runs}
            lines += [printable(f"{name} {words}") for name, words in copies.items() if name in names]
    return ["", *lines] if lines else []


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
    found = read_each(options.runs, read_run)
    return groups.compare(
        list(found.values()), [name for name in options.by.split(",") if name], options.metric
    )
