"""What a shell offers after `troupe`: commands, presets, options, and fields of the configuration."""

from __future__ import annotations

import argparse

import argcomplete

from common.config import preset_names
from common.config.schema import SECTIONS

_FIELDS = ("train", "resume", "learner")
_OPTIONS = {
    "train": ("--run-dir", "--seed", "--total-steps", "--no-progress", "--sweep", "--keys"),
    "resume": ("--total-steps", "--no-progress", "--sweep", "--keys"),
    "eval": ("--episodes", "--seed", "--epsilon", "--video", "--json"),
    "learner": ("--run-dir", "--resume", "--keys", "--insecure"),
    "actor": ("--learner", "--name", "--slots", "--relay", "--keys"),
    "replay serve": ("--learner", "--bind", "--data-dir", "--table", "--restore", "--keys"),
    "replay status": ("--json", "--keys"),
    "replay snapshot": ("--keys",),
    "evaluator": ("--learner", "--keys"),
}


def complete(commands: dict[str, str]) -> None:
    """Answer the shell and end the process, where it asks; `commands` and what they do.

    Fields of `[agent]` are left out: to know them means to import torch, for which nobody waits at a key.
    """
    parser = argparse.ArgumentParser(prog="troupe")
    chosen = parser.add_subparsers()
    fields = [f"--{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields]
    for name, does in commands.items():
        command = chosen.add_parser(name, help=does)
        if name in ("train", "learner"):
            command.add_argument("preset", choices=preset_names())
        elif name in ("config", "keys", "env"):
            words = {"config": ["show", "validate", "explain"], "keys": ["new", "check"], "env": ["check"]}
            command.add_argument("word", choices=words[name])
        elif name == "replay":
            inner = command.add_subparsers()
            for path in filter(lambda path: path.startswith("replay "), _OPTIONS):
                word = inner.add_parser(path.partition(" ")[2])
                for option in _OPTIONS[path]:
                    word.add_argument(option)
        elif name in ("resume", "eval"):
            command.add_argument("run")
        for option in (*_OPTIONS.get(name, ()), *(fields if name in _FIELDS else ())):
            command.add_argument(option)
    argcomplete.autocomplete(parser)
