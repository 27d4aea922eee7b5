"""Strategies of elite and attentive replay: which candidates of a draw are taken, by their distances."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Places = NDArray[np.int64]


def _nearest(distance: Floats, sampled: NDArray[np.integer], count: int) -> Places:
    """The nearest (strategy 1)."""
    return np.argsort(distance, kind="stable")[:count]


def _spread(distance: Floats, sampled: NDArray[np.integer], count: int) -> Places:
    """The nearest of each of `count` groups of neighbours by distance (strategy 2)."""
    return _groups(distance, count)[:, 0]


def _least_sampled(distance: Floats, sampled: NDArray[np.integer], count: int) -> Places:
    """Those that have been sampled least, of these the nearest (strategy 3)."""
    return np.lexsort((distance, sampled))[:count]


def _spread_least_sampled(distance: Floats, sampled: NDArray[np.integer], count: int) -> Places:
    """The least sampled of each of `count` groups of neighbours by distance (strategy 4)."""
    groups = _groups(distance, count)
    return groups[np.arange(count), sampled[groups].argmin(axis=1)]


def _groups(distance: Floats, count: int) -> Places:
    """Neighbours by distance, `[count, size]`, the nearest first; the farthest are left over."""
    size = len(distance) // count
    return np.argsort(distance, kind="stable")[: size * count].reshape(count, size)


STRATEGIES: Mapping[str, Callable[[Floats, NDArray[np.integer], int], Places]] = {
    "nearest": _nearest,
    "spread": _spread,
    "least_sampled": _least_sampled,
    "spread_least_sampled": _spread_least_sampled,
}
"""Which of k candidates are taken: of distances `[k]` and times sampled `[k]` makes `count` places."""


def choose(
    strategy: str, distance: Floats, sampled: NDArray[np.integer], ids: NDArray[np.uint64], count: int
) -> Places:
    """`count` of k candidates that were drawn with replacement; all k where there are no more.

    `nearest` takes an item as often as it was drawn. The others look at each item once; where that leaves
    fewer than `count`, repeats make up for it.

    Args:
        strategy: a name of `STRATEGIES`.
        distance: `[k]`.
        sampled: `[k]`, how often each item was sampled before.
        ids: `[k]`, of the items.
        count: from 1.

    Returns:
        Places `[count]` in these arrays, all different.
    """
    if len(ids) <= count:
        return np.arange(len(ids))
    # As in https://github.com/parralplex/elite_buffer_vtrace, but for the repeats that make up: there, too
    # few different candidates are an endless loop or a division by zero.
    places = np.arange(len(ids))
    if strategy != "nearest":
        places = np.sort(np.unique(ids, return_index=True)[1])
    if len(places) <= count:
        repeats = np.setdiff1d(np.arange(len(ids)), places)
        return np.concatenate([places, repeats[: count - len(places)]])
    return places[STRATEGIES[strategy](distance[places], sampled[places], count)]
