"""The page as one file, with what it shows in it: it needs no server, and asks for nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError
from troupe.common.runtime.files import make_directory, write_output
from troupe.services.board import films, views
from troupe.services.board.charts import AXES, Chart, Charts
from troupe.services.board.library import Entry, Library
from troupe.services.board.sweeps import Sweeps
from troupe.services.board.timeline import Limits, as_values, moments_of
from troupe.services.board.traces import Traces

STATIC = Path(__file__).parent / "static"
CHOSEN = 12
"""Runs with their curves on the first page, those written to last, as on the page of a server."""
MAX_PAGES = 50
"""Runs and sweeps with a page of their own."""
MAX_FILM_BYTES, MAX_FILMS_BYTES = 1 << 20, 1 << 23
"""Of one film in the page, and of all."""
COLUMNS = 600
METRICS = ("", "train/episode_return", "speed/steps_per_s")
_MAX_READS = 64
_SCRIPT = re.compile(r'<script defer src="static/([^"]+)"></script>')
_SHEET = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')


def write(library: Library, file: Path) -> None:
    """Write the page of all runs of a library.

    Raises:
        ConfigError: it cannot be written.
    """
    library.refresh()
    page = _page(_answers(library))
    make_directory(file.absolute().parent, "directory of the page")
    write_output(file, page.encode())


def _answers(library: Library) -> dict[str, Any]:
    """What the page may ask for, by question; see `Board.get` of server.js."""
    traces = Traces()
    charts, limits = Charts(traces), Limits()
    sound = [entry for entry in library.entries() if entry.run is not None]
    newest = sorted(sound, key=lambda entry: -entry.run.changed_s if entry.run is not None else 0.0)
    chosen = newest[:CHOSEN]
    sweeps = Sweeps(library)
    answers: dict[str, Any] = {
        "runs": views.listing(library, sweeps),
        "differences": views.differences(chosen),
    }
    # In the order of the page: what it shows first is what it asks for.
    answers["chosen"] = [entry.id for entry in chosen]
    for metric in METRICS:
        for axis in AXES:
            for bands in (True, False):
                _chart(answers, charts, chosen, Chart(metric, axis, COLUMNS, bands=bands))
    for folder in library.sweeps()[:MAX_PAGES]:
        with suppress(ConfigError):  # the row of one that cannot be read says why
            answers[f"sweeps/{folder.id}"] = sweeps.details(folder)
    room = MAX_FILMS_BYTES
    for entry in newest[:MAX_PAGES]:
        details = views.details(entry, traces)
        details["films"] = _films(entry, details["films"], room)
        room -= sum(len(film["data"]) for film in details["films"])
        answers[f"runs/{entry.id}"] = details
        moments = moments_of(traces, entry.path)
        answers[f"runs/{entry.id}/timeline"] = {"version": 1, **limits.of(entry.path), **as_values(moments)}
        for axis in AXES:
            _chart(answers, charts, [entry], Chart("", axis, COLUMNS))
    return answers


def _films(entry: Entry, names: Sequence[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    """The newest film, in the page itself, if it is small enough."""
    for film in names[:1]:
        try:
            file, kind = films.opened(entry.path, film["name"])
        except OSError:
            break
        with file:
            data = file.read(MAX_FILM_BYTES + 1)
        address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if len(data) <= MAX_FILM_BYTES and len(address) <= room:
            return [{**film, "data": address}]
    return []


def _chart(answers: dict[str, Any], charts: Charts, entries: Sequence[Entry], chart: Chart) -> None:
    for _ in range(_MAX_READS):  # a large file takes several
        found = charts.draw(entries, chart)
        if found["complete"]:
            break
    ids = ",".join(entry.id for entry in entries)
    answers[f"chart {ids} {chart.metric} {chart.axis} {int(chart.bands)}"] = {**found, "complete": True}


def _page(answers: dict[str, Any]) -> str:
    page = (STATIC / "index.html").read_text("utf-8")
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inline(kind: str, name: str) -> str:
        text = (STATIC / name).read_text("utf-8")
        if f"</{kind}" in text.lower():
            raise ConfigError(f"{name} cannot be embedded in a page: it contains the closing tag")
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    page = _SHEET.sub(lambda found: inline("style", found[1]), page)
    # Scripts at the end, where the page is there that a deferred one would wait for.
    scripts = "".join(inline("script", name) for name in _SCRIPT.findall(page))
    page = _SCRIPT.sub("", page).replace('<link rel="icon" href="static/icon.svg">', "")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # Nothing in the data can end its element, whatever runs are called.
    data = json.dumps(answers, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta http-equiv="content-security-policy" content="{policy}">'
    body = f'<script type="application/json" id="exported">{data}</script>{scripts}'
    return page.replace("<title>", f"{head}\n<title>", 1).replace("</body>", f"{body}\n</body>", 1)
