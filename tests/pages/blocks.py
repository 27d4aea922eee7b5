"""The pages, and the fenced blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)
HISTORY = {"CHANGELOG.md", "results.md", "benchmarks.md"}
"""Pages that say how something was run once, with the options of then."""
_BLOCK = re.compile(
    r"^(?: *<!-- (not run|file): ([^\n]*?) -->\n\s*?)?^( *)```(\w+)\n(.*?)^ *```", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A fenced block, and what the comment before it says: `not run: REASON`, `file: NAME`, or nothing."""

    line: int
    language: str
    mark: str
    words: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All of a page that name their language."""
    text = page.read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        mark, words, indent, language, body = match.groups()
        line = text[: match.start(4)].count("\n") + 1
        body = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        found.append(Block(line, language, mark or "", words or "", body))
    return found


def to_run(page: Path) -> list[Block]:
    """Those that a reader runs or saves."""
    return [
        block
        for block in blocks(page)
        if block.mark == "file" or (block.language in ("sh", "python") and block.mark != "not run")
    ]
