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
from troupe.common.config.schema import SECTIONS

_FIELDS = ("train", "resume", "sweep", "learner", "env check")
_OPTIONS = {
    "train": ("--run-dir", "--seed", "--total-steps", "--no-progress", "--sweep", "--keys", "--init-from"),
    "resume": ("--total-steps", "--no-progress", "--sweep", "--keys"),
    "sweep": (
        *("--seeds", "--suite", "--parallel", "--trials", "--dir", "--resume", "--retry", "--dry-run"),
        *("--seed", "--total-steps"),
    ),
    "runs": ("--json",),
    "compare": ("--by", "--metric", "--suite", "--out", "--json"),
    "plot": ("--by", "--metric", "--out", "--x", "--title"),
    "export": ("--format", "--out", "--slots", "--json", "--modules"),
    "eval": (
        *("--episodes", "--seed", "--slots", "--device", "--epsilon", "--greedy", "--sampled", "--all"),
        *("--video", "--render", "--output", "--json", "--modules"),
    ),
    "env check": ("--steps", "--json", "--sweep"),
    "learner": ("--run-dir", "--resume", "--keys", "--insecure"),
    "actor": ("--learner", "--name", "--slots", "--relay", "--keys", "--modules"),
    "replay serve": ("--learner", "--bind", "--data-dir", "--table", "--restore", "--keys"),
    "replay status": ("--json", "--keys"),
    "replay snapshot": ("--keys",),
    "evaluator": ("--learner", "--keys", "--modules"),
}


_WORDS = {"config": ("show", "validate", "explain"), "keys": ("new", "check")}


def complete(commands: dict[str, str]) -> None:
    """Answer the shell and end the process, where it asks; `commands` and what they do.

    Fields of `[agent]` are left out: to know them means to import torch, for which nobody waits at a key.
    """
    parser = argparse.ArgumentParser(prog="troupe")
    chosen = parser.add_subparsers()
    for name, does in commands.items():
        command = chosen.add_parser(name, help=does)
        inner = [path for path in _OPTIONS if path.startswith(f"{name} ")]
        if inner:
            below = command.add_subparsers()
            for path in inner:
                _add_words(below.add_parser(path.partition(" ")[2]), path)
        else:
            _add_words(command, name)
    argcomplete.autocomplete(parser)


def _add_words(command: argparse.ArgumentParser, path: str) -> None:
    """What may stand behind one command."""
    if path in ("train", "learner", "sweep"):
        command.add_argument("preset", choices=preset_names())
    elif path in _WORDS:
        command.add_argument("word", choices=_WORDS[path])
    elif path in ("resume", "eval", "export", "runs", "compare", "plot"):
        command.add_argument("run", nargs="*")
    elif path == "env check":
        _complete_by(command.add_argument("id"), _environments)
    for option in _OPTIONS.get(path, ()):
        action = command.add_argument(option)
        if option == "--modules":
            _complete_by(action, _modules)
        if option == "--suite":
            _complete_by(action, _suites)
    if path in _FIELDS:
        for section, model in SECTIONS.items():
            for name in model.model_fields:
                command.add_argument(f"--{section}.{name}")


def _complete_by(action: argparse.Action, completer: Any) -> None:
    action.completer = completer  # type: ignore[attr-defined]


def _environments(**_: Any) -> list[str]:
    """Ids of the environments that are installed, without those that a module of the user's registers."""
    found = []
    atari = importlib.util.find_spec("ale_py")
    if atari and atari.origin:
        found += [f"atari:{path.stem}" for path in Path(atari.origin).parent.glob("roms/*.bin")]
    if importlib.util.find_spec("gymnasium"):
        import gymnasium

        found += [f"gym:{name}" for name in gymnasium.registry if "/" not in name]
    return found


def _suites(**_: Any) -> list[str]:
    from troupe.services.experiments.suites import SUITES  # here: for the other words nobody waits for numpy

    return list(SUITES)


def _modules(**_: Any) -> list[str]:
    """Modules of the user's own: in the folder where the command is typed, and in those of PYTHONPATH."""
    folders = [".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return sorted({module.name for module in pkgutil.iter_modules(folders)})
