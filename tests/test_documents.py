"""The pages that a reader is sent to exist, and say what is true of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from troupe.common.config import load_config, preset_names

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)  # without code
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([\w./-]+\.md)?#([\w-]+)\)", page.read_text("utf-8")):
        target = page.parent / file if file else page
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
        # As GitHub makes them of headings.
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{page.name} links to {file}#{anchor}"


def test_presets_that_the_readme_shows_exist() -> None:
    named = re.findall(r"troupe train ([a-z0-9-]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(named) > 5
    assert set(named) - {"--algo"} <= set(preset_names())


@pytest.mark.parametrize(
    ("page", "preset"), [("apex", "pong-apex"), ("r2d2", "pong-r2d2"), ("impala", "pong-impala")]
)
def test_the_page_for_who_comes_from_elsewhere_names_real_fields(page: str, preset: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8").partition("## Flags")[2]
    config = load_config(preset).to_dict()
    named = re.findall(rf"`({'|'.join(config)})\.(\w+)", text)
    assert len(named) > 30
    assert [f"{section}.{name}" for section, name in named if name not in config[section]] == []
    for row in re.findall(r"^\| `\w+` [^|]*\|.*\|$", text, re.MULTILINE):
        assert re.search(r"`\w+\.\w+`|not needed \| (because|for the same reason)", row), row


def test_the_ways_through_the_files_name_real_ones() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.partition("### Where each of these is")[2].partition("|---")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+)/`: ([^;|\n]+)", re.sub(r" \([^)]*\)", "", table))
    files = [f"{folder}/{name.strip(' `')}.py" for folder, names in named for name in names.split(", ")]
    assert len(files) > 100
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_every_target_of_the_makefile_is_documented() -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    assert set(phony.group(1).split()) == set(re.findall(r"^([a-z0-9-]+):.* ## ", text, re.MULTILINE))
