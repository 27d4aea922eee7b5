"""The `troupe` command: train, resume, evaluate, inspect the configuration, or run a single service."""

# ruff: noqa: E402 - signals are seen to before the imports that take a moment

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import logging
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# Ctrl-C while the rest is imported, which takes a moment, ends as it does later: without a traceback.
_IN_MAIN_THREAD = threading.current_thread() is threading.main_thread()
if _IN_MAIN_THREAD:
    _former_handler = signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from troupe.common import installation
from troupe.common.config import Config, Loaded, load_layers, preset_names, preset_summary
from troupe.common.config.field_options import parse_with_fields
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.runtime.files import readable, run_config
from troupe.common.runtime.lifecycle import StopSignal, run_main
from troupe.common.runtime.parser import Parser, integer

if _IN_MAIN_THREAD:
    signal.signal(signal.SIGINT, _former_handler)

SERVICES = ("learner", "actor", "replay", "evaluator")

_COMMANDS = {
    "train": "train from a preset on this machine",
    "resume": "continue a run from its newest checkpoint",
    "eval": "play full games with a run's newest, or a given, checkpoint",
    "sweep": "train many runs: grids, seeds, suites of environments, searches",
    "runs": "list run directories: state, steps, last evaluation",
    "compare": "compare runs: a table of groups with intervals over seeds",
    "plot": "draw the learning curves of runs",
    "export": "write what a run has learned into a file for other programs",
    "presets": "list the presets",
    "config": "show, validate or explain the configuration",
    "env": "check an environment: what it shows, how fast it is, whether it works",
    "keys": "make or check the keys of a run whose services talk over a network",
    "learner": "run only the learner",
    "actor": "run only an actor process",
    "replay": "run only a replay shard, look at one, copy one (needs no torch)",
    "evaluator": "run only the evaluator",
}

_FIELDS_HELP = """\
Every field of the configuration is an option, --section.field VALUE or --section.field=VALUE, with booleans,
lists and tables as in TOML (true, [256, 256], {a = 1}) and `none` for no value. --env, --seed, --total-steps,
--keys and --init-from are short for --env.id, --run.seed, --run.total_steps, --net.keys_dir and
--learner.init_from.
`troupe config explain SECTION` describes fields.
A value comes from the first of: command line, --sweep file, environment (TROUPE_SECTION__FIELD), the resumed
run, preset, defaults. `troupe config show PRESET` says which."""

