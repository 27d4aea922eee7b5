"""Sweeps: what their trials tried and what came of it, from the record that a sweep keeps of its runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError
from troupe.common.runtime.logging import peer_text, printable
from troupe.services.board import importances, shown
from troupe.services.board.importances import Axis, Outcome
from troupe.services.board.library import MAX_SWEEPS, Entry, Folder, Library
from troupe.services.board.opening import open_regular, stamp
from troupe.services.experiments.groups import ENV, PRESET, short_names
from troupe.services.experiments.plan import NAME, RECORD, SECTION, SEED
from troupe.services.experiments.population import copies_in_words, generation_of
from troupe.services.experiments.space import Range, read_space

MAX_BYTES = 1 << 24
_DAMAGED = (ConfigError, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
MAX_TRIALS = 1_000
MAX_AXES = 20
MAX_CHOICES = 24
"""Different numbers of a field up to which each has a place of its own."""
_MAX_KEPT = 64
_MAX_CHARS = 60
_LOG_RATIO = 50.0
"""Of the largest to the least number that was tried: beyond, their axis is logarithmic."""
_RUNS = "runs"
_STATES = ("running", "failed", "stopped", "paused", "waiting", "pruned", "done")
"""Of several runs, the state of all is the first of these that one has."""
_OVER = ("done", "failed", "pruned", "paused")
_ABSENT = object()


@dataclass(frozen=True)
class Trial:
    """A setting: all runs of it, which differ in their seeds only.

    Attributes:
        task: the environment where the sweep has several.
        at: place on each axis; None where the trial has no value.
        runs: names of its runs.
    """

    task: str
    at: tuple[float | None, ...]
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Record:
    """What a sweep says of itself.

    Attributes:
        kind: how it chooses what to try.
        preset: what its runs begin from.
        axes: the fields in which its trials differ.
        trials: in the order in which they were planned.
        states: of runs, as the sweep last noted them, and why they failed.
        copies: of a population, by run: as which others it went on, in words.
    """

    kind: str
    preset: str
    axes: Sequence[Axis]
    trials: Sequence[Trial]
    states: Mapping[str, tuple[str, str]]
    copies: Mapping[str, str] | None = None


class Sweeps:
    """The sweeps of a library. May be used from any thread."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()
        self._records: OrderedDict[Path, tuple[Any, Record | str]] = OrderedDict()
        self._importances: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def rows(self) -> list[dict[str, Any]]:
        """Every sweep: `id`, `name`, `kind`, `runs`, `over`, `best`, or `problem`."""
        rows = []
        for folder in self._library.sweeps():
            row: dict[str, Any] = {"id": folder.id, "name": folder.name}
            try:
                record = self._record(folder)
            except ConfigError as error:
                rows.append({**row, "problem": str(error)})
                continue
            scores = []
            over = 0
            for trial in record.trials:
                told = self._told(folder, record, trial)
                over += sum(each["state"] in _OVER for each in told)
                # Scores of trials that go on, or were cut short, are not those of whole runs.
                if all(each["state"] == "done" for each in told):
                    scores.append(_mean([each["score"] for each in told]))
            known = [score for score in scores if score is not None]
            # A sweep over several environments has no one best: their returns have nothing in common.
            best = max(known) if known and len({trial.task for trial in record.trials}) == 1 else None
            runs = len(record.states)
            rows.append({**row, "kind": record.kind, "runs": runs, "over": over, "best": best})
        return rows

    def details(self, folder: Folder, after: str = "") -> dict[str, Any]:
        """One sweep, or its `state` alone where that is `after`.

        Returns:
            `id`, `name`, `kind`, `preset`; `counts`, runs by state; `axes`, each with `field`, `label` and
            `values`, or `low`, `high` and `log`; `trials`, each with `number`, `task`, `state`, `score`,
            `at`, `error`, `runs` and `copies`, of a population; `more`, trials that are left out;
            `importances`, by task, see `importances.of`; `state`.

        Raises:
            ConfigError: its record cannot be read.
        """
        record = self._record(folder)
        trials = []
        counts: Counter[str] = Counter()
        numbers: Counter[str] = Counter()  # of each task from 0 on
        for trial in record.trials:
            told = self._told(folder, record, trial)
            states = [each["state"] for each in told]
            counts.update(states)
            errors = [each["error"] for each in told if each["error"]]
            trials.append(
                {
                    "number": numbers[trial.task],
                    "task": trial.task,
                    "state": min(states, key=_STATES.index),
                    "score": _mean([each["score"] for each in told]),
                    "at": [None if at is None else shown.short(at) for at in trial.at],
                    "error": errors[0] if errors else "",
                    "runs": [[each["id"], each["name"]] for each in told],
                    "copies": "; ".join(filter(None, map((record.copies or {}).get, trial.runs))),
                }
            )
            numbers[trial.task] += 1
        found = {
            **{"id": folder.id, "name": folder.name, "kind": record.kind, "preset": record.preset},
            "counts": dict(counts),
            "axes": [_axis_values(axis) for axis in record.axes],
            "trials": trials[:MAX_TRIALS],
            "more": max(0, len(trials) - MAX_TRIALS),
        }
        state = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
        if state == after:
            return {"state": state}
        return {**found, "state": state, "importances": self._importances_of(record, trials)}

    def _importances_of(self, record: Record, trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if record.copies is not None:
            why = "The runs of a population change their values while they learn."
            return {trial["task"]: {"shares": [], "why": why, "trials": 0} for trial in trials}
        by_task: dict[str, list[Outcome]] = {}
        for trial in trials:
            outcomes = by_task.setdefault(trial["task"], [])
            if trial["state"] == "done" and trial["score"] is not None and None not in trial["at"]:
                outcomes.append(Outcome(tuple(trial["at"]), trial["score"]))
        key = repr((record.axes, by_task))
        with self._lock:  # one at a time: the first of them imports Optuna
            if key not in self._importances:
                found = {task: importances.of(record.axes, outcomes) for task, outcomes in by_task.items()}
                self._importances[key] = found
                while len(self._importances) > _MAX_KEPT:
                    self._importances.popitem(last=False)
            return self._importances[key]

    def _told(self, folder: Folder, record: Record, trial: Trial) -> list[dict[str, Any]]:
        """What is known of each run of a trial."""
        told = []
        for name in trial.runs:
            entry = self._library.at(folder.path / _RUNS / name)
            state, error = record.states[name]
            told.append(
                {
                    "id": entry.id if entry is not None else "",
                    "name": printable(name),
                    "state": _state(state, entry),
                    "error": error,
                    "score": _score(entry),
                }
            )
        return told

    def _record(self, folder: Folder) -> Record:
        now = stamp(folder.path, RECORD)
        with self._lock:
            before, record = self._records.get(folder.path, (None, ""))
            if before is None or before != now:
                try:
                    record = _read(folder.path)
                except _DAMAGED as error:
                    record = f"its {RECORD} cannot be read: {peer_text(str(error))}"
                self._records[folder.path] = (now, record)
                while len(self._records) > MAX_SWEEPS:
                    self._records.popitem(last=False)
        if isinstance(record, str):
            raise ConfigError(record)
        return record


def _read(folder: Path) -> Record:
    with open_regular(folder, RECORD, at_most=MAX_BYTES) as file:
        record = _table(json.loads(file.read(MAX_BYTES)))
    section = _table(_table(record["tables"])[SECTION])
    runs = {
        name: told
        for name, told in _table(record["runs"]).items()
        if isinstance(told, dict) and isinstance(told.get("fields"), dict) and _is_file_name(name)
    }
    states = {
        name: (str(told.get("state")), peer_text(str(told.get("error", "")))) for name, told in runs.items()
    }
    fields = {name: told["fields"] for name, told in runs.items()}
    tasks = {name: shown.text(own[ENV], _MAX_CHARS) if ENV in own else "" for name, own in fields.items()}
    if len(set(tasks.values())) == 1:
        tasks = dict.fromkeys(tasks, "")
    axes, places = _axes(list(fields.values()), _ranges(section))
    trials: dict[Any, Trial] = {}
    for index, name in enumerate(runs):
        at = tuple(column[index] for column in places)
        # Without an axis each seed is a trial: there is nothing else to tell them apart.
        key = (tasks[name], at, "" if axes else name)
        trials.setdefault(key, Trial(tasks[name], at)).runs.append(name)
    preset = Path(str(record["preset"])).stem
    copies = None
    if record.get("population"):
        generations = [generation_of(told) for told in _table(record["population"])["generations"]]
        copies = {name: peer_text(told) for name, told in copies_in_words(generations).items()}
    return Record(_kind(section), shown.text(preset, _MAX_CHARS), axes, list(trials.values()), states, copies)


def _is_file_name(name: str) -> bool:
    try:  # JSON can have half of a surrogate pair, which no path has
        return "/" not in name and bool(os.fsencode(name))
    except UnicodeEncodeError:
        return False


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a sweep did not write it")
    return value


def _ranges(section: Mapping[str, Any]) -> dict[str, Range]:
    try:
        space = read_space(RECORD, _table(section.get("search", {})))
    except (ConfigError, ValueError):  # of another version: values speak for themselves
        return {}
    return {name: place for name, place in space.items() if isinstance(place, Range)}


def _axes(
    runs: Sequence[Mapping[str, Any]], ranges: Mapping[str, Range]
) -> tuple[list[Axis], list[list[float | None]]]:
    """The fields in which runs differ, and the place of each run on each of them."""
    names: dict[str, None] = {}
    for run in runs:
        names.update(dict.fromkeys(run))
    apart = (SEED, NAME, ENV)
    varied = [n for n in names if n not in apart and len({repr(r.get(n, _ABSENT)) for r in runs}) > 1]
    varied = varied[:MAX_AXES]
    short = short_names(varied)
    axes, places = [], []
    for name in varied:
        axis, column = _axis(name, short[name], [run.get(name, _ABSENT) for run in runs], ranges.get(name))
        axes.append(axis)
        places.append(column)
    return axes, places


def _axis(
    name: str, label: str, values: Sequence[Any], range_: Range | None
) -> tuple[Axis, list[float | None]]:
    numbers = [_number(value) for value in values]
    given = [number for number in numbers if number is not None]
    are_numbers = len(given) == sum(value is not _ABSENT for value in values)
    field_name, label = shown.text(name, _MAX_CHARS), shown.text(label, _MAX_CHARS)
    if are_numbers and (range_ is not None or len(set(given)) > MAX_CHOICES):
        low, high = min(given), max(given)
        if range_ is not None:
            low, high = min(low, range_.low), max(high, range_.high)
        log = low > 0 and (range_.log if range_ is not None else high / low >= _LOG_RATIO)
        return Axis(field_name, label, low=low, high=high, log=log), numbers
    texts = [
        f"the {PRESET.partition('.')[2]}'s" if each is _ABSENT else shown.text(each, _MAX_CHARS)
        for each in values
    ]
    order = dict(zip(texts, numbers, strict=True))
    # Numbers by size, and then texts.
    ordered = sorted(order, key=lambda text: (order[text] is None, order[text] or 0.0, text))
    index = {text: float(at) for at, text in enumerate(ordered)}
    return Axis(field_name, label, values=tuple(ordered)), [index[text] for text in texts]


def _axis_values(axis: Axis) -> dict[str, Any]:
    named = {"field": axis.field, "label": axis.label}
    if axis.values:
        return {**named, "values": list(axis.values)}
    return {**named, "low": shown.short(axis.low), "high": shown.short(axis.high), "log": axis.log}


def _kind(section: Mapping[str, Any]) -> str:
    if section.get("population"):
        kind = "population"
    elif section.get("study") == "tpe":
        kind = "study (TPE)"
    else:
        words = {"grid": "grid", "list": "list", "search": "random search", "suite": "suite"}
        kind = ", ".join(word for key, word in words.items() if section.get(key)) or "seeds"
    return f"{kind}, successive halving" if section.get("halving") else kind


def _state(noted: str, entry: Entry | None) -> str:
    """A run's state: what the sweep has decided about it, else what its directory says."""
    if noted in _OVER:
        return noted
    if entry is not None and entry.run is not None:
        return entry.run.state
    return "failed" if entry is not None else "waiting"


def _score(entry: Entry | None) -> float | None:
    return entry.run.score if entry is not None and entry.run is not None else None


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return shown.short(sum(known) / len(known)) if known else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None
