"""What a chart shows of runs: their curves, and the mean and its band of those that differ in seeds only."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.stats.intervals import mean_curve
from troupe.services.board.library import Entry
from troupe.services.board.reducing import Floats, Grid, grid, reduce, rounded, smoothed
from troupe.services.board.traces import Traces
from troupe.services.experiments.groups import differing_fields, labelled

AXES = ("steps", "minutes", "updates")
MAX_RUNS = 200
"""Of one chart."""
MAX_SOURCES = 32
_BAND_PLACES = 200
_MAX_STATES = 256


@dataclass(frozen=True)
class Chart:
    """What is asked for.

    Attributes:
        metric: its name; "": evaluations, or returns in training where no run has any.
        axis: one of `AXES`.
        columns: of pixels.
        smooth: share of a curve over which each value is a mean, 0 to 1.
        bands: whether runs that differ in their seeds only are one mean with its 95 % interval.
        first: least place that is shown; None: that of the curves.
        last: largest place; None: that of the curves.
    """

    metric: str = ""
    axis: str = "steps"
    columns: int = 800
    smooth: float = 0.0
    bands: bool = False
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True)
class _Curve:
    entry: Entry
    tag: str
    version: int
    places: Floats
    values: Floats


class Charts:
    """Draws charts from the runs' own files. May be used from any thread."""

    def __init__(self, traces: Traces) -> None:
        """Draw from what `traces` reads."""
        self._traces = traces
        self._lock = threading.Lock()
        self._states: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._number = itertools.count()

    def draw(self, entries: Sequence[Entry], chart: Chart, after: str = "") -> dict[str, Any]:
        """A chart as JSON has it.

        Args:
            entries: runs, at most `MAX_RUNS`.
            chart: what is shown.
            after: `state` of a former answer to the same question: curves that have not changed since
                are left out, and `kept` names them. "": all.

        Returns:
            `metric`; `state`; `complete`, whether all files are read; `first`, `last`, `columns`: the grid;
            `curves`, each with `id`, `run`, `tag`, `at` and `y`, see `reduce`; `bands`, each with `label`,
            `runs`, and `at` (columns), `y`, `low`, `high`.
        """
        with self._lock:
            metric, curves, complete = self._curves(entries, chart)
            shown = _grid(curves, chart)
            if shown is None:
                empty: dict[str, Any] = {"first": 0, "last": 1, "columns": 1, "curves": [], "bands": []}
                return {"metric": metric, "state": "", "complete": complete, "kept": [], **empty}
            states = {f"{c.entry.id}/{c.tag}": c.version for c in curves}
            known = self._states.get(after, {}) if after.partition("/")[0] == shown.key else {}
            new = [c for c in curves if known.get(f"{c.entry.id}/{c.tag}") != c.version]
            drawn = []
            for curve in new:
                at, y = reduce(curve.places, smoothed(curve.places, curve.values, chart.smooth), shown)
                name = f"{curve.entry.id}/{curve.tag}"
                drawn.append({"id": name, "run": curve.entry.id, "tag": curve.tag, "at": at, "y": y})
            bands = _bands(curves, chart, shown) if chart.bands and new else []
            state = self._keep(states, shown)
        return {
            "metric": metric,
            "state": state,
            "complete": complete,
            "kept": [name for name, version in states.items() if known.get(name) == version],
            "first": shown.first,
            "last": shown.last,
            "columns": shown.columns,
            "curves": drawn,
            "bands": bands,
        }

    def _keep(self, states: dict[str, int], shown: Grid) -> str:
        """What a browser gives back to be told of changes only; forgotten when many have asked since."""
        name = f"{shown.key}/{next(self._number)}"
        self._states[name] = states
        while len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)
        return name

    def _curves(self, entries: Sequence[Entry], chart: Chart) -> tuple[str, list[_Curve], bool]:
        metrics = [chart.metric] if chart.metric else [EVALUATION_RETURN, TRAINING_RETURN]
        complete = True
        curves: list[_Curve] = []
        for metric in metrics:
            for entry in entries:
                trace = self._traces.read(entry.path, metric)
                complete &= trace.is_complete
                found = trace.curves
                for tag in sorted(found)[: 1 if chart.bands else MAX_SOURCES]:
                    columns = found[tag]
                    if columns.values:
                        places, values = columns.places(chart.axis), np.array(columns.values)
                        curves.append(_Curve(entry, tag, trace.version, places, values))
            if curves:
                return metric, curves, complete
        return metrics[0], [], complete


def _grid(curves: Sequence[_Curve], chart: Chart) -> Grid | None:
    if not curves:
        return None
    if chart.first is not None and chart.last is not None and chart.last > chart.first:
        return Grid(chart.first, chart.last, max(1, chart.columns))
    # Steps, minutes and updates begin at 0, and so do all curves of them.
    return grid(0.0, max(float(curve.places.max()) for curve in curves), chart.columns)


def _bands(curves: Sequence[_Curve], chart: Chart, shown: Grid) -> list[dict[str, Any]]:
    runs = [curve.entry.run for curve in curves]
    present = [run for run in runs if run is not None]
    fields = differing_fields(present)
    labels = labelled([run.fields if run is not None else {} for run in runs], fields)
    groups: dict[tuple[str, str], list[_Curve]] = {}
    for curve, run, label in zip(curves, runs, labels, strict=True):
        groups.setdefault((run.env_id if run is not None else "", label), []).append(curve)
    found = []
    are_several = len({task for task, _ in groups}) > 1
    for (task, label), members in groups.items():
        pairs = [(c.places, smoothed(c.places, c.values, chart.smooth)) for c in members]
        places, means, low, high = mean_curve(
            [(x.tolist(), y.tolist()) for x, y in pairs], points=_BAND_PLACES
        )
        found.append(
            {
                "task": task,
                "label": " ".join(filter(None, [label, task if are_several or not label else ""])),
                "runs": [member.entry.id for member in members],
                **_on_grid(places, (means, low, high), shown),
            }
        )
    return found


def _on_grid(places: Floats, columns: Sequence[Floats], shown: Grid) -> dict[str, Any]:
    """Mean and bounds at the columns of the grid where there are any."""
    if not len(places):
        return {"at": [], "y": [], "low": [], "high": []}
    centres = shown.centres()
    half = (shown.last - shown.first) / shown.columns / 2
    inside = np.flatnonzero((centres >= places[0] - half) & (centres <= places[-1] + half))
    found = [rounded(np.interp(centres[inside], places, column)) for column in columns]
    return {"at": inside.tolist(), **dict(zip(("y", "low", "high"), found, strict=True))}
