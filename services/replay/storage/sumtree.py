"""Weights that can be changed and sampled in proportion, a batch at a time.

Two levels are enough: leaves in rows of `WIDTH`, and the sum of each row. A changed row is summed again
from its leaves, so sums never drift away from them. At a million leaves a batch of 512 costs about as much as
with a binary tree that is walked level by level, with far fewer calls.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 64


class SumTree:
    """Float64 weights of `capacity` slots, all zero at first."""

    def __init__(self, capacity: int) -> None:
        rows = -(-capacity // WIDTH)
        self.capacity = capacity
        self._leaves = np.zeros((rows, WIDTH))
        self._flat = self._leaves.reshape(-1)
        self._sums = np.zeros(rows)

    def __getitem__(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """The weights `[n]` of `slots [n]`."""
        return self._flat[slots]

    @property
    def total(self) -> float:
        """Sum of all weights."""
        return float(self._sums.sum())

    def fill(self, weights: NDArray[np.float64]) -> None:
        """Replace all weights by `weights [capacity]`."""
        self._flat[: self.capacity] = weights
        self._sums[:] = self._leaves.sum(axis=1)

    def set(self, slots: NDArray[np.int64], weights: NDArray[np.float64] | float) -> None:
        """Set the weights of `slots [n]`, finite, not negative; where one is repeated the last counts."""
        self._flat[slots] = weights
        rows = np.asarray(slots) // WIDTH
        # Of few, summing a row twice costs less than finding out that it is there twice.
        if len(rows) > 32:
            rows = np.flatnonzero(np.bincount(rows, minlength=1)) if _dense(rows) else np.unique(rows)
        self._sums[rows] = self._leaves[rows].sum(axis=1)

    def sample(self, points: NDArray[np.float64]) -> NDArray[np.int64]:
        """Slots `[n]` under `points [n]` in [0, 1), each with the probability weight / total.

        A slot whose weight is zero is never returned. Raises ValueError if every weight is zero.
        """
        # The last bound, not `total`: that one is summed in another order and rounds to another number, so
        # a point near 1 could lie behind every bound.
        bounds = np.cumsum(self._sums)
        total = bounds[-1]
        if not total > 0:
            raise ValueError("every weight is zero")
        values = points * total
        # "right" here and "<=" below: what weighs nothing has the bound of what is before it, and is skipped.
        rows = np.searchsorted(bounds, values, side="right")
        # Rounding may put a value at the very end, or in a row of zeros behind it.
        last = int(np.searchsorted(bounds, total, side="left"))
        np.minimum(rows, last, out=rows)
        values -= bounds[rows] - self._sums[rows]
        inner = np.cumsum(self._leaves[rows], axis=1)
        columns = np.count_nonzero(inner <= values[:, None], axis=1)
        slots = rows * WIDTH + np.minimum(columns, WIDTH - 1)
        bad = np.flatnonzero(self._flat[slots] <= 0)
        if len(bad):  # rounding again: step to the last slot of the row that has a weight
            positive = self._leaves[rows[bad]] > 0
            slots[bad] = rows[bad] * WIDTH + (WIDTH - 1 - np.argmax(positive[:, ::-1], axis=1))
        return slots


def _dense(rows: NDArray[np.int64]) -> bool:
    """Whether counting is cheaper than sorting."""
    return int(rows.max()) < 64 * len(rows)


def stratified(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """One uniform point `[count]` in each of `count` equal parts of [0, 1)."""
    return (np.arange(count) + rng.random(count)) / count
