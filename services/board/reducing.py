"""Curves as a screen shows them: the least and the largest value of each column of pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MAX_COLUMNS = 4096


@dataclass(frozen=True)
class Grid:
    """Columns of pixels from `first` to `last` of an axis, the same for all curves of a chart.

    Curves keep their places while a run grows, until it grows beyond `last`: what has not changed is not sent
    again.
    """

    first: float
    last: float
    columns: int

    @property
    def key(self) -> str:
        """Tells grids apart."""
        return f"{self.first:g}:{self.last:g}:{self.columns}"

    def centres(self) -> Floats:
        """Where the columns are, `[columns]`."""
        return self.first + (np.arange(self.columns) + 0.5) * (self.last - self.first) / self.columns


def grid(first: float, last: float, columns: int) -> Grid:
    """A grid that reaches a little beyond `last`, so that it lasts.

    Args:
        first: least place.
        last: largest place.
        columns: of pixels, 1 to `MAX_COLUMNS`.
    """
    span = max(last - first, 1e-9)
    step = 10.0 ** math.floor(math.log10(span)) / 4
    return Grid(first, first + step * math.ceil(span / step * 1.0001), max(1, min(MAX_COLUMNS, columns)))


def reduce(places: Floats, values: Floats, onto: Grid) -> tuple[list[int], list[float]]:
    """The least and the largest value of every column that has any, in the order of recording.

    Args:
        places: rising, `[values]`.
        values: finite, `[values]`.
        onto: the grid; what lies outside is left out.

    Returns:
        Half columns, `2 * column` and `2 * column + 1`, rising, and the value in each. A column with one
        value has it in the first half.
    """
    width = (onto.last - onto.first) / onto.columns
    column = np.floor((places - onto.first) / width)
    # The last place belongs to the last column.
    column = np.where((column == onto.columns) & (places <= onto.last), onto.columns - 1, column)
    inside = (column >= 0) & (column < onto.columns)
    column, values = column[inside].astype(np.int64), values[inside]
    if not len(values):
        return [], []
    # Stable: within a column the order in which values were recorded is that of their places.
    order = np.argsort(column, kind="stable")
    column, values = column[order], values[order]
    starts = np.flatnonzero(np.r_[True, np.diff(column) > 0])
    by_size = np.lexsort((values, column))
    ends = np.r_[starts[1:], len(values)] - 1
    least, most = by_size[starts], by_size[ends]
    halves, chosen = [], []
    for at, low, high in zip(column[starts].tolist(), least.tolist(), most.tolist(), strict=True):
        first, last = min(low, high), max(low, high)
        halves.append(2 * at)
        chosen.append(first)
        if values[first] != values[last]:
            halves.append(2 * at + 1)
            chosen.append(last)
    return halves, rounded(values[chosen])


def rounded(values: Floats) -> list[float]:
    """Six digits of each value: more than pixels show."""
    return [float(f"{value:.6g}") for value in values.tolist()]


def smoothed(places: Floats, values: Floats, share: float) -> Floats:
    """Each value as the mean of those at most `share` of the curve's length before it, as `troupe plot`."""
    if share <= 0 or len(places) < 2:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.searchsorted(places, places - share * (places[-1] - places[0]))
    last = np.arange(1, len(places) + 1)
    return np.asarray((sums[last] - sums[first]) / (last - first))
