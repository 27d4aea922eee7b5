"""`troupe train` and `troupe resume`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from troupe.common.config import Config
from troupe.common.config.field_options import field_parser, parse_with_fields
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime.files import hold_run_dir, readable
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.runtime.logging import warnings_shown
from troupe.common.runtime.parser import Parser

VERIFIED_S = 60.0
"""Seconds of a run that `troupe verify` repeats."""


def train_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe train`."""
    parser = field_parser(
        "train",
        "PRESET | --algo NAME --env ID [OPTION ...]",
        "Train on this machine, from a preset or with values for an algorithm and a kind of environment.",
    )
    parser.add_argument(
        "preset", metavar="PRESET", nargs="?", help="a name from `troupe presets`, or a TOML file"
    )
    add_algo(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="new directory (default: runs/PRESET-DATE-TIME)"
    )
    parser.add_argument(
        "--serial",
        action="store_true",
        help="act, store and learn in one process: for debuggers and profilers",
    )
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="act, store and learn in one process and one thread, so that a seed gives exactly the same "
        "weights, also after `troupe resume`; `troupe verify` checks them against certificate.json",
    )
    _add_run_options(parser)
    return parser


def train(words: Sequence[str]) -> int:
    """Train on this machine."""
    options, overrides = parse_with_fields(train_parser(), words)
    if options.serial and options.deterministic:
        raise ConfigError("--deterministic is serial already: leave out --serial")
    if options.deterministic:
        _fix_arithmetic()
    from troupe.services.launcher import training

    training.train(
        options.preset,
        options.run_dir,
        algo=chosen_algo(options.algo, options.preset, overrides, "troupe train"),
        sweep=options.sweep,
        overrides=overrides,
        progress=None if options.progress else False,
        instead=_serial if options.serial else _deterministic if options.deterministic else None,
    )
    return 0


def _serial(config: Config, run_dir: Path) -> None:
    from troupe.serial import SerialTraining

    with _traceback_shown(), hold_run_dir(run_dir):
        training = SerialTraining(config, run_dir, StopSignal().install())
        try:
            training.run()
        except Exception:
            training.close()
            raise
    print(f"run directory: {run_dir}")


def _deterministic(config: Config, run_dir: Path, *, resume: bool = False) -> None:
    from troupe import lockstep
    from troupe.services.launcher.workspace import own_command, shell_path

    with _traceback_shown():
        lockstep.train(config, run_dir, StopSignal().install(), resume=resume)
    print(f"run directory: {run_dir}")
    print("to repeat it for a minute and compare the weights:")
    print(f"  {own_command()} verify {shell_path(run_dir)}")


@contextlib.contextmanager
def _traceback_shown() -> Iterator[None]:
    """Print where an unexpected error comes from: a run in one process has no log, and is for finding it.

    The same for what cannot be written, after which the run goes on.
    """
    try:
        with warnings_shown("troupe.common.runtime"):
            yield
    except TroupeError:
        raise
    except Exception:
        if not logging.getLogger().isEnabledFor(logging.DEBUG):  # with --debug, every command shows it
            traceback.print_exc()
        raise


def _fix_arithmetic() -> None:
    """Have Intel's library add in one order, wherever in memory numbers lie; it reads this once."""
    os.environ.setdefault("MKL_CBWR", "AUTO")


def resume_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe resume`."""
    parser = field_parser(
        "resume",
        "RUN [OPTION ...]",
        "Continue a run. Tunable fields may change, structural fields may not; `troupe config explain\n"
        "FIELD` says which a field is. Operational fields (addresses, ports) come from the command line,\n"
        "environment variables, preset or defaults, never from the run.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    _add_run_options(parser)
    return parser


def resume(words: Sequence[str]) -> int:
    """Continue a run."""
    options, overrides = parse_with_fields(resume_parser(), words)
    from troupe.common.runtime.checkpoint import is_deterministic

    with readable(options.run_dir):
        repeats = is_deterministic(options.run_dir)
    if repeats:
        _fix_arithmetic()
    from troupe.services.launcher import training

    training.resume(
        options.run_dir,
        sweep=options.sweep,
        overrides=overrides,
        progress=None if options.progress else False,
        instead=partial(_deterministic, resume=True) if repeats else None,
    )
    return 0


def verify_parser() -> argparse.ArgumentParser:
    """Return the parser of `troupe verify`."""
    parser = Parser(
        prog="troupe verify",
        usage="troupe verify RUN [OPTION ...]",
        description="Repeat a run of `troupe train --deterministic` for a minute, and compare the weights "
        "with its certificate.json: `equal`, or the first update and tensor that differ.",
        epilog="exit codes: 0 equal, 1 different, 2 no such run, 5 damaged certificate",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    parser.add_argument("--all", action="store_true", dest="everything", help="repeat the whole run")
    return parser


def verify(words: Sequence[str]) -> int:
    """Repeat a run and compare; returns 1 where the weights differ."""
    options = verify_parser().parse_args(words)
    _fix_arithmetic()
    from troupe.verify import verify as repeat

    stop = StopSignal().install()
    return 0 if repeat(options.run_dir, stop, seconds=None if options.everything else VERIFIED_S) else 1


def add_algo(parser: argparse.ArgumentParser) -> None:
    """Add `--algo`, which stands for a preset."""
    parser.add_argument(
        "--algo",
        metavar="NAME",
        default="",
        help="instead of a preset, with --env ID: ppo, a2c, impala, apex, dqn, double_dqn, rainbow, pqn, "
        "r2d2, sac, td3, ddpg, iql or td3_bc, or the module or the entry point of an algorithm of your own; "
        "the values suit the environment, and `troupe config show --algo NAME --env ID` prints them",
    )


def chosen_algo(algo: str, preset: str | None, overrides: dict[str, str], command: str) -> str:
    """Return `--algo`, empty with a preset. Raises ConfigError unless it is one of the two."""
    # So that the command in the message can be copied as it stands.
    env_id = overrides.get("env") or overrides.get("env.id") or "ID"
    if algo and preset:
        raise ConfigError(f"--algo {algo} replaces a preset: leave out {preset} or --algo")
    if not algo and not preset:
        raise ConfigError(
            f"PRESET is required (`troupe presets` lists them), or `{command} --algo ppo --env {env_id}`"
        )
    return algo


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        help="log plain lines instead of the live panel",
    )
