"""The `config.toml` of many runs, read fast: a line that several have in common is parsed once."""

from __future__ import annotations

import copy
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

from troupe.common.config.presets import read_toml
from troupe.common.config.text import load_toml

_SECTION = re.compile(r"\[([A-Za-z0-9_-]+)\]")
# An entry of a list of tables, such as those of replay.
_ELEMENT = re.compile(r"\[\[([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\]\]")
# A key of one part; the value is the parser's business.
_ENTRY = re.compile(r"[A-Za-z0-9_-]+ = \S.*")
_MAX_LINES = 1 << 15
_MAX_CHARS = 1 << 12


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a run's `config.toml`.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        tables = _by_lines(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        tables = None
    # Whatever is unusual, wrong included, is the parser's of whole documents.
    return read_toml(path) if tables is None else tables


def _by_lines(text: str) -> dict[str, Any] | None:
    """The tables of a document with one whole value a line, as a launcher writes it; None of any other."""
    tables: dict[str, Any] = {}
    section = tables
    lists: set[tuple[str, str]] = set()
    for line in text.split("\n"):
        if not line or line.startswith("#"):
            continue
        if header := _SECTION.fullmatch(line):
            if header[1] in tables:
                return None
            section = tables[header[1]] = {}
            continue
        if element := _ELEMENT.fullmatch(line):
            above, name = tables.get(element[1]), element[2]
            if not isinstance(above, dict) or (name in above and (element[1], name) not in lists):
                return None
            lists.add((element[1], name))
            section = {}
            above.setdefault(name, []).append(section)
            continue
        pair = _entry(line) if len(line) <= _MAX_CHARS and _ENTRY.fullmatch(line) else None
        if pair is None or pair[0] in section:
            return None
        # A list may be changed in place: each run has its own.
        section[pair[0]] = copy.deepcopy(pair[1]) if isinstance(pair[1], dict | list) else pair[1]
    return tables


@functools.lru_cache(_MAX_LINES)
def _entry(line: str) -> tuple[str, Any] | None:
    """Key and value of a line that is a document of its own; no first line of a longer value is one."""
    try:
        pairs = list(load_toml(line).items())
    except tomllib.TOMLDecodeError:
        return None
    return pairs[0] if len(pairs) == 1 else None
