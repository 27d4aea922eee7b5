"""Tables of commands: dispatch, `--help`, completion and the page of commands all read the same entry."""

from __future__ import annotations

import argparse
import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser

Commands = Mapping[str, "Command"]
"""By name; the commands of a group have two words, such as `config show`."""


class Command(NamedTuple):
    """One command.

    Its module is imported when it is needed, so that `troupe presets` does not wait for torch. The parser's
    module imports no torch, which would be too slow at the Tab key.

    Attributes:
        summary: a line for `troupe --help`.
        function: `module:function`, which takes the words after the name and returns the exit code.
        parser: `module:function`, which makes the parser; by default the function's name with `_parser`.
    """

    summary: str
    function: str
    parser: str = ""

    def run(self, words: Sequence[str]) -> int:
        """Do it; return the exit code."""
        return int(_found(self.function)(words) or 0)

    def make_parser(self) -> argparse.ArgumentParser:
        """Return the parser of its words."""
        parser: argparse.ArgumentParser = _found(self.parser or f"{self.function}_parser")()
        return parser


def _found(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def listing(commands: Commands) -> str:
    """Return a line for each command."""
    width = max(map(len, commands))
    return "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())


def find(commands: Commands, words: Sequence[str]) -> tuple[Command, list[str]] | None:
    """Return the command that `words` begin with, and the words after its name; None for a group's `--help`.

    Raises:
        ConfigError: there is no such command, in one line that names the nearest.
    """
    # Two words first: `config show` must not be taken for a command `config`.
    for count in (2, 1):
        command = commands.get(" ".join(words[:count]))
        if command is not None and len(words) >= count:
            return command, list(words[count:])
    group = {name.partition(" ")[2]: name for name in commands if name.startswith(f"{words[0]} ")}
    if not group:
        near = difflib.get_close_matches(words[0], [name.partition(" ")[0] for name in commands], n=1)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(f"unknown command {words[0]!r}{nearest} (`troupe --help` lists all)")
    if words[1:2] in (["-h"], ["--help"]):
        return None
    raise ConfigError(_unknown(words[0], words[1] if len(words) > 1 else "", list(group)))


def dispatch(commands: Commands, words: Sequence[str]) -> int:
    """Run the command that `words` begin with, and return its exit code; see `find`."""
    found = find(commands, words)
    if found is not None:
        return found[0].run(found[1])
    group = {
        name.partition(" ")[2]: each for name, each in commands.items() if name.startswith(f"{words[0]} ")
    }
    Parser(
        prog=f"troupe {words[0]}",
        usage=f"troupe {words[0]} COMMAND [ARGUMENT ...]",
        description=f"commands (`troupe {words[0]} COMMAND --help` shows the options):\n{listing(group)}",
    ).print_help()
    return 0


def _unknown(group: str, word: str, commands: Sequence[str]) -> str:
    """What to say where no command of a group stands."""
    hint = f"(`troupe {group} --help` lists them)"
    if not word:
        return f"troupe {group} needs a command: {', '.join(commands)} {hint}"
    option = word.partition("=")[0]
    if option.lstrip("-") in commands:
        return f"{option} is a command: `troupe {group} {option.lstrip('-')} --help` shows its usage"
    if option.startswith("-"):
        return f"a command stands before {option}: `troupe {group} {commands[0]} {option} ...`"
    near = difflib.get_close_matches(word, commands, n=1)
    nearest = f"; nearest: {near[0]}" if near else f"; there are {', '.join(commands)}"
    return f"unknown command '{group} {word}'{nearest} {hint}"
