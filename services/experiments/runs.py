"""Run directories as they are read after the fact, or while somebody trains in them."""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from troupe.common.config.presets import is_path
from troupe.common.errors import ConfigError
from troupe.common.runtime.checkpoint import newest_first, steps_of
from troupe.common.runtime.files import (
    CONFIG_FILE,
    STATUS_FILE,
    check_regular,
    is_locked,
    read_status,
    readable,
    run_config,
)
from troupe.common.runtime.metrics import CSV_FILE, EVALUATION_RETURN, TRAINING_RETURN, read_rows
from troupe.services.experiments.fields import read_tables

Result = TypeVar("Result")

# Folders below one that is searched for runs.
_MAX_DEPTH = 5
# A learner on another machine, or in a container, writes its status every second.
_FRESH_S = 30.0
# Sums of a few such values are still numbers; an integer in a file may be of any size.
_MAX_VALUE = 1e300


@dataclass(frozen=True)
class Series:
    """One metric of one run: values over steps and over seconds of training, all of one length."""

    steps: list[int] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.values)

    def add(self, steps: int, wall_s: float, value: float) -> None:
        """Append a value."""
        self.steps.append(steps)
        self.wall_s.append(wall_s)
        self.values.append(value)

    def mean_over(self, first: int, last: int) -> Series:
        """One value for what was recorded after `first` steps and until `last`; none: an empty series.

        Each value weighs as much as the steps since the one before it, of whose games it tells.
        """
        before = [0, *self.steps]
        rows = [i for i, steps in enumerate(self.steps) if first < steps <= last]
        weights = [self.steps[i] - max(before[i], first) for i in rows]
        found = Series()
        if sum(weights):
            mean = sum(w * self.values[i] for w, i in zip(weights, rows, strict=True)) / sum(weights)
            found.add(self.steps[rows[-1]], self.wall_s[rows[-1]], mean)
        return found

    def cut(self, steps: int) -> None:
        """Drop what was recorded at `steps` or later."""
        while self.steps and self.steps[-1] >= steps:
            for column in (self.steps, self.wall_s, self.values):
                column.pop()


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        path: of the directory.
        fields: its configuration, `section.field` to the value in its `config.toml`.
        state: `running`, `done` (it has all its steps) or `stopped`.
        steps: environment steps made so far.
        wall_s: seconds of training, over all resumptions.
        metrics: newest values by name.
        changed_s: when it was last written to, in seconds since the epoch.
    """

    path: Path
    fields: Mapping[str, Any]
    state: str
    steps: int
    wall_s: float
    metrics: Mapping[str, float]
    changed_s: float

    @property
    def name(self) -> str:
        """That of the directory."""
        return self.path.name

    @property
    def preset(self) -> str:
        """The preset's name; of a file, without its folder."""
        preset = str(self.fields.get("run.preset", ""))
        return Path(preset).stem if is_path(preset) else preset

    @property
    def env_id(self) -> str:
        """The environment."""
        return str(self.fields.get("env.id", ""))

    @property
    def total_steps(self) -> int:
        """Steps after which it ends."""
        return int(self.fields.get("run.total_steps", 0))

    @property
    def last_evaluation(self) -> float | None:
        """The newest evaluation's mean return."""
        return self.metrics.get(EVALUATION_RETURN)

    @property
    def is_evaluated(self) -> bool:
        """Whether evaluators play for it."""
        return bool(self.fields.get("evaluator.enabled", True))

    @property
    def metric(self) -> str:
        """By which it is judged: evaluations, or without evaluators the returns of training."""
        return EVALUATION_RETURN if self.is_evaluated else TRAINING_RETURN

    @property
    def score(self) -> float | None:
        """What it is worth so far: the newest value of `metric`."""
        return self.metrics.get(self.metric)

    def newest_since(self, steps: int) -> float | None:
        """The newest value of `metric` after so many steps; None: there is none yet."""
        values = self.series([self.metric])[self.metric]
        return values.values[-1] if values and values.steps[-1] > steps else None

    def series(self, names: Collection[str] = (EVALUATION_RETURN, TRAINING_RETURN)) -> dict[str, Series]:
        """Read metrics from its table; one that it does not have is empty."""
        return read_series(self.path / CSV_FILE, names)


def without_score(run: Run | None) -> str:
    """What to say of a run that is over and has no score."""
    if run is not None and run.is_evaluated:
        return "no evaluation of it arrived: see the logs of its run"
    return "no episode of it was counted"


def is_run(path: Path) -> bool:
    """Whether there is a run in this directory."""
    with readable(path):
        return (path / CONFIG_FILE).is_file()


