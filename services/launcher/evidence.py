"""What a run has recorded of its learning, as findings compare it: in full, or its newest values only."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from troupe.common.config import Config, read_config
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import OWN_ERROR, ConfigError
from troupe.common.runtime.files import last_lines, read_status, run_config
from troupe.common.runtime.logging import peer_text
from troupe.common.runtime.metrics import CSV_FILE, EVALUATION_RETURN, TRAINING_RETURN, read_rows
from troupe.services.launcher.curves import Points
from troupe.services.launcher.view import RunView

USED = ("learner/", "replay/", "train/episode_", "speed/updates_per_s")
"""What the names of the metrics that count begin with."""
LOG = "logs/learner.log"
RECENT, LEAST_RECENT = 1 / 6, 3
"""Share of a metric's rows, the last ones, whose median counts, and the fewest of them."""
MAX_VALUE = 1e100
"""Larger numbers are left out: sums and powers of these would not be finite."""
_FEWEST = 4
"""Returns without which nothing is said of their rise."""


class Course(NamedTuple):
    """Mean returns of a fifth of a run each: the first, the best and the last one."""

    first: float
    best: float
    best_steps: float
    """Steps of the run at the end of the best."""
    last: float
    part: int
    """Returns in a mean."""
    chance: float
    """What two such means differ by if nothing but chance is at work."""

    @property
    def rose(self) -> bool:
        """Whether the best is more than chance."""
        return self.best - self.first > 5.0 * self.chance


