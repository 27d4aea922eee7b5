"""`troupe sweep`: many runs, on this machine or as jobs of a cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from troupe.common.config import load_config
from troupe.common.config.field_options import parse_with_fields
from troupe.common.config.names import canonical
from troupe.common.config.presets import preset_id
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.lifecycle import INTERRUPTED
from troupe.common.runtime.parser import Parser, integer
from troupe.services.experiments import checks, ending, plan, suites
from troupe.services.experiments import sweep as running
from troupe.services.launcher.panel import lost_terminal_tolerated
from troupe.services.launcher.workspace import shell_path
from troupe.services.slurm import script
from troupe.services.slurm.resources import add_resources, resources

_KEYS = ("seeds", "suite", "parallel", "trials", "halving", "population", "deterministic")
"""Of `[sweep]`, those that are options too."""


def sweep(words: Sequence[str]) -> int:
    """Train many runs."""
    options, overrides = parse_with_fields(sweep_parser(), words)
    overrides = {canonical(name): text for name, text in overrides.items()}
    keys = {name: getattr(options, name) for name in _KEYS}
    keys["grid"] = dict(options.grid) or None
    if (options.source is None) == (options.resume is None):
        raise ConfigError("name a sweep file, a preset, or the directory of a sweep with --resume")
    if options.resume is not None:
        wanted = running.recorded_sweep(options.resume, keys, overrides)
        folder = options.resume
    else:
        wanted = plan.read(options.source, keys, overrides)
        folder = (options.dir or Path("runs") / f"sweep-{Path(options.source).stem}").expanduser()
    totals = checks.check(wanted, at_once=1 if options.slurm else wanted.section.parallel)
    if options.slurm and (what := wanted.depends):
        raise ConfigError(f"--slurm: the trials of {what} depend on each other and cannot be a job array")
    if options.share and (what := wanted.depends):
        raise ConfigError(f"--share: the trials of {what} depend on each other; run it on one machine")
    if options.share and options.slurm:
        raise ConfigError("--share and --slurm: choose one; Slurm itself divides a sweep over its nodes")
    # Of a sweep that has begun there may be nothing left to submit.
    if options.slurm and not options.dry_run and not folder.exists():
        script.check_installed()
    if options.dry_run and not options.slurm:
        lines = [f"{name}  {steps:,} steps" for name, steps in totals.items()]
        print(f"{wanted.section.trials} trials" if wanted.is_study else "\n".join(lines))
        return 0
    # Only `--resume` may change fields of runs that have begun: with a file, another value is more likely a
    # mistake.
    changed = overrides if options.resume is not None else ()
    # A second signal must not end this process: the runs are children that still write checkpoints, see
    # `Runner._stop_all`.
    stop = StopSignal(force_after_s=None).install()
    if options.share:
        # Suspended alone, it would leave its runs training while its claims grow stale.
        signal.signal(signal.SIGTSTP, _stay)
    with running.claimed(folder, shared=options.share), _writable(folder):
        runner = running.Runner(
            wanted, folder, stop, totals, retry=options.retry, changed=changed, shared=options.share
        )
        if options.slurm and (left := runner.for_others()):
            _submit(options, wanted, folder, [job.name for job in left])
            return 0
        if options.slurm and (others := runner.unfinished):  # never to be trained here as well
            print(f"{len(others)} runs are still running: the same command prints the table when they end")
            return 0
        runs = f"{runner.planned} run{'s'[: runner.planned != 1]}"
        print(f"{runs} in {folder}, {wanted.section.parallel} at a time", flush=True)
        runner.run()
        copies = [] if runner.course is None else runner.course.table()
        lines = ["", *ending.summary(runner.jobs, wanted, folder, copies)]
        if runner.study is not None:
            lines += ending.best_trial(runner.study, wanted, folder)
        lines += ending.how_to_go_on(runner.jobs, folder)
        with lost_terminal_tolerated():
            print("\n".join(lines), flush=True)
    # Neither a good end nor a failed one: who starts it where another was stopped looks at the code.
    if options.share and runner.unfinished:
        return INTERRUPTED
    ending.check_failures(runner.jobs, folder, is_study=wanted.is_study)
    return 0


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Say of a record or a table that cannot be written what to do; the runs have been stopped by then."""
    try:
        yield
    except BrokenPipeError:
        raise  # of the terminal
    except OSError as error:
        raise ConfigError(
            f"the sweep ends, because {folder} cannot be written: {error.strerror or error}; mend that, then "
            f"continue it: {ending.resume_command(folder)}"
        ) from error


def _submit(options: argparse.Namespace, wanted: plan.Sweep, folder: Path, names: Sequence[str]) -> None:
    """Hand runs to Slurm, as one job array; in a dry run only write the script of it."""
    job = script.SweepJob(
        folder=folder.absolute(),
        preset=preset_id(wanted.preset),
        names=names,
        fields=wanted.overrides,
        parallel=wanted.section.parallel,
        options=wanted.options,
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
    parser.add_argument(
        "--seeds",
        type=_option(_seeds, "a number, or several with commas"),
        metavar="N | A,B",
        help="number of seeds, or a list of seeds",
    )
    parser.add_argument(
        "--suite",
        metavar="NAME | FILE",
        help=f"one run per environment of a suite: {', '.join(suites.SUITES)}",
    )
    parser.add_argument("--parallel", type=integer(1, 64), metavar="N", help="runs at a time (default: 1)")
    parser.add_argument(
        "--deterministic",
        action="store_const",
        const=True,
        help="every run in one process and one thread, as with `troupe train --deterministic`",
    )
    parser.add_argument(
        "--grid",
        type=_option(plan.grid_option, "a field and its values, agent.learning_rate=1e-3,3e-4"),
        action="append",
        default=[],
        metavar="FIELD=A,B",
        help="values of a field to try; several --grid options multiply",
    )
    parser.add_argument(
        "--trials", type=integer(1), metavar="N", help="trials of the search, if not those of [sweep.search]"
    )
    parser.add_argument(
        "--halving",
        type=_option(plan.halving_option, "steps, or steps and of how many trials one goes on: 10_000,3"),
        metavar="STEPS[,ETA]",
        help="compare trials after STEPS, then after ETA times as many each (default: 3); the best 1/ETA "
        "continue",
    )
    parser.add_argument(
        "--population",
        type=_option(lambda text: {"interval_steps": int(text)}, "a number of steps"),
        metavar="STEPS",
        help="population-based training: every STEPS, the worst quarter of the trials go on as copies of the "
        "best, with other values",
    )
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="directory of the sweep (default: runs/sweep-NAME)"
    )
    parser.add_argument("--resume", type=Path, metavar="DIR", help="continue the sweep in this directory")
    parser.add_argument("--retry", action="store_true", help="try failed runs again")
    parser.add_argument(
        "--share",
        action="store_true",
        help="share the sweep with other machines that start the same command on the same directory",
    )
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


def _option(read: Callable[[str], Any], form: str) -> Callable[[str], Any]:
    """The type of an option: what `read` makes of its text. Where that is a ValueError, `form` is named."""

    def parsed(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"should be {form}, not {text!r}") from None

    return parsed


def _seeds(text: str) -> int | list[int]:
    numbers = [int(word) for word in text.split(",")]
    return numbers if "," in text else numbers[0]


def _stay(number: int, frame: FrameType | None) -> None:
    # Not `print`, which what was interrupted may be in the midst of.
    with contextlib.suppress(OSError):
        os.write(2, b"a shared sweep is not suspended: others would take its runs; Ctrl-C stops it\n")
