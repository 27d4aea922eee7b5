"""Means with bootstrap confidence intervals, for samples as small as a handful of games."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    """A mean and the bounds of its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    values: Sequence[float], *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Mean of `values` with its percentile-bootstrap interval; the same input gives the same output.

    Raises:
        ValueError: `values` is empty or holds something that is not finite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise ValueError("a mean needs at least one value, all of them finite")
    rng = np.random.default_rng(seed)
    # A bounded number of indices at once: 10,000 resamples of 1,000 games would take 80 MB each way.
    rows = max(1, 1_000_000 // sample.size)
    means = [
        sample[rng.integers(0, sample.size, (min(rows, resamples - first), sample.size))].mean(axis=1)
        for first in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(sample.mean()), float(low), float(high))


def ci95(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the 95 % bootstrap interval of the mean."""
    interval = bootstrap_mean(values)
    return interval.low, interval.high
