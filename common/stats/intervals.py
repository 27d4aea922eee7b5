"""Statistics with bootstrap confidence intervals, for samples as small as a handful of games or runs.

Scores come by task, several runs each. Resampling is stratified: each task's runs are drawn anew among
themselves, so every resample has as many runs of each task as there were (Agarwal et al. 2021, "Deep
reinforcement learning at the edge of the statistical precipice").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
Statistic = Callable[[Sequence[Scores]], Scores]
"""From the scores of each task, `[..., runs]`, to one number for each of the leading indices."""

_NUMBERS_AT_ONCE = 1_000_000


@dataclass(frozen=True)
class Interval:
    """A statistic and the bounds of its confidence interval."""

    value: float
    low: float
    high: float


def mean(tasks: Sequence[Scores]) -> Scores:
    """The mean over tasks of the mean over runs."""
    return _by_task(tasks).mean(axis=-1)


def median(tasks: Sequence[Scores]) -> Scores:
    """The median over tasks of the mean over runs."""
    return np.asarray(np.median(_by_task(tasks), axis=-1))


def iqm(tasks: Sequence[Scores]) -> Scores:
    """The interquartile mean: that of the middle half of all runs of all tasks.

    A quarter of them, rounded down, is left out at either end; of three runs or fewer that is none.
    """
    scores = np.sort(np.concatenate(list(tasks), axis=-1), axis=-1)
    # Rounded down, where rliable's `trim_mean` does the same: the two agree on any number of runs.
    cut = scores.shape[-1] // 4
    return np.asarray(scores[..., cut : scores.shape[-1] - cut].mean(axis=-1))


def optimality_gap(tasks: Sequence[Scores]) -> Scores:
    """By how much normalised scores fall short of 1 on average; what is above 1 makes up for nothing."""
    # Cut run by run, before the mean: one brilliant run must not hide one that failed.
    return 1.0 - _by_task([np.minimum(task, 1.0) for task in tasks]).mean(axis=-1)


def bootstrap(
    tasks: Sequence[Sequence[float]],
    statistic: Statistic = mean,
    *,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> Interval:
    """A statistic with its stratified percentile-bootstrap interval; the same input gives the same output.

    Args:
        tasks: for each task the score of every run; tasks may have different numbers of runs.
        statistic: `mean`, `median`, `iqm`, `optimality_gap`, or another of that form.
        level: share of resamples within the interval.
        resamples: how many.
        seed: of the resampling.

    Raises:
        ValueError: there is no task, one without a run, or a score that is not finite.
    """
    samples = [np.asarray(task, dtype=np.float64) for task in tasks]
    if not samples or any(task.size == 0 or not np.isfinite(task).all() for task in samples):
        raise ValueError("a statistic needs at least one value of each task, all of them finite")
    # Seeded, so that a table that is printed twice is the same table.
    rng = np.random.default_rng(seed)
    # A bounded number of indices at once: 10,000 resamples of 1,000 games would take 80 MB each way.
    rows = max(1, _NUMBERS_AT_ONCE // sum(task.size for task in samples))
    values = []
    for first in range(0, resamples, rows):
        count = min(rows, resamples - first)
        values.append(statistic([task[rng.integers(0, task.size, (count, task.size))] for task in samples]))
    low, high = np.quantile(np.concatenate(values), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(samples)), float(low), float(high))


def ci95(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the 95 % bootstrap interval of the mean.

    Raises:
        ValueError: `values` is empty or holds something that is not finite.
    """
    interval = bootstrap([values], mean, resamples=10_000)
    return interval.low, interval.high


def mean_curve(
    curves: Sequence[tuple[Sequence[float], Sequence[float]]], *, points: int = 100
) -> tuple[Scores, Scores, Scores, Scores]:
    """The mean of several curves, with the 95 % bootstrap interval over them at every place.

    Args:
        curves: places, rising, and values of each; between two of them a curve is a straight line.
        points: evenly spaced places of the result, from where the last curve begins to where the first ends.

    Returns:
        Places, means, and the interval's lower and upper bounds, each `[points]`, or as long as a single
        curve; all empty where no place has a value of every curve.
    """
    # One run has no spread: bounds of its own value draw a line without a band.
    if len(curves) == 1:
        places, values = (np.asarray(each, dtype=np.float64) for each in curves[0])
        return places, values, values, values
    # Where all curves have values: a mean over fewer and fewer runs would jump wherever one ends.
    first = max((x[0] for x, _ in curves if len(x)), default=0.0)
    last = min((x[-1] for x, _ in curves if len(x)), default=-1.0)
    if any(not len(x) for x, _ in curves) or first > last:
        empty = np.empty(0)
        return empty, empty, empty, empty
    places = np.linspace(first, last, points)
    values = np.stack([np.interp(places, x, y) for x, y in curves])
    # Whole runs are drawn, for all places alike: values of one run at neighbouring places are no independent
    # samples.
    drawn = np.random.default_rng(0).integers(0, len(curves), (2_000, len(curves)))
    # The share of each curve in each resample: one product instead of a copy of all values.
    shares = np.stack([(drawn == index).mean(axis=1) for index in range(len(curves))], axis=1)
    low, high = np.quantile(shares @ values, [0.025, 0.975], axis=0)
    return places, values.mean(axis=0), low, high


def _by_task(tasks: Sequence[Scores]) -> Scores:
    return np.stack([task.mean(axis=-1) for task in tasks], axis=-1)
