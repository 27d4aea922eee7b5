"""Learning curves as a picture: mean and interval over the runs of each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.runtime.files import make_directory
from troupe.common.runtime.metrics import EVALUATION_RETURN, TRAINING_RETURN
from troupe.common.stats import mean_curve
from troupe.services.experiments.groups import Comparison, Group
from troupe.services.experiments.runs import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".pdf")
AXES = {"steps": "environment steps", "minutes": "wall clock, minutes"}
_LABELS = {EVALUATION_RETURN: "return per game, evaluation", TRAINING_RETURN: "return per game, training"}
_COLUMNS = 5
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
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError(f"a picture needs matplotlib: {install_command('plot')}") from None


def draw(comparison: Comparison, out: Path, title: str = "", x: Sequence[str] = ()) -> None:
    """Draw the curves of a comparison.

    Of each group there is the mean with its 95 % bootstrap interval over runs, where all of them have
    values, and each run thin behind it. Runs of several tasks have a panel for each.

    Args:
        comparison: what to draw; at least one group.
        out: picture to write, one of `KINDS`.
        title: above.
        x: keys of `AXES`; none: all for one task, steps for several.

    Raises:
        ConfigError: matplotlib is missing, or the picture cannot be written.
    """
    check_picture(out)
    from matplotlib.figure import Figure

    tasks = comparison.tasks
    across = list(x) or (list(AXES) if len(tasks) == 1 else ["steps"])
    panels = [(task, axis) for task in tasks for axis in across]
    columns = len(across) if len(tasks) == 1 else min(_COLUMNS, math.ceil(math.sqrt(len(panels))))
    columns = max(columns, len(across))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.5 * columns, 4.0 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if len(tasks) == 1 else False).flat
    for place, (task, axis) in zip(grid, panels, strict=False):
        _panel(place, comparison, task, axis)
        if len(tasks) > 1:
            place.set_title(task, fontsize=9)
    for unused in list(grid[len(panels) :]):
        unused.set_axis_off()
    grid[0].set_ylabel(_LABELS.get(comparison.metric, comparison.metric))
    if len(grid[0].lines) > 0 and len(comparison.labels) <= _IN_LEGEND:
        grid[0].legend(fontsize=7)
    figure.suptitle(title)
    make_directory(out.absolute().parent, "directory of the picture")
    try:
        figure.savefig(out, dpi=110)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error


def _panel(place: Axes, comparison: Comparison, task: str, axis: str) -> None:
    """All groups of one task over one axis; a group has its colour in every panel."""
    for index, label in enumerate(comparison.labels):
        for group in comparison.of(label):
            if group.task == task:
                _curve(place, group, axis, f"C{index % 10}")
    place.set_xlabel(AXES[axis])
    place.grid(alpha=0.3)


def _curve(place: Axes, group: Group, axis: str, colour: str) -> None:
    curves = [_columns(series, axis) for series in group.series if series]
    if not curves:
        return
    label = f"{group.label or 'mean'} ({len(curves)} run{'s' if len(curves) > 1 else ''})"
    if len(curves) == 1:
        place.plot(*curves[0], color=colour, linewidth=1.2, label=label, **_markers(curves[0][0], 3))
        return
    for curve in curves:
        place.plot(*curve, color=colour, alpha=0.3, linewidth=0.7, **_markers(curve[0], 2))
    places, means, low, high = mean_curve(curves)
    place.plot(places, means, color=colour, linewidth=1.6, label=label)
    place.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)


def _markers(places: Sequence[float], size: int) -> dict[str, Any]:
    """Points are shown while there are few: one alone would be no line."""
    return {"marker": "o", "markersize": size} if len(places) <= _MARKED else {}


def _columns(series: Series, axis: str) -> tuple[list[float], list[float]]:
    if axis == "minutes":
        return [seconds / 60 for seconds in series.wall_s], series.values
    return [float(steps) for steps in series.steps], series.values
