"""Runs as the page has them: plain values for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from troupe.common.runtime.files import read_status, silent_after_s
from troupe.common.runtime.logging import peer_text, printable
from troupe.services.board import films, notes, shown
from troupe.services.board.library import Entry, Library
from troupe.services.board.sweeps import Sweeps
from troupe.services.board.traces import GAMES, NAME, Evaluations, Traces, names_of
from troupe.services.experiments.groups import ALGORITHM, differing_fields
from troupe.services.experiments.runs import Run

_MAX_FIELDS = 2_000
_MAX_PEERS = 256
GAMES_OF = ("returns", "lengths", "levels")
"""Of an evaluation: a value for each episode."""
MAX_DIFFERENCES = 200
"""Fields in the table of what differs."""


def listing(library: Library, sweeps: Sweeps, after: int = 0) -> dict[str, Any]:
    """All runs, or those that have changed after a version of the library.

    Returns:
        `version`; `complete`, whether every run has been read; `runs`, each with `id`, `name`, `state`,
        `score`, `steps`, `total_steps`, `minutes`, `algorithm`, `preset`, `env`, `seed`, `differs`,
        `changed_s` and `note` (its first line), or with `problem`; `gone`, ids; `fields`, those in which the
        runs differ; `sweeps`, all of them, see `Sweeps.rows`.
    """
    version, entries, gone = library.changed(after)
    labels, fields = library.labels()
    return {
        "version": version,
        "complete": library.is_read,
        "fields": fields[:MAX_DIFFERENCES],
        "gone": gone,
        "sweeps": sweeps.rows(),
        "runs": [_row(entry, labels.get(entry.id, "")) for entry in entries],
    }


def details(entry: Entry, traces: Traces) -> dict[str, Any]:
    """One run: its row, services, films, configuration, newest metrics, their names, evaluations and note."""
    run = entry.run
    metrics = run.metrics if run is not None else {}
    names = {name for name in metrics if NAME.fullmatch(name)} | set(names_of(entry.path))
    evaluations = traces.evaluations(entry.path)
    status = read_status(entry.path) if run is not None else {}
    return {
        **_row(entry, ""),
        "services": _services(status),
        "environments": _environments(status),
        "films": _films(entry, evaluations),
        "config": _config(run) if run is not None else {},
        "metrics": {
            printable(name): shown.short(value) for name, value in sorted(metrics.items())[:_MAX_FIELDS]
        },
        "names": [*sorted(names), *GAMES],
        "evaluations": [
            {name: value for name, value in row.items() if name not in GAMES_OF}
            for row in evaluations.rows[-200:]
        ],
        "note": notes.read(entry.path),
    }


def _films(entry: Entry, evaluations: Evaluations) -> list[dict[str, Any]]:
    """The films, each with the evaluation whose first episode it shows: `games`, see `GAMES_OF`."""
    # Of a resumed run several may stand at the same steps: the last one is the one that was kept.
    at = {row["steps"]: row for row in evaluations.rows}
    found = []
    for film in films.names(entry.path):
        row = at.get(film["steps"])
        games = {} if row is None else {"games": {name: row[name] for name in GAMES_OF}}
        found.append({**film, **games})
    return found


def _services(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who is in a run, as its learner said: its name, role, host, slots, silence, restarts and numbers."""
    own = {"name": "learner", "role": "learner", **{name: status.get(name) for name in ("host", "restarts")}}
    numbers = status.get("services", {})
    found = []
    for peer in [own, *status.get("peers", [])][:_MAX_PEERS] if status else []:
        if peer["role"] == "viewer":
            continue
        said = numbers.get(peer["name"], {})
        prefix = {"evaluator": "eval"}.get(peer["role"], peer["role"])
        row = {name: peer_text(str(peer.get(name) or "")) for name in ("name", "role", "host", "error")}
        figures = {name: peer.get(name) for name in ("seen_s_ago", "restarts")}
        figures["slots"] = len(peer.get("slots", []))
        figures["silent"] = int((peer.get("seen_s_ago") or 0.0) >= silent_after_s(peer))
        for name, metric in (
            ("cores", f"{prefix}/cpu_cores"),
            ("starved", f"{prefix}/starved_cores"),
            ("memory_bytes", f"{prefix}/memory_bytes"),
            ("memory_share", f"{prefix}/memory_share"),
            ("behind", "params/staleness"),
        ):
            figures[name] = said.get(metric)
        finite = {name: value for name, value in figures.items() if _is_finite(value)}
        found.append({**row, **{name: shown.short(value) for name, value in finite.items()}})
    return found


def _environments(status: Mapping[str, Any]) -> dict[str, Any]:
    """What went wrong in environments: `failures`, `hangs`, and the `last` in words."""
    told = status.get("environments", {})
    counts = {name: told.get(name, 0) for name in ("failures", "hangs")}
    counts = {name: value if _is_finite(value) else 0 for name, value in counts.items()}
    return {**counts, "last": peer_text(str(told.get("last", "")))}


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # also of an integer of any size


def differences(entries: Sequence[Entry]) -> dict[str, Any]:
    """What differs in the configurations of runs: `fields`, and of each run `id` and a text for each."""
    present = [(entry, entry.run) for entry in entries if entry.run is not None]
    fields = [*differing_fields([run for _, run in present])][:MAX_DIFFERENCES]
    seeds = {repr(run.fields.get("run.seed")) for _, run in present}
    fields += ["run.seed"] if len(seeds) > 1 else []
    rows = [
        {"id": e.id, "values": [shown.text(run.fields.get(name)) for name in fields]} for e, run in present
    ]
    return {"fields": [printable(name) for name in fields], "runs": rows}


def _row(entry: Entry, label: str) -> dict[str, Any]:
    run = entry.run
    if run is None:
        what = entry.problem or "not read yet"
        return {
            "id": entry.id,
            "name": entry.name,
            "state": "unreadable" if entry.problem else "",
            "problem": what,
        }
    return {
        "id": entry.id,
        "name": entry.name,
        "state": run.state,
        "score": None if run.score is None else shown.short(run.score),
        "steps": run.steps,
        "total_steps": run.total_steps,
        "minutes": round(run.wall_s / 60, 2) if math.isfinite(run.wall_s) else 0.0,
        "algorithm": shown.text(run.fields.get(ALGORITHM, "")),
        "preset": shown.text(run.preset),
        "env": shown.text(run.env_id),
        "seed": shown.text(run.fields.get("run.seed", "")),
        "differs": label,
        "changed_s": round(run.changed_s, 1),
        "note": entry.note,
    }


def _config(run: Run) -> dict[str, str]:
    return {printable(name): shown.text(value) for name, value in list(run.fields.items())[:_MAX_FIELDS]}
