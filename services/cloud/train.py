"""`troupe cloud train` and `troupe cloud stop`: a run in AWS that ends at a budget or a goal."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.files import atomic_write, lock_file, read_status
from troupe.common.runtime.parser import Parser, integer, real
from troupe.common.wire.security.keys import ALLOWED_FILE, check_set, make_keys
from troupe.services.cloud.command import add_machines
from troupe.services.cloud.decisions import End
from troupe.services.cloud.ending import end
from troupe.services.cloud.goal import parse_goal
from troupe.services.cloud.keeping import Keeper, count_absence, start
from troupe.services.cloud.plan import Plan, make_plan
from troupe.services.cloud.record import FOLDER, Record, read_record
from troupe.services.cloud.run import CloudRun
from troupe.services.cloud.spending import is_used_up
from troupe.services.cloud.tools import GivenUpError, ToolError, check_programs
from troupe.services.launcher.workspace import dated_directory


def train_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe cloud train`."""
    parser = field_parser(
        "cloud train",
        "PRESET --budget DOLLARS [OPTION ...]",
        "Train in AWS until a goal is reached or a budget is used up, fetch the run, destroy everything.\n"
        "Adds actors while the learner waits for batches, and removes some while it hardly waits. Needs\n"
        "Terraform, AWS's command line and images: docs/aws.md.\n"
        "The same command with the --run-dir of a run goes on with it, as after a crash of this computer.",
    )
    add_machines(parser)
    parser.add_argument(
        "--budget", type=real(0.01), required=True, metavar="DOLLARS", help="limit for the whole run"
    )
    parser.add_argument(
        "--until",
        default="",
        metavar="GOAL",
        help="end when it is reached: 'return>=18', 'steps>=1000000', 'train/episode_return>=18'",
    )
    parser.add_argument(
        "--max-actors", type=integer(1), metavar="N", help="actor processes at most (default: 4 x the first)"
    )
    parser.add_argument(
        "--period-s",
        type=real(0.1),
        default=60.0,
        metavar="S",
        help="seconds between two looks at the run (default: %(default)s)",
    )
    parser.add_argument(
        "--patience-min",
        type=real(0.1),
        default=30.0,
        metavar="M",
        help="end a run that makes no step for so many minutes (default: %(default)s)",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="on this computer (default: runs/PRESET-DATE-TIME)"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what it costs and how long it lasts")
    return parser


def train(words: Sequence[str]) -> int:
    """Train in AWS; 0 where the goal was reached."""
    from troupe.services.launcher.training import check_unused

    options, overrides = parse_with_fields(train_parser(), words)
    run_dir = (options.run_dir or dated_directory(Path(options.preset).stem)).absolute()
    record, plan = read_record(run_dir), None
    if record is None:
        check_unused(run_dir)
        plan = make_plan(options, overrides)
        record = plan.record
        print("\n".join(plan.told))
    else:
        _take_up(record, options, overrides, run_dir)
    goal = f", or until {parse_goal(record.until, evaluated=record.evaluated)}" if record.until else ""
    print(f"budget: {record.budget_usd:.2f} dollars{goal}")
    if options.dry_run:
        return 0
    _check_ready(record)
    with _at_work(run_dir, record) as run:
        if plan is not None:
            _write(run, plan)
        run.say(f"{record.run} in {record.region}, as {run.aws.account()}")
        return _train(run, Keeper(run, period_s=options.period_s, patience_s=60 * options.patience_min))


def _train(run: CloudRun, keeper: Keeper) -> int:
    """Have it run to its end; the exit code."""
    record, is_new = run.record, not run.record.began_s
    try:
        if not is_new:
            count_absence(run)
        found = End("the budget is used up", not record.until)
        # With the machines that would start, which have to be ended again.
        ahead = replace(record.spending, hourly_usd=run.costs.with_actors(record.layout.actors))
        if not is_used_up(ahead, record.budget_usd, run.costs.once_usd):
            start(run)
            found = keeper.keep()
    except ToolError as error:
        if not is_new:  # there is something to lose
            raise ToolError(f"{error}; {run.advice}") from None
        _end(run, f"the start has failed ({error})")
        raise ToolError(f"the run did not start: {error}; nothing of it is left in AWS") from None
    except GivenUpError as error:
        raise GivenUpError(f"{error}; {run.advice}") from None
    except BaseException:
        run.say(f"this program has failed, but the run continues: {run.advice}")
        raise
    _end(run, found.why)
    hours = (record.counted_s - record.began_s) / 3600.0 if record.began_s else 0.0
    steps = read_status(run.run_dir).get("steps", 0)
    million = f", {record.usd / steps * 1e6:.2f} for a million steps" if steps else ""
    run.say(
        f"{record.usd:.2f} of {record.budget_usd:.2f} dollars in {hours:.1f} hours, {steps:,} steps{million}"
    )
    run.say(f"by prices of {record.prices}; AWS's own bill has the tag Run={record.run} a day later")
    return 0 if found.reached else 1


def _end(run: CloudRun, why: str) -> None:
    """End it; where that fails, say what still costs."""
    try:
        end(run, why)
    except TroupeError as error:
        kind = GivenUpError if isinstance(error, GivenUpError) else ToolError
        raise kind(f"{error}; {run.advice}") from None
    except BaseException:
        run.say(f"the run has not been ended: {run.advice}")
        raise


def stop_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe cloud stop`."""
    parser = Parser(
        prog="troupe cloud stop",
        usage="troupe cloud stop RUN",
        description="End a run of `troupe cloud train`, whose command died or was abandoned: its machines "
        "stop with a checkpoint, its files are fetched, and everything in AWS is destroyed.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory on this computer")
    return parser


def stop(words: Sequence[str]) -> int:
    """End a run in AWS."""
    options = stop_parser().parse_args(list(words))
    run_dir = options.run_dir.absolute()
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(
            f"{options.run_dir} is not a run of `troupe cloud train`: it has no {FOLDER}/run.json"
        )
    if record.ended:
        print(f"{options.run_dir} has ended ({record.ended}), and nothing of it is left in AWS")
        return 0
    _check_ready(record)
    with _at_work(run_dir, record) as run:
        _end(run, "you asked for an end")
    return 0


def _take_up(record: Record, options: argparse.Namespace, overrides: dict[str, Any], run_dir: Path) -> None:
    """Check that the command is of this run; its budget and its goal may be others now."""
    if record.ended:
        raise ConfigError(f"{run_dir} has ended ({record.ended}): choose another --run-dir")
    if options.preset != record.preset:
        raise ConfigError(f"{run_dir} is a run of {record.preset}, not of {options.preset}")
    if overrides or options.var or options.sweep:
        what = f"--{next(iter(overrides))}" if overrides else "--var" if options.var else "--sweep"
        raise ConfigError(f"a continued run keeps its configuration and machines: leave out {what}")
    if options.until:
        parse_goal(options.until, evaluated=record.evaluated)
    record.budget_usd, record.until = options.budget, options.until


def _check_ready(record: Record) -> None:
    check_programs()
    if not record.region:
        raise ConfigError("no AWS region is set: choose one, such as export AWS_REGION=us-east-1")


@contextlib.contextmanager
def _at_work(run_dir: Path, record: Record) -> Iterator[CloudRun]:
    """The run, held against a second command, which would change the same things in AWS."""
    stop = StopSignal(force_after_s=None).install()
    try:
        run = CloudRun(run_dir, record, stop)
        with lock_file(run_dir / FOLDER / ".lock", f"another `troupe cloud` command is at work on {run_dir}"):
            yield run
    finally:
        stop.uninstall()


def _write(run: CloudRun, plan: Plan) -> None:
    """Write what Terraform needs: its files, keys, the run file, the variables."""
    folder = run.run_dir / FOLDER
    keys = folder / "keys"
    if not (keys / ALLOWED_FILE).exists():
        make_keys(keys)
    check_set(keys)
    atomic_write(folder / "run.toml", plan.run_file.encode())
    run.terraform.copy()
    files = {"run_file": str(folder / "run.toml"), "keys_dir": str(keys)}
    run.terraform.set({**plan.variables, **files})
    run.save()
