"""What a shell offers after `troupe`: commands, presets, options, and fields of the configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
from pathlib import Path
from typing import Any

import argcomplete

from troupe.common.config import preset_names
from troupe.common.config.names import SHORT_NAMES
from troupe.common.config.schema import SECTIONS
from troupe.services.commands import COMMANDS


def complete() -> None:
    """Answer the shell and end the process.

    Only the parser of the command on the line is made. Fields of `[agent]` are left out, for they need torch,
    and nobody waits for that at the Tab key.
    """
    typed = os.environ.get("COMP_LINE", "").split()[1:]
    parser = argparse.ArgumentParser(prog="troupe")
    words: dict[str, Any] = {"": parser.add_subparsers()}
    for name, command in COMMANDS.items():
        group, _, word = name.rpartition(" ")
        if group not in words:
            words[group] = words[""].add_parser(group).add_subparsers()
        if typed[: len(name.split())] == name.split():
            own = _with_completers(command.make_parser())
            words[group].add_parser(word, parents=[own], add_help=False, help=command.summary)
        else:
            words[group].add_parser(word, help=command.summary)
    argcomplete.autocomplete(parser)


def _with_completers(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    completers = {
        "preset": _presets,
        "source": _presets,
        "id": _environments,
        "modules": _modules,
        "suite": _suites,
    }
    for action in parser._actions:
        if action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]
    if getattr(parser, "takes_fields", False):
        for name in SHORT_NAMES:
            parser.add_argument(f"--{name.replace('_', '-')}")
        for section, model in SECTIONS.items():
            for name in model.model_fields:
                parser.add_argument(f"--{section}.{name}")
    return parser


def _presets(**_: Any) -> list[str]:
    return preset_names()


def _environments(**_: Any) -> list[str]:
    """Ids of the environments that are installed, without those that a module of the user's registers."""
    found = []
    atari = importlib.util.find_spec("ale_py")
    if atari and atari.origin:
        # Read off the folder: importing ale-py for the list would take longer than anybody waits at the Tab
        # key.
        found += [f"atari:{path.stem}" for path in Path(atari.origin).parent.glob("roms/*.bin")]
    if importlib.util.find_spec("gymnasium"):
        import gymnasium

        # Names with a namespace are other families' (`ALE/`, `phys2d/`), which have prefixes of their own or
        # none here.
        found += [f"gym:{name}" for name in gymnasium.registry if "/" not in name]
    return found


def _suites(**_: Any) -> list[str]:
    from troupe.services.experiments.suites import SUITES  # here: for the other words nobody waits for numpy

    return list(SUITES)


def _modules(**_: Any) -> list[str]:
    """Modules of the user's own: in the folder where the command is typed, and in those of PYTHONPATH."""
    folders = [".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return sorted({module.name for module in pkgutil.iter_modules(folders)})