class Evidence:
    """Figures of a run. A metric that nobody reports is None, as is one that is no number to reckon with.

    Args:
        config: of the run.
        metrics: typical values of late.
        returns: those of training, by steps; of evaluation, where the run learns from a data set.
        peaks: the largest values of the whole run, as far as they are known.
        environments: what the learner has heard of them since it started: how many `failures`, how many
            `episodes` ended without one, and the `last` failure.
        learner_error: what the learner has died of and not got past.
        steps: that the run has made.
    """

    def __init__(
        self,
        config: Config | None,
        metrics: Mapping[str, float],
        returns: Sequence[Sequence[float]] = (),
        peaks: Mapping[str, float] | None = None,
        environments: Mapping[str, Any] | None = None,
        learner_error: str = "",
        steps: int = 0,
    ) -> None:
        self.config = config
        self.steps = steps
        self.environments = environments or {}
        self.learner_error = learner_error
        # The newest values of a run may be NaN: the loss of one that diverges is.
        self.metrics = {name: value for name, value in metrics.items() if abs(value) <= MAX_VALUE}
        self._peaks = {name: value for name, value in (peaks or {}).items() if abs(value) <= MAX_VALUE}
        points = [(steps, value) for steps, value in returns if abs(value) <= MAX_VALUE]
        self.returns = [value for _, value in points]
        self._steps = [steps for steps, _ in points]

    def __getitem__(self, metric: str) -> float | None:
        return self.metrics.get(metric)

    def peak(self, metric: str) -> float | None:
        """The largest value of the run: what it has done to the weights stays."""
        return self._peaks.get(metric, self.metrics.get(metric))

    def all(self, metric: str) -> dict[str, float]:
        """Values of `metric`, or of `metric/NAME`, by name; empty for the metric itself."""
        return {
            name[len(metric) + 1 :]: value
            for name, value in self.metrics.items()
            if f"{name}/".startswith(f"{metric}/")
        }

    def worst(self, metric: str) -> tuple[str, float]:
        """The largest of these."""
        return max(self.all(metric).items(), key=lambda item: item[1], default=("", 0.0))

    def option(self, field: str, default: Any = None) -> Any:
        """A field of `[agent]`; the default where this algorithm has none of that name."""
        return getattr(self.config.agent, field, default) if self.config is not None else default

    def has(self, field: str) -> bool:
        """Whether the algorithm has a field of that name."""
        return self.config is not None and hasattr(self.config.agent, field)

    @property
    def tables(self) -> list[TableConfig]:
        """Those that batches come from, with their capacity over all shards."""
        return self.config.replay.sampled_tables() if self.config is not None else []

    @cached_property  # several causes ask, and long runs have thousands of returns
    def course(self) -> Course | None:
        """How returns went; None where there are too few to tell."""
        if len(self.returns) < _FEWEST:
            return None
        part = max(1, len(self.returns) // 5)
        means = sliding_window_view(np.array(self.returns), part).mean(axis=1)
        best = int(means.argmax())
        steps = [abs(one - other) for one, other in zip(self.returns, self.returns[1:], strict=False)]
        return Course(
            first=float(means[0]),
            best=float(means[best]),
            best_steps=self._steps[best + part - 1],
            last=float(means[-1]),
            part=part,
            chance=statistics.median(steps) / math.sqrt(part),
        )

    @property
    def learned(self) -> float:
        """How much of its rise a run has kept, 0 to 1: 1 where returns are higher than ever.

        0 as well where they never rose by more than they scatter; 1 where there are too few to tell.
        """
        course = self.course
        if course is None:
            return 1.0
        if not course.rose:
            return 0.0
        return max(0.0, min(1.0, (course.last - course.first) / (course.best - course.first)))


def of_view(view: RunView) -> Evidence:
    """What a running run says now."""
    returns: Points = view.returns.get(_followed(view.config), ())
    return Evidence(view.config, view.metrics, returns, environments=view.environments, steps=view.steps)


def of_run(folder: Path, config: Config | None = None) -> Evidence:
    """What a run directory has recorded, of a run that goes on or has ended; `config` if it is known.

    Raises ConfigError where it holds no run, or nothing is recorded yet.
    """
    config = config or config_of(run_config(folder))
    followed = _followed(config)
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    returns, steps = [], 0
    file = folder / CSV_FILE
    for row in read_rows(file) if file.exists() else ():
        steps = max(steps, row.steps)
        if row.name.startswith(USED):
            values[row.name][row.source].append(row.value)
        if row.name == followed:
            returns.append((row.steps, row.value))
    status = read_status(folder)
    error = _learner_error(folder / LOG, status)
    if not error and not any(name.startswith("learner/") for name in values):
        raise ConfigError(f"{folder} has no record of learning yet: see {LOG}")
    metrics = {name: _typical(name, by_source) for name, by_source in values.items()}
    peaks = {name: max(map(max, by_source.values())) for name, by_source in values.items()}
    return Evidence(config, metrics, returns, peaks, status.get("environments"), error, steps)


def _learner_error(log: Path, status: Mapping[str, Any]) -> str:
    """The error that ended the learner, unless there has been an update since."""
    try:
        lines = last_lines(log)
    except OSError:
        return ""
    errors = [line.partition(OWN_ERROR)[2].strip() for line in lines if line.startswith(OWN_ERROR)]
    is_dead = bool(lines) and lines[-1].startswith(OWN_ERROR)
    is_stuck = status.get("restarts", 0) > 0 and not status.get("updates_since_start")
    return peer_text(errors[-1]) if errors and (is_dead or is_stuck) else ""


def _followed(config: Config | None) -> str:
    """Whose rise says whether a run learns: where nobody acts there is no training return."""
    return EVALUATION_RETURN if config is not None and config.run.offline else TRAINING_RETURN


def _typical(name: str, by_source: Mapping[str, Sequence[float]]) -> float:
    """The median of the last rows; over services, a rate and a number of items are added up."""
    recent = [values[-max(LEAST_RECENT, math.ceil(RECENT * len(values))) :] for values in by_source.values()]
    if name.endswith("_min"):
        return min(map(min, recent))
    if name.endswith("_max"):
        return max(map(max, recent))
    typical = map(statistics.median, recent)
    return sum(typical) if name.endswith("_per_s") else statistics.fmean(typical)


def config_of(file: Path) -> Config:
    """A run's configuration; without its algorithm where that is not installed here."""
    try:
        return read_config(file)
    except ConfigError:
        return read_config(file, typed_agent=False)
