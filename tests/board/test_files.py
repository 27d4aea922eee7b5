"""What the page is made of: files of others as they were, nothing of another host, and it is small."""

import gzip
import hashlib
import re

from troupe.services.board.app import STATIC

MAX_BYTES = 150_000
VENDOR = STATIC / "vendor"
ROW = re.compile(r"\| `([^`]+)` \| ([\w.-]+@[\d.]+) \| `[^`]+` \| (.+) \| `([0-9a-f]{64})` \|")


def test_files_of_others_are_those_of_the_table():
    rows = {
        found[1]: found
        for found in map(ROW.fullmatch, (VENDOR / "README.md").read_text().splitlines())
        if found
    }
    assert rows.keys() == {path.name for path in VENDOR.iterdir()} - {"README.md"}
    for name, row in rows.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == row[4], name
        if not name.startswith("LICENSE"):
            assert set(re.findall(r"LICENSE\.\w+", row[3])) & rows.keys(), f"{name} has no licence"


def test_the_page_is_small():
    parts = re.findall(r'(?:src|href)="static/([^"]+)"', (STATIC / "index.html").read_text())
    assert len(parts) > 8
    assert sum(len(gzip.compress((STATIC / part).read_bytes())) for part in parts) < MAX_BYTES / 2
    assert sum((STATIC / part).stat().st_size for part in parts) < MAX_BYTES


def test_our_own_files_name_no_other_host_and_make_no_html_of_text():
    for path in STATIC.iterdir():
        if path.is_file():
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"(?:src|href|url|import|fetch)\W{1,3}(?:https?:)?//", text), path
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
            ), path
            assert "dangerouslySetInnerHTML" not in text, path
    assert not re.search(r"<script(?![^>]* src=)|style=|\son\w+=", (STATIC / "index.html").read_text())
