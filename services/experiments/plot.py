"""Pictures of runs: learning curves, performance profiles, and aggregates with their intervals."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.runtime.files import make_directory, write_output
from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.stats.intervals import Statistic, bootstrap, mean_curve
from troupe.services.experiments.groups import Comparison, Group
from troupe.services.experiments.report import AGGREGATES, Scores, title_of
from troupe.services.experiments.runs import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
AXES = {"steps": "environment steps", "minutes": "wall clock, minutes"}
_LABELS = {
    EVALUATION_RETURN: "return per episode, evaluation",
    TRAINING_RETURN: "return per episode, training",
}
NORMALISED = "normalised score"
_COLUMNS = 5
# Places of a performance profile.
_TAUS = 101
# Above this the marks would run into a band.
_MARKED = 100
_IN_LEGEND = 20


def check_picture(path: Path) -> None:
    """Refuse, before the work, a picture that could not be written.

    Raises:
        ConfigError: it is of no kind that can be drawn, or matplotlib is not installed.
    """
    if path.suffix.lower() not in KINDS:
        raise ConfigError(f"cannot draw {path}: its name should end in {', '.join(KINDS)}")
    try:
        # Tried in earnest: it may be installed and not importable, against another numpy.
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(f"a picture needs matplotlib: {install_command('plot')}") from None


@dataclass(frozen=True)
class Style:
    """How a picture looks.

    Attributes:
        title: above.
        x: keys of `AXES`; none: all for one task, steps for several.
        smooth: each value becomes the mean of those of this share of the axis before it; 0: as they are.
        runs: whether each run is drawn behind the mean of its group.
        size: width and height of the whole, in inches; None: by the number of panels.
    """

    title: str = ""
    x: Sequence[str] = ()
    smooth: float = 0.0
    runs: bool = True
    size: tuple[float, float] | None = None


@dataclass(frozen=True)
class Line:
    """One line of a picture, with its interval: `places`, `values`, `low` and `high` of one length.

    Attributes:
        task: environment.
        group: label.
        run: name; empty for the mean over the runs of the group.
        axis: key of `AXES`, or what a profile is over.
    """

    task: str
    group: str
    run: str
    axis: str
    places: Sequence[float]
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def draw(comparison: Comparison, out: Path, style: Style) -> list[Line]:
    """Draw the curves of a comparison, and return their numbers.

    Of each group there is the mean with its 95 % bootstrap interval over runs, where all of them have
    values, and each run thin behind it. Runs of several tasks have a panel for each.

    Args:
        comparison: what to draw; at least one group.
        out: picture to write, one of `KINDS`.
        style: how it looks.

    Raises:
        ConfigError: matplotlib is missing, or the picture cannot be written.
    """
    tasks = comparison.tasks
    across = list(style.x) or (list(AXES) if len(tasks) == 1 else ["steps"])
    panels = [(task, axis) for task in tasks for axis in across]
    columns = len(across) if len(tasks) == 1 else min(_COLUMNS, math.ceil(math.sqrt(len(panels))))
    # Both axes of a task stand side by side.
    columns = max(columns, len(across))
    rows = math.ceil(len(panels) / columns)
    figure = _figure(style, (5.5 * columns, 4.0 * rows))
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if len(tasks) == 1 else False).flat
    lines: list[Line] = []
    metrics = {group.task: group.metric for group in comparison.groups}
    for index, (place, (task, axis)) in enumerate(zip(grid, panels, strict=False)):
        lines += _panel(place, comparison, task, axis, style)
        if len(tasks) > 1:
            place.set_title(task, fontsize=9)
        if index == 0 or metrics[task] != comparison.metric:
            place.set_ylabel(_LABELS.get(metrics[task], metrics[task]))
    for unused in list(grid[len(panels) :]):
        unused.set_axis_off()
    if len(grid[0].lines) > 0 and len(comparison.labels) <= _IN_LEGEND:
        grid[0].legend(fontsize=7)
    _save(figure, out)
    return lines


def draw_profile(scores: Mapping[str, Scores], axis: str, out: Path, style: Style) -> list[Line]:
    """Draw performance profiles (Agarwal et al. 2021, section 4.2), and return their numbers.

    For each group: the share of its runs whose score is above tau, over tau, with its 95 % stratified
    bootstrap interval at each place.

    Args:
        scores: by group, for each task those of its runs.
        axis: what the scores are.
        out: picture to write.
        style: how it looks.
    """
    flat = [score for tasks in scores.values() for task in tasks for score in task]
    # From 0, which is random play where scores are normalised; a little beyond the best, so that the curve is
    # seen to reach 0.
    low, high = min(0.0, *flat), max(flat)
    taus = np.linspace(low, high + 0.02 * (high - low or 1.0), _TAUS)
    figure = _figure(style, (5.5, 4.0))
    place = figure.subplots()
    lines = []
    for index, (label, tasks) in enumerate(scores.items()):
        found = [bootstrap(tasks, _share_above(tau)) for tau in taus]
        values, lows, highs = ([getattr(each, name) for each in found] for name in ("value", "low", "high"))
        colour = f"C{index % 10}"
        runs = sum(map(len, tasks))
        place.plot(taus, values, color=colour, label=f"{label or 'all runs'} ({runs} runs)")
        place.fill_between(taus, lows, highs, color=colour, alpha=0.2, linewidth=0)
        lines.append(Line("", label, "", axis, list(taus), values, lows, highs))
    place.set_xlabel(f"{axis} (tau)")
    place.set_ylabel("share of runs above tau")
    place.grid(alpha=0.3)
    place.legend(fontsize=7)
    _save(figure, out)
    return lines


def draw_aggregates(scores: Mapping[str, Scores], axis: str, out: Path, style: Style) -> list[Line]:
    """Draw a bar for each group's median, IQM, mean and, of normalised scores, optimality gap.

    A bar is the 95 % stratified bootstrap interval, the stroke in it the value (Agarwal et al. 2021,
    figure 9). Arguments are those of `draw_profile`; returns the numbers, with the statistic as the axis.
    """
    normalised = axis == NORMALISED
    chosen = {name: each for name, each in AGGREGATES.items() if normalised or name != "optimality_gap"}
    figure = _figure(style, (3.0 * len(chosen), 0.8 + 0.35 * len(scores)))
    places = figure.subplots(1, len(chosen), squeeze=False, sharey=True)[0]
    lines = []
    for place, (name, statistic) in zip(places, chosen.items(), strict=True):
        for row, (label, tasks) in enumerate(scores.items()):
            found = bootstrap(tasks, statistic)
            colour = f"C{row % 10}"
            place.barh(row, found.high - found.low, left=found.low, height=0.6, color=colour, alpha=0.6)
            place.plot([found.value] * 2, [row - 0.3, row + 0.3], color="black", linewidth=1.5)
            one = ([found.value], [found.low], [found.high])
            lines.append(Line("", label, "", title_of(name), [0.0], *one))
        place.set_title(title_of(name), fontsize=9)
        place.grid(alpha=0.3, axis="x")
    places[0].set_yticks(range(len(scores)), [label or "all runs" for label in scores])
    places[0].invert_yaxis()
    figure.supxlabel(axis, fontsize=9)
    _save(figure, out)
    return lines


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """Write the numbers of a picture, a row for each place of each line; `run` is empty for means.

    Raises:
        ConfigError: it cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["task", "group", "run", "axis", "x", "value", "low", "high"])
    for line in lines:
        numbers = zip(line.places, line.values, line.low, line.high, strict=True)
        rows.writerows([line.task, line.group, line.run, line.axis, *map(_short, row)] for row in numbers)
    make_directory(path.absolute().parent, "directory of the table")
    write_output(path, text.getvalue().encode())


