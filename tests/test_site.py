"""The site of the documentation: whole, without links that lead nowhere, and without any other host."""

import hashlib
import re
import subprocess
import sys

import yaml

from docs import site

MERMAID = "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8"
"""SHA-256 of dist/mermaid.tiny.js of @mermaid-js/tiny 11.17.2 as npm has it (MIT)."""


def entries(nav):
    for entry in nav:
        (target,) = entry.values()
        yield from [target] if isinstance(target, str) else entries(target)


def test_every_page_is_in_the_navigation_once():
    text = re.sub(r"!!python/name:\S+", "x", site.CONFIG.read_text())
    assert sorted(entries(yaml.safe_load(text)["nav"])) == sorted(site.pages().values())


def build(tmp_path):
    text = site.CONFIG.read_text()
    assert "docs_dir: build/pages\nsite_dir: build/site\n" in text
    (tmp_path / "mkdocs.yml").write_text(text.replace("build/", ""))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)


def test_it_is_built_and_asks_no_other_host(tmp_path):
    site.stage(tmp_path / "pages")
    done = build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(site.pages())  # and the one of errors
    for page in pages:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert not [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)], page
    # Without its own, the theme takes it from elsewhere.
    assert "assets/mermaid.tiny.js" in (tmp_path / "site" / "architecture" / "index.html").read_text()
    script = (tmp_path / "site" / "assets" / "mermaid.tiny.js").read_bytes()
    assert hashlib.sha256(script).hexdigest() == MERMAID


def test_a_link_that_leads_nowhere_fails(tmp_path):
    site.stage(tmp_path / "pages")
    with (tmp_path / "pages" / "sac.md").open("a") as file:
        file.write("\n[there](runs.md#no-such-heading)\n")
    assert build(tmp_path).returncode != 0
