"""The commands and the Python of docs/replay.md run as printed, and docs/replay-operations.md is complete."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tests.replay.storage.replays import open_replay
from troupe.common.data.table_config import LIMITERS, TableConfig
from troupe.services.replay.rates import Rates
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.status_page import print_page
from troupe.services.replay.storage.samplers import REMOVERS, SAMPLERS

DOCS = Path(__file__).parents[2] / "docs"
REPLAY = (DOCS / "replay.md").read_text()
OPERATIONS = (DOCS / "replay-operations.md").read_text()
ADDRESS = re.compile(r"tcp://127\.0\.0\.1:(\d+)")


def blocks(text):
    """The fenced blocks of a page, as pairs of language and contents."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """The servers that a page starts, as lists of words."""
    lines = "".join(body for language, body in blocks(text) if language == "sh").replace("\\\n", " ")
    return [shlex.split(line) for line in lines.splitlines() if line.startswith("troupe replay serve")]


@pytest.mark.timeout(150)  # the examples wait without end
def test_the_python_of_the_page_prints_what_the_page_says(server, tmp_path):
    def local(text):
        """The servers are bound in a private directory: ports may be taken."""
        return ADDRESS.sub(rf"ipc://{tmp_path}/\1", text)

    for words in commands(REPLAY):
        _, _, _, bind, address, data, folder, *options = words
        assert (bind, data) == ("--bind", "--data-dir")
        server(*options, endpoint=local(address), folder=folder)
    space = {"__name__": "document"}
    printed = None
    for language, body in blocks(REPLAY):
        if language == "python":
            assert not printed, f"the page does not say that this is printed: {printed}"
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(local(body), "docs/replay.md", "exec"), space)
            printed = output.getvalue()
        elif language == "text":
            assert printed == local(body)
            printed = None
    for client in ("client", "sequences", "tables", "actor", "sharded"):
        space[client].close(0)


@pytest.mark.parametrize("name", [*SAMPLERS, *REMOVERS, *LIMITERS, *vars(TableConfig())])
def test_every_word_about_a_table_is_explained(name):
    section = re.search(r"^## Tables\n(.*?)^## ", REPLAY, re.DOTALL | re.MULTILINE)[1]
    assert name == "name" or f"`{name}`" in section


def test_every_metric_is_in_the_table_and_nothing_else(tmp_path):
    replay = open_replay(tmp_path, 10)
    rates = Rates(replay, RequestHandlers(replay, None, 1, dict))
    names = {name.removeprefix("replay/") for name in (*rates.metrics(), *rates.details())}
    for family in rates.families():
        names.add(family.name.removeprefix("troupe_replay_") + "_total" * (family.type == "counter"))
    section = re.search(r"^## Metrics\n(.*?)^## ", OPERATIONS, re.DOTALL | re.MULTILINE)[1]
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == names


def test_the_status_page_has_the_rows_that_are_shown(server, client, tmp_path):
    endpoint = server(*commands(REPLAY)[1][7:])
    one = client(endpoint)
    console = Console(file=io.StringIO(), width=120)
    print_page(endpoint, one.status(60), console)
    rows = re.findall(r"^(\w[\w /%]*?)  ", console.file.getvalue(), re.MULTILINE)
    page = re.search(r"^## Status\n(.*?)^## ", OPERATIONS, re.DOTALL | re.MULTILINE)[1]
    assert len(rows) > 8
    assert set(rows) == set(re.findall(r"^(\w[\w /%]*?)  ", page, re.MULTILINE))