def _short(value: float) -> str:
    return f"{value:.9g}"


def _share_above(tau: float) -> Statistic:
    """The share of runs above tau, as a mean over tasks: each task counts alike, however many runs it has."""
    # Agarwal et al. 2021 call this the task-wise average of the run-score distribution.
    return lambda tasks: np.stack([(task > tau).mean(axis=-1) for task in tasks], axis=-1).mean(axis=-1)


def _figure(style: Style, size: tuple[float, float]) -> Figure:
    from matplotlib.figure import Figure

    # Without pyplot, which would choose a backend, perhaps open a display, and keep every figure in memory.
    figure = Figure(figsize=style.size or size, layout="constrained")
    figure.suptitle(style.title)
    return figure


def _save(figure: Figure, out: Path) -> None:
    make_directory(out.absolute().parent, "directory of the picture")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format=out.suffix[1:].lower())
    write_output(out, picture.getvalue())


def _panel(place: Axes, comparison: Comparison, task: str, axis: str, style: Style) -> list[Line]:
    """All groups of one task over one axis; a group has its colour in every panel."""
    lines: list[Line] = []
    for index, label in enumerate(comparison.labels):
        for group in comparison.of(label):
            if group.task == task:
                lines += _curves(place, group, axis, f"C{index % 10}", style)
    if not lines:
        place.text(0.5, 0.5, "no values yet", ha="center", transform=place.transAxes, color="grey")
    place.set_xlabel(AXES[axis])
    place.grid(alpha=0.3)
    return lines


def _curves(place: Axes, group: Group, axis: str, colour: str, style: Style) -> list[Line]:
    """A group's runs and their mean."""
    pairs = [(run, series) for run, series in zip(group.runs, group.series, strict=True) if series]
    curves = [_smoothed(*_columns(series, axis), style.smooth) for _, series in pairs]
    if not curves:
        return []
    found = [
        Line(group.task, group.label, run.name, axis, *curve, curve[1], curve[1])
        for (run, _), curve in zip(pairs, curves, strict=True)
    ]
    label = f"{group.label or 'mean'} ({len(curves)} run{'s' if len(curves) > 1 else ''})"
    if len(curves) == 1:
        place.plot(*curves[0], color=colour, linewidth=1.2, label=label, **_markers(curves[0][0], 3))
        return found
    for curve in curves if style.runs else ():
        place.plot(*curve, color=colour, alpha=0.3, linewidth=0.7, **_markers(curve[0], 2))
    places, means, low, high = mean_curve(curves)
    place.plot(places, means, color=colour, linewidth=1.6, label=label)
    place.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)
    return [*found, Line(group.task, group.label, "", axis, list(places), list(means), list(low), list(high))]


def _smoothed(places: list[float], values: list[float], share: float) -> tuple[list[float], list[float]]:
    """Each value as the mean of those that lie at most `share` of the curve's length before it."""
    if share <= 0 or len(places) < 2:
        return places, values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    # By length on the axis and not by count of values: evaluations come at uneven distances.
    first = np.searchsorted(places, np.asarray(places) - share * (places[-1] - places[0]))
    last = np.arange(1, len(places) + 1)
    return places, list((sums[last] - sums[first]) / (last - first))


def _markers(places: Sequence[float], size: int) -> dict[str, Any]:
    """Points are shown while there are few: one alone would be no line."""
    return {"marker": "o", "markersize": size} if len(places) <= _MARKED else {}


def _columns(series: Series, axis: str) -> tuple[list[float], list[float]]:
    if axis == "minutes":
        return [seconds / 60 for seconds in series.wall_s], series.values
    return [float(steps) for steps in series.steps], series.values
