"""Commands and code of the pages are what the programs take: words, fields, presets, targets, modules, names.

What may run in a moment is run by the tests of its own page; these look at all of it without running it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.blocks import HISTORY, PAGES, ROOT, blocks
from troupe.common.config import load_config, preset_names
from troupe.common.config.field_options import parse_with_fields
from troupe.common.runtime.commands import find
from troupe.services.commands import COMMANDS

PLACEHOLDER = re.compile(r"^[A-Z][A-Z_]*[0-9]?$|\.\.\.|^\[|[<>]|\$")
"""Words for which a reader puts their own."""
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def texts(page: Path, language: str) -> list[str]:
    return [block.text for block in blocks(page) if block.language == language]


def commands_of(block: str) -> Iterator[list[str]]:
    """Words of each simple command of a shell block."""
    for line in re.sub(r"\\\n", " ", block).splitlines():
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()")
            lexer.whitespace_split = True
            lexer.commenters = "#"
            words = list(lexer)
        except ValueError:  # a quotation over several lines, which no command of ours has
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            if re.fullmatch(r"[|&;()]+", word):
                if command:
                    yield command
                command = []
            elif command or not re.match(r"^[A-Z_]+=", word):  # a variable before a command
                command.append(word)


def inline(page: Path) -> Iterator[list[str]]:
    """Words of the commands within sentences, as far as they are whole: `troupe NAME WORD...`."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`((?:troupe|make|python -m) [^`\n]+)`", text):
        yield from commands_of(command.replace("\\|", "|"))


def check(words: list[str]) -> None:
    """Raise what a user would meet who copies this command."""
    program, rest = os.path.basename(words[0]), words[1:]
    if program == "make":
        targets = [word for word in rest if "=" not in word and not word.startswith("-")]
        unknown = [word for word in targets if word not in TARGETS and not PLACEHOLDER.search(word)]
        assert not unknown, f"no such target: {unknown}"
    elif (
        program.startswith("python")
        and rest[:1] == ["-m"]
        and rest[1].partition(".")[0]
        in (
            "benchmarks",
            "tests",
            "troupe",
            "docs",
        )
    ):
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif program == "troupe":
        check_troupe(rest)


def check_troupe(words: list[str]) -> None:
    if not words or words[0].startswith("-") or PLACEHOLDER.search(words[0]):
        return
    found = find(COMMANDS, words)
    if found is None or {"-h", "--help", "..."} & set(words) or any(word.startswith("[") for word in words):
        return
    command, rest = found
    parser = command.make_parser()
    # A number stands where any is meant.
    rest = ["1" if re.fullmatch(r"N|SECONDS|PORT|HOURS", word) else word for word in rest]
    if not getattr(parser, "takes_fields", False):
        parser.parse_args(rest)
        return
    options, fields = parse_with_fields(parser, rest)
    preset = getattr(options, "preset", None)
    if getattr(options, "algo", None) or any(re.search("[A-Z]", name) for name in fields):
        return
    if preset is not None and preset not in preset_names():
        assert PLACEHOLDER.search(preset) or "/" in preset or preset.endswith(".toml"), f"no preset {preset}"
        preset = None
    # A reader's own environments are not here; a field of an algorithm says nothing without its preset.
    given = {
        name: value
        for name, value in fields.items()
        if name not in ("env", "env.id", "keys")
        and not PLACEHOLDER.search(value)
        and (preset or not name.startswith("agent."))
    }
    load_config(preset or "cartpole-ppo", None, given, {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_what_the_programs_take(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if page.name in HISTORY:
        return
    wrong = []
    whole = [words for block in texts(page, "sh") for words in commands_of(block)]
    for words in [*whole, *inline(page)]:
        try:
            check(words)
        except Exception as error:
            # A sentence may name a command without all that it takes.
            if words in whole or not re.search(
                "arguments are required|expected one argument|needs a command", str(error)
            ):
                wrong.append(f"{' '.join(words)}\n    {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_python_with_names_that_exist(page: Path) -> None:
    for block in [*texts(page, "python"), *texts(page, "py")]:
        if re.search(r"^\s*\.\.\.$", block, re.MULTILINE) and not _parses(block):
            continue  # a form to fill in
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("troupe"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "troupe"
            ):
                assert hasattr(importlib.import_module("troupe"), node.attr), f"troupe.{node.attr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_toml_is_toml(page: Path) -> None:
    for block in texts(page, "toml"):
        tomllib.loads(block)


def _parses(block: str) -> bool:
    try:
        ast.parse(block)
    except SyntaxError:
        return False
    return True