def read_run(path: Path) -> Run:
    """Read what a run directory says of itself.

    Raises:
        ConfigError: it is none, or its configuration is damaged.
    """
    tables = read_tables(run_config(path))
    fields = {
        f"{section}.{name}": value
        for section, values in tables.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
    }
    total = fields.get("run.total_steps")
    if not isinstance(total, int):
        raise ConfigError(
            f"{path / CONFIG_FILE} is not the configuration of a run: it has no run.total_steps"
        )
    status = read_status(path)
    saved = next((steps_of(newest) for newest in newest_first(path / "checkpoints")), None)
    # `status.json` is not forced to the disk: after a crash it may be older than the newest checkpoint.
    steps = max(_integer(status.get("steps")), saved or 0)
    metrics = status.get("metrics")
    return Run(
        path=path,
        fields=fields,
        # The checkpoint decides, where there is one: a learner that was killed at the end had reported steps
        # that were never saved.
        state=_state(path, steps if saved is None else saved, total),
        steps=steps,
        wall_s=_number(status.get("wall_s")),
        metrics={
            name: float(value)
            for name, value in (metrics if isinstance(metrics, Mapping) else {}).items()
            if isinstance(value, int | float) and abs(value) < _MAX_VALUE
        },
        changed_s=max(_changed_s(path / name) for name in (CONFIG_FILE, STATUS_FILE, CSV_FILE)),
    )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Run directories among `paths` and below them, each once, in order.

    Raises:
        ConfigError: one of `paths` does not exist, or has no run in it.
    """
    found: dict[Path, None] = {}
    for path in paths:
        with readable(path):
            if not path.is_dir():
                what = "is not a directory" if path.exists() else "does not exist"
                raise ConfigError(f"{path} {what}: name a run directory, or a directory that contains runs")
        # Limited, since somebody may name a home directory, or a folder with a link back to itself.
        below = list(_below(path, _MAX_DEPTH))
        if not below:
            raise ConfigError(f"there is no run in {path}")
        found.update(dict.fromkeys(below))
    return list(found)


def read_each(paths: Iterable[Path], read: Callable[[Path], Result]) -> dict[Path, Result]:
    """What `read` makes of the runs that `find_runs` finds; stderr is told why it can make nothing of others.

    Raises:
        ConfigError: as `find_runs`, or that of the first run where nothing can be made of any.
    """
    found: dict[Path, Result] = {}
    unreadable: list[ConfigError] = []
    for path in find_runs(paths):
        try:
            found[path] = read(path)
        except ConfigError as error:
            unreadable.append(error)
    if not found:
        raise unreadable[0]
    for why in unreadable:  # of a sweep, some may not have begun to learn
        print(f"troupe: left out: {why}", file=sys.stderr)
    return found


def read_series(path: Path, names: Collection[str]) -> dict[str, Series]:
    """Read metrics from a run's `metrics.csv`, as `troupe.common.runtime.metrics.read_rows` does.

    A run that was resumed from a checkpoint has rows of steps that it then made once more: the later ones
    count. Evaluations are dated by what was played, and so go back among the other rows, but not among
    themselves.
    """
    found = {name: Series() for name in names}
    reached = 0
    try:
        for row in read_rows(path):
            evaluation = row.name.startswith("eval/")
            if row.steps < reached and not evaluation:
                for name, series in found.items():
                    series.cut(row.steps + name.startswith("eval/"))  # its own may stand here already
            reached = max(row.steps, reached) if evaluation else row.steps
            if row.name in found:
                series = found[row.name]
                if evaluation and series and row.steps < series.steps[-1]:
                    series.cut(row.steps)
                series.add(row.steps, row.wall_s, row.value)
    except OSError:
        pass  # not begun yet
    return found


def read_episodes(path: Path, points: int = 100, at_least: int = 10) -> Series:
    """Returns of a run's `episodes.csv`, each value the mean of as many games that ended one after the other.

    Args:
        path: of the file; a run may have none.
        points: values at most.
        at_least: games of a value at least, but for a run that has fewer.
    """
    games: list[tuple[int, float, float]] = []
    try:
        with check_regular(path).open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.DictReader(file):
                try:
                    games.append((int(row["steps"]), float(row["wall_s"]), float(row["return"])))
                except (KeyError, TypeError, ValueError):
                    continue  # half a line, of a run that is being written
    except OSError:
        pass  # not begun yet
    games.sort(key=lambda game: game[0])  # each actor's lines are in order, but not those of several
    size = max(1, min(at_least, len(games)), math.ceil(len(games) / points))
    found = Series()
    for end in range(size, len(games) + 1, size):
        steps, wall_s, _ = games[end - 1]
        found.add(steps, wall_s, sum(value for _, _, value in games[end - size : end]) / size)
    return found


def _below(path: Path, depth: int) -> Iterable[Path]:
    """Runs at `path` or below; there are none within a run."""
    with readable(path):
        if (path / CONFIG_FILE).is_file():
            yield path
        elif depth and path.is_dir():
            for child in sorted(path.iterdir()):
                if child.is_dir() and not child.name.startswith("."):
                    yield from _below(child, depth - 1)


def _state(path: Path, steps: int, total_steps: int) -> str:
    if is_locked(path / ".lock"):
        return "running"
    if steps >= total_steps:
        return "done"
    # Services that were started one by one have no launcher that holds the lock.
    has_launcher = (path / ".lock").exists()
    fresh = time.time() - _changed_s(path / STATUS_FILE) < _FRESH_S
    return "running" if fresh and not has_launcher else "stopped"


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _integer(value: Any) -> int:
    # The file is another process's, perhaps another version's: what is not as expected counts as not there.
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
