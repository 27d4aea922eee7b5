"""Command lines that name configuration fields: `--section.field VALUE` among ordinary options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Sequence
from pathlib import Path

from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser

FIELDS_HELP = """\
Every field of the configuration is an option, --section.field VALUE or --section.field=VALUE, with booleans,
lists and tables as in TOML (true, [256, 256], {a = 1}) and `none` for no value. --env, --seed, --total-steps,
--keys, --init-from and --offline are short for --env.id, --run.seed, --run.total_steps, --net.keys_dir,
--learner.init_from and --run.offline.
`troupe config explain` lists all fields, `troupe config explain SECTION.FIELD` describes one.
A value comes from the first of: command line, --sweep file, environment (TROUPE_SECTION__FIELD), the resumed
run, preset, defaults. `troupe config show PRESET` says which."""

EXIT_CODES = """\
exit codes: 0 done, 1 `troupe verify` found a difference or `troupe cloud train` missed its goal,
2 usage or configuration, 3 cannot reach a peer, 4 authentication, 5 checkpoint, 6 runs of a sweep failed,
7 `troupe doctor` found something wrong, 70 internal, 130 interrupted"""


def field_parser(command: str, usage: str, description: str) -> Parser:
    """Return the parser of a command that takes every field of the configuration; see `parse_with_fields`."""
    parser = Parser(
        takes_fields=True,
        prog=f"troupe {command}",
        usage=f"troupe {command} {usage} [--SECTION.FIELD VALUE ...]",
        description=description,
        epilog=f"{FIELDS_HELP}\n\n{EXIT_CODES}",
    )
    parser.add_argument(
        "--sweep",
        metavar="FILE",
        type=Path,
        help="TOML file whose values override preset and environment variables",
    )
    return parser


def parse_with_fields(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line of `parser`'s options and of fields, the latter as text."""
    # argparse has no public list of its options, and `parse_known_args` would take the value of an unknown
    # option for a positional argument.
    names = {name: action for action in parser._actions for name in action.option_strings}
    flags = [name for name, action in names.items() if action.nargs == 0]
    own, overrides = split_overrides(words, flags, [name for name in names if name not in flags])
    return parser.parse_args(own), overrides


def split_overrides(
    arguments: Sequence[str], flags: Collection[str], options: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Separate a command's own options from fields of the configuration.

    Args:
        arguments: words of the command line.
        flags: the command's options that take no value, such as `--no-progress`.
        options: the command's options that take one, such as `--run-dir`.

    Returns:
        The words that belong to the command, and `{"section.field": "text"}` of all other `--name VALUE` and
        `--name=VALUE`. Whether such a field exists is for the loader to say, which knows the nearest one.
    """
    own: list[str] = []
    overrides: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or name in flags or word == "--":
            own.append(word)
        elif name in options:
            own.append(word)
            if not equals and words:
                own.append(words.pop(0))
        else:
            if not equals:
                # A negative number begins with one dash, so it is still a value.
                if not words or words[0].startswith("--"):
                    raise ConfigError(_without_value(name, [*flags, *options]))
                value = words.pop(0)
            overrides[name.removeprefix("--")] = value
    return own, overrides


def _without_value(name: str, options: Collection[str]) -> str:
    """What is wrong with a last word that is none of the command's options: only a field may be one."""
    from troupe.common.config.names import SHORT_NAMES

    short = [f"--{each.replace('_', '-')}" for each in SHORT_NAMES]
    if "." in name or name.replace("_", "-") in short:
        return f"{name} needs a value"
    near = difflib.get_close_matches(name, [*options, *short], n=1)
    return f"unknown option {name}; {f'nearest: {near[0]}' if near else '`--help` lists all'}"
