"""Curves of a run, read from its files as they grow: only what is new, and lines that are asked for."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from troupe.common.runtime import metrics
from troupe.common.runtime.files import EPISODES_FILE
from troupe.common.runtime.logging import printable
from troupe.common.runtime.metrics import CSV_FILE, EVALUATIONS_FILE, Row, tensorboard_tag
from troupe.services.board import shown
from troupe.services.board.following import Follower
from troupe.services.board.opening import open_regular

Floats = NDArray[np.float64]
F = TypeVar("F", bound=Follower)

NAME = re.compile(r"[\w./:+-]{1,200}", re.ASCII)
"""Names of metrics, as a learner writes them."""
GAMES = ("episodes/return", "episodes/length")
"""Names for the columns of `episodes.csv`, a value for each training episode."""
MAX_VALUES = 1 << 19
"""Of one curve; one that has more keeps half of them, the least and the largest of every four."""
MAX_EVALUATIONS = 10_000
_MAX_KEPT_VALUES = 1 << 23
_MIN_VALUES = 1 << 10
"""What a follower counts at least: one of a metric that nobody reports takes room too."""
MAX_GAMES = 200
"""Of one evaluation, whose return and length are kept."""
_EVALUATION_VALUES = 3 * MAX_GAMES + 8
"""What a line of evaluations counts."""
_MAX_CURVES = 256
_TAIL_BYTES = 1 << 18
_CLOCK = "speed/steps_per_s"
"""Written every few seconds: tells where a run was resumed, beside evaluations, which stand out of order."""


@dataclass
class Columns:
    """Values of one curve in order of steps, all columns of one length."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    wall_s: array[float] = field(default_factory=lambda: array("d"))
    updates: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, steps: int, wall_s: float, updates: int, value: float) -> None:
        """Append a value."""
        for column, number in zip(self.all, (steps, wall_s, updates, value), strict=True):
            column.append(number)
        if len(self.values) >= MAX_VALUES:
            self._halve()

    def cut(self, steps: int) -> None:
        """Drop what was recorded at `steps` or later."""
        count = len(self.steps)
        while count and self.steps[count - 1] >= steps:
            count -= 1
        for column in self.all:
            del column[count:]

    @property
    def all(self) -> tuple[array[float], ...]:
        """Steps, seconds, updates, values."""
        return self.steps, self.wall_s, self.updates, self.values

    def places(self, axis: str) -> Floats:
        """A copy of the values' places on an axis: `steps`, `minutes` or `updates`."""
        if axis == "minutes":
            return np.array(self.wall_s) / 60
        return np.array(self.updates if axis == "updates" else self.steps)

    def _halve(self) -> None:
        values = np.array(self.values)[: len(self.values) // 4 * 4].reshape(-1, 4)
        base = 4 * np.arange(len(values))
        pairs = np.sort(np.stack([base + values.argmin(1), base + values.argmax(1)], 1), axis=1).ravel()
        for column in self.all:
            kept = np.array(column)[pairs]
            del column[:]
            column.frombytes(kept.tobytes())


class Trace(Follower):
    """The curves of one metric: one for each service that reports it, by its name in TensorBoard."""

    def __init__(self, run: Path, name: str) -> None:
        """Read nothing yet."""
        super().__init__(run, CSV_FILE)
        self._name = name
        self._is_evaluation = name.startswith("eval/")
        self._reached = 0
        self.curves: dict[str, Columns] = {}

    def clear(self) -> None:
        """See `Follower`."""
        self._reached = 0
        self.curves.clear()

    @property
    def count(self) -> int:
        """See `Follower`."""
        return sum(len(columns.values) for columns in self.curves.values())

    def take(self, block: bytes) -> None:
        """See `Follower`."""
        names = [self._name, _CLOCK] if self._is_evaluation else [self._name]
        found = {start: end for name in names for start, end in _lines(block, name)}
        for start in sorted(found):
            row = row_of(block[start : found[start]])
            if row is not None:
                self._add(row)

    def _add(self, row: Row) -> None:
        """As `troupe.services.experiments.runs.read_series` does, for the rows that are looked at."""
        if row.name == _CLOCK and self._is_evaluation:
            if row.steps < self._reached:
                for columns in self.curves.values():
                    columns.cut(row.steps + 1)
                self.changed()
            self._reached = row.steps
        if row.name != self._name:
            return
        tag = tensorboard_tag(row.source, row.name)
        if tag not in self.curves and len(self.curves) >= _MAX_CURVES:
            return
        columns = self.curves.setdefault(tag, Columns())
        if columns.steps and row.steps < columns.steps[-1]:
            columns.cut(row.steps)
        if self._is_evaluation:
            self._reached = max(row.steps, self._reached)
        columns.add(row.steps, row.wall_s, row.updates, row.value)
        self.changed()


class Games(Follower):
    """One column of `episodes.csv`. Lines of several actors are not in order: `curves` puts them so."""

    def __init__(self, run: Path, name: str) -> None:
        """Read nothing yet; `name` is one of `GAMES`."""
        super().__init__(run, EPISODES_FILE)
        self._name = name
        self._column = 5 + GAMES.index(name)
        self._games = Columns()

    @property
    def curves(self) -> dict[str, Columns]:
        """Its one curve."""
        order = np.argsort(np.array(self._games.steps), kind="stable")
        return {self._name: Columns(*(array("d", np.array(column)[order]) for column in self._games.all))}

    def clear(self) -> None:
        """See `Follower`."""
        self._games = Columns()

    @property
    def count(self) -> int:
        """See `Follower`."""
        return len(self._games.values)

    def take(self, block: bytes) -> None:
        """See `Follower`."""
        for line in block.split(b"\n"):
            words = line.split(b",")
            try:
                wall_s, steps, value = float(words[0]), int(words[1]), float(words[self._column])
            except (ValueError, IndexError):
                continue  # the header, or damaged
            if math.isfinite(value) and math.isfinite(wall_s) and 0 <= steps < 1 << 63:
                self._games.add(steps, wall_s, 0, value)
                self.changed()


class Evaluations(Follower):
    """The lines of `evaluations.jsonl`, each in a few figures."""

    def __init__(self, run: Path) -> None:
        """Read nothing yet."""
        super().__init__(run, EVALUATIONS_FILE)
        self.rows: list[dict[str, Any]] = []

    def clear(self) -> None:
        """See `Follower`."""
        self.rows.clear()

    @property
    def count(self) -> int:
        """See `Follower`."""
        return _EVALUATION_VALUES * len(self.rows)

    def take(self, block: bytes) -> None:
        """See `Follower`."""
        for line in filter(None, block.split(b"\n")):
            try:
                row = _evaluation(json.loads(line))
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
                continue  # damaged
            self.rows.append(row)
            self.changed()
        del self.rows[:-MAX_EVALUATIONS]


class Traces:
    """What was asked for, as much as there is room for. May be used from any thread, by one at a time."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, str], Follower] = OrderedDict()
        self._sizes: dict[tuple[Path, str], int] = {}
        self._size = 0
        self._lock = threading.Lock()

    def read(self, run: Path, name: str) -> Trace | Games:
        """The curves of a metric of a run, as far as the file goes now; `name` is of `GAMES` or `NAME`."""
        made: type[Trace | Games] = Games if name in GAMES else Trace
        return self.follow((run, name), lambda: made(run, name))

    def evaluations(self, run: Path) -> Evaluations:
        """The evaluations of a run, as far as the file goes now."""
        return self.follow((run, EVALUATIONS_FILE), lambda: Evaluations(run))

    def follow(self, key: tuple[Path, str], make: Callable[[], F]) -> F:
        """Another follower, made where it is not kept; `key` is its run and a word for its kind."""
        with self._lock:
            follower = cast(F, self._kept.pop(key, None) or make())
            self._kept[key] = follower
            follower.read()
            self._resize(key, _MIN_VALUES + follower.count)
            while self._size > _MAX_KEPT_VALUES and len(self._kept) > 1:
                self._resize(self._kept.popitem(last=False)[0], 0)
            return follower

    def _resize(self, key: tuple[Path, str], size: int) -> None:
        """Note the size of what is kept under a key, 0 where nothing is any more."""
        self._size += size - self._sizes.pop(key, 0)
        if size:
            self._sizes[key] = size


def names_of(run: Path) -> list[str]:
    """Names of metrics in the last rows of a run's `metrics.csv`."""
    found: dict[str, None] = {}
    for row in last_rows(run):
        if NAME.fullmatch(row.name):
            found[row.name] = None
    return list(found)


def last_rows(run: Path, at_most: int = _TAIL_BYTES) -> Iterator[Row]:
    """The last rows of a run's `metrics.csv`, those in its last `at_most` bytes."""
    try:
        with open_regular(run, CSV_FILE) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - at_most))
            block = file.read(at_most)
    except OSError:
        return
    lines = block.split(b"\n")
    # The last one may be written still, and the first be half of one; a header is no row anyhow.
    for line in lines[1:-1]:
        row = row_of(line)
        if row is not None:
            yield row


