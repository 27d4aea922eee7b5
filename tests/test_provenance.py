"""What the pages of results name can be found: commits in the history."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("docs/results.md", "docs/elite.md", "docs/scores.md")
GONE = " (not in the history)"
_HASH = re.compile(r"(?<![\w.-])(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}(?![\w-])")


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def history():
    """Every commit before this one."""
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no whole history here")
    return git("rev-list", "HEAD").stdout.split()


def is_there(commit, history):
    return any(each.startswith(commit) for each in history)


@pytest.mark.parametrize("page", PAGES)
def test_every_commit_that_is_named_is_in_the_history_or_said_not_to_be(page, history):
    text = (ROOT / page).read_text()
    named = {found[0]: text[found.end() :].startswith(GONE) for found in _HASH.finditer(text)}
    assert {commit: not is_there(commit, history) for commit in named} == named


def test_what_is_released_names_its_commit(history):
    found = {}
    for meta in (ROOT / "release").glob("*/*/meta.json"):
        code = json.loads(meta.read_text()).get("troupe", {})
        found[meta.parts[-3]] = code.get("commit", "")
    assert found
    assert [name for name, commit in found.items() if not commit or not is_there(commit, history)] == []