_EXIT_CODES = """\
exit codes: 0 done, 2 usage or configuration, 3 cannot reach a peer, 4 authentication, 5 checkpoint,
6 runs of a sweep failed, 70 internal, 130 interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what may stand here
        from troupe.services.completion import complete

        complete(_COMMANDS)
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if debug:
        logging.basicConfig(level=logging.DEBUG)
    else:
        # Without any handler Python would print the traceback of an unexpected error, which --debug is for.
        logging.getLogger().addHandler(logging.NullHandler())
    return run_main(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else "--help"
    if command in SERVICES:
        # One service: its module reads its own options, so that `python -m services.X` is the same.
        service = importlib.import_module(f"troupe.services.{command}.__main__")
        return int(service.main(words[1:]) or 0)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "resume": _resume,
        "eval": _evaluate,
        "sweep": _sweep,
        "runs": _runs,
        "compare": _compare,
        "plot": _plot,
        "export": _export,
        "presets": _presets,
        "config": _config,
        "env": _env,
        "keys": _keys,
    }
    if command in commands:
        return commands[command](words[1:])
    if not command.startswith("-"):
        near = difflib.get_close_matches(command, _COMMANDS, n=1)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(f"unknown command {command!r}{nearest} (`troupe --help` lists all)")
    _main_parser().parse_args([command])
    return 0


def _main_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10} {text}" for name, text in _COMMANDS.items())
    parser = Parser(
        prog="troupe",
        usage="troupe COMMAND [ARGUMENT ...]",
        description="Distributed deep reinforcement learning: learner, actors, replay, evaluator.\n\n"
        f"commands (`troupe COMMAND --help` shows the options of one):\n{listing}",
        epilog=f"{_FIELDS_HELP}\n\n{_EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"troupe {installation.version()}")
    parser.add_argument(
        "--debug", action="store_true", help="with any command: traceback of unexpected errors"
    )
    return parser


# ------------------------------------------------------------------ commands


def _train(words: list[str]) -> int:
    parser = _field_parser(
        "train",
        "PRESET | --algo NAME --env ID [OPTION ...]",
        "Train on this machine, from a preset or with values for an algorithm and a kind of environment.",
    )
    parser.add_argument(
        "preset", metavar="PRESET", nargs="?", help="a name from `troupe presets`, or a TOML file"
    )
    _add_algo(parser)
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="new directory (default: runs/PRESET-DATE-TIME)"
    )
    parser.add_argument(
        "--serial",
        action="store_true",
        help="act, store and learn in one process: for debuggers and profilers",
    )
    _add_run_options(parser)
    options, overrides = _parse(parser, words)
    from troupe.services.launcher import (
        training,  # here: the other commands need neither the launcher nor what it imports
    )

    training.train(
        options.preset,
        options.run_dir,
        algo=_algo(options.algo, options.preset, overrides, "troupe train"),
        sweep=options.sweep,
        overrides=overrides,
        progress=None if options.progress else False,
        instead=_serial if options.serial else None,
    )
    return 0


def _serial(config: Config, run_dir: Path) -> None:
    from troupe.serial import SerialTraining

    SerialTraining(config, run_dir, StopSignal().install()).run()
    print(f"run directory: {run_dir}")


def _resume(words: list[str]) -> int:
    parser = _field_parser(
        "resume",
        "RUN_DIR [OPTION ...]",
        "Continue a run. Tunable fields may change; structural ones may not; operational ones (addresses,\n"
        "ports) come from the command line, environment, preset or defaults, never from the run.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="directory of the run")
    _add_run_options(parser)
    options, overrides = _parse(parser, words)
    from troupe.services.launcher import training

    training.resume(
        options.run_dir,
        sweep=options.sweep,
        overrides=overrides,
        progress=None if options.progress else False,
    )
    return 0


def _evaluate(words: list[str]) -> int:
    from troupe.services.evaluator import evaluate

    return int(evaluate.main(words) or 0)


def _sweep(words: list[str]) -> int:
    from troupe.services.experiments import commands

    return commands.sweep(words)


def _runs(words: list[str]) -> int:
    from troupe.services.experiments import commands

    return commands.runs(words)


def _compare(words: list[str]) -> int:
    from troupe.services.experiments import commands

    return commands.compare(words)


def _plot(words: list[str]) -> int:
    from troupe.services.experiments import commands

    return commands.draw(words)


def _export(words: list[str]) -> int:
    from troupe.services import export

    return int(export.main(words) or 0)


def _presets(words: list[str]) -> int:
    parser = Parser(prog="troupe presets", description="List the presets.")
    parser.add_argument("--json", action="store_true", help="print one JSON object {name: summary}")
    options = parser.parse_args(words)
    summaries = {name: preset_summary(name) for name in preset_names()}
    if options.json:
        print(json.dumps(summaries))
    else:
        width = max(map(len, summaries), default=0)
        for name, summary in summaries.items():
            print(f"{name:<{width}}  {summary}".rstrip())
    return 0


def _env(words: list[str]) -> int:
    if words[:1] != ["check"]:
        only = Parser(prog="troupe env", usage="troupe env check ID [OPTION ...]")
        only.add_argument("command", choices=["check"], help="play it for a moment; has its own --help")
        only.parse_args(words)
    parser = _field_parser(
        "env check",
        "ID [OPTION ...]",
        "Play an environment at random, in a process of its own: what the network gets, what ended\n"
        "episodes, how fast it is, what Gymnasium's own checker says. One that fails, hangs or crashes is\n"
        "exit code 2 and one line that names step, slot and cause; what that checker says is only told.",
    )
    parser.add_argument("id", metavar="ID", help="such as gym:CartPole-v1; see env.id")
    parser.add_argument("--steps", type=integer(1), default=100, metavar="N", help="to play (default: 100)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, overrides = _parse(parser, words[1:])
    loaded = load_layers(None, options.sweep, {**overrides, "env.id": options.id}, os.environ)
    from troupe.services import environment

    environment.check_and_print(loaded, options.steps, options.json)
    return 0


def _keys(words: list[str]) -> int:
    from troupe.services.launcher import make_keys

    parser = Parser(prog="troupe keys", description="CURVE keys, for services that talk over a network.")
    make_keys.add_commands(parser)
    return make_keys.run(parser.parse_args(words))


def _config(words: list[str]) -> int:
    commands = {"show": _config_show, "validate": _config_validate, "explain": _config_explain}
    if words and words[0] in commands:
        return commands[words[0]](words[1:])
    parser = Parser(prog="troupe config", usage="troupe config show|validate|explain ...")
    parser.add_argument("command", choices=commands, help="what to do; each has its own --help")
    parser.parse_args(words)
    return 0


def _config_show(words: list[str]) -> int:
    parser = _field_parser(
        "config show",
        "[PRESET | RUN_DIR | --algo NAME --env ID] [OPTION ...]",
        "Print every value, and the layer that set it.",
    )
    parser.add_argument("source", metavar="PRESET | RUN_DIR", nargs="?", help="default: the defaults")
    _add_algo(parser)
    parser.add_argument("--changed", action="store_true", help="leave out what is at its default")
    parser.add_argument(
        "--json", action="store_true", help='print one JSON object {"values": ..., "origins": ...}'
    )
    options, overrides = _parse(parser, words)
    if options.algo:
        from troupe.services.launcher import by_kind

        algo = _algo(options.algo, options.source, overrides, "troupe config show")
        loaded = by_kind.load(algo, options.sweep, overrides, os.environ)
    else:
        loaded = _load(options.source, options.sweep, overrides)
    if options.json:
        print(json.dumps({"values": loaded.config.to_dict(), "origins": loaded.origins}))
    else:
        from troupe.common.config.explain import show_toml

        print(show_toml(loaded, changed_only=options.changed))
    return 0


def _config_validate(words: list[str]) -> int:
    parser = _field_parser(
        "config validate",
        "[PRESET | RUN_DIR ...] [OPTION ...]",
        "Check presets, TOML files or run directories.",
    )
    parser.add_argument("sources", metavar="PRESET | RUN_DIR", nargs="*", help="default: every preset")
    options, overrides = _parse(parser, words)
    from troupe.services.launcher.training import check_environment

    for source in options.sources or preset_names():
        loaded = _load(source, options.sweep, overrides)
        try:
            check_environment(loaded, play=False)
            print(f"{source}: valid")
        except MissingEngineError as error:
            print(f"{source}: valid, but cannot run on this machine: {error}")
    return 0


def _config_explain(words: list[str]) -> int:
    from troupe.common.config.explain import explain

    parser = Parser(
        prog="troupe config explain", description="Describe fields: meaning, type, default, role."
    )
    parser.add_argument(
        "field",
        metavar="SECTION | SECTION.FIELD | ALGORITHM",
        help="for example replay, agent.n_steps, impala or my_package.my_algorithm",
    )
    print(explain(parser.parse_args(words).field))
    return 0


# ------------------------------------------------------------------- helpers


def _field_parser(command: str, usage: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"troupe {command}",
        usage=f"troupe {command} {usage} [--SECTION.FIELD VALUE ...]",
        description=description,
        epilog=f"{_FIELDS_HELP}\n\n{_EXIT_CODES}",
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="print this and every field of the configuration"
    )
    parser.add_argument(
        "--sweep", metavar="FILE", type=Path, help="TOML file over preset and environment variables"
    )
    return parser


def _add_algo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--algo",
        metavar="NAME",
        default="",
        help="instead of a preset, with --env ID: ppo, dqn, impala, pqn, r2d2 or sac, with values that suit "
        "what the environment shows and takes; `troupe config show --algo NAME --env ID` prints them",
    )


def _algo(algo: str, preset: str | None, overrides: dict[str, str], command: str) -> str:
    """Return `--algo`, empty with a preset. Raises ConfigError unless it is one of the two."""
    env_id = overrides.get("env") or overrides.get("env.id") or "ID"
    if algo and preset:
        raise ConfigError(f"--algo {algo} is instead of a preset: leave out one, {preset} or --algo")
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


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    if {"-h", "--help"} & set(words):
        from troupe.common.config.explain import help_text

        print(f"{parser.format_help()}\nfields of the configuration:\n{_wrapped(help_text())}")
        raise SystemExit(0)
    return parse_with_fields(parser, words)


def _wrapped(text: str) -> str:
    return "\n".join(
        textwrap.fill(line, 110, subsequent_indent=" " * (len(line) - len(line.lstrip()))) if line else ""
        for line in text.split("\n")
    )


def _load(source: str | None, sweep: Path | None, overrides: dict[str, str]) -> Loaded:
    if source is not None:
        with readable(Path(source)):
            is_run = Path(source).is_dir()
        if is_run:
            return load_layers(None, sweep, overrides, os.environ, run_config=run_config(Path(source)))
    return load_layers(source, sweep, overrides, os.environ)


if __name__ == "__main__":
    sys.exit(main())
