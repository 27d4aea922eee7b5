"""Builds the site of the documentation, `python -m docs.site`: without a network, and strict about links.

The pages are those that a checkout shows, in a folder of their own: README.md is the first one, and links to
files that are no pages become text, since a site has no checkout beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "mkdocs.yml"
STAGED = ROOT / "build" / "pages"
OUTSIDE = {
    "README.md": "index.md",
    "docs/index.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "examples/outside/README.md": "outside.md",
    "deploy/terraform/README.md": "terraform.md",
}
"""Pages that have another place in the site, by file of the checkout."""

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages() -> dict[str, str]:
    """Names of the site's pages, by file of the checkout, both relative."""
    inside = {f"docs/{path.name}": path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    return inside | OUTSIDE


def staged(source: str, names: dict[str, str]) -> str:
    """Return the text of a page with its links as the site has them."""

    def replaced(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        file, anchor = target.partition("#")[::2]
        if "://" in target or target.startswith("#"):
            return match.group(0)
        found = os.path.relpath(ROOT / Path(source).parent / file, ROOT)
        if found in names:
            return f"{picture}[{text}]({names[found]}{'#' + anchor if anchor else ''})"
        if found.startswith(("docs/images/", "docs/results/")):
            return f"{picture}[{text}]({found.removeprefix('docs/')})"
        return text

    parts = re.split(r"(^ *```.*?^ *```)", (ROOT / source).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    text = "".join(part if at % 2 else _LINK.sub(replaced, part) for at, part in enumerate(parts))
    return text.replace('src="docs/images/', 'src="images/')  # pictures with a width, in README.md


def stage(folder: Path) -> None:
    """Write all pages, pictures and scripts into `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names = pages()
    for source, name in names.items():
        (folder / name).write_text(staged(source, names), "utf-8")
    for part in ("images", "results", "assets"):
        shutil.copytree(ROOT / "docs" / part, folder / part)


def build() -> int:
    """Build `build/site`; return the exit code of the builder, which any broken link or anchor makes fail."""
    stage(STAGED)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", str(CONFIG)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(build())
