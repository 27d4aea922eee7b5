"""Command lines that name configuration fields: `--section.field VALUE` among ordinary options."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from troupe.common.errors import ConfigError


def parse_with_fields(
    parser: argparse.ArgumentParser, words: Sequence[str]
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Parse a command line of `parser`'s options and of fields, the latter as text."""
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
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value")
                value = words.pop(0)
            overrides[name.removeprefix("--")] = value
    return own, overrides