def row_of(line: bytes) -> Row | None:
    """A line of `metrics.csv`; None of a damaged one, also by numbers that no array has room for."""
    row = metrics.row_of(line.decode("utf-8", "replace"))
    return row if row is not None and row.steps < 1 << 63 and 0 <= row.updates < 1 << 63 else None


def _lines(block: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Where lines with a word begin and end."""
    word = f",{name},".encode()
    at = block.find(word)
    while at >= 0:
        start = block.rfind(b"\n", 0, at) + 1
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        yield start, end
        at = block.find(word, end)


def _evaluation(row: dict[str, Any]) -> dict[str, Any]:
    """Figures of one evaluation; raises where it is none."""
    returns = [float(value) for value in row["returns"]]
    lengths = [int(value) for value in row["lengths"]]
    levels = row.get("level_of_game", [])
    if not returns or not all(map(math.isfinite, returns)):
        raise ValueError("no returns")
    return {
        "steps": int(row["steps"]),
        "minutes": round(_finite(row["wall_s"]) / 60, 3),
        "version": int(row["version"]),
        "games": len(returns),
        "mean": statistics.fmean(returns),
        "deviation": statistics.pstdev(returns),
        "least": min(returns),
        "most": max(returns),
        "length": statistics.fmean(lengths) if lengths else 0.0,
        "returns": [shown.short(value) for value in returns[:MAX_GAMES]],
        "lengths": lengths[:MAX_GAMES],
        "levels": [printable(str(level)[:80]) for level in levels[:MAX_GAMES]],
    }


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number
