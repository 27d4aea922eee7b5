"""What learners that share a batch hear of each other, looked at before it is used: one may be broken."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from troupe.common.errors import TroupeError

MAX_ROWS = 1 << 20
"""Items in a share."""
MAX_COUNT = 1 << 40
"""Samples of which one learner tells mean and variance, or the weight of a mean."""
MAX_MEAN, MAX_VARIANCE = 1e15, 1e30
"""Their squares and sums are numbers of float32. Stored numbers are within 10^9."""


class MisledError(TroupeError):
    """Another learner has said what cannot be: nothing of it has been used.

    Attributes:
        ranks: of those who said it; empty where that cannot be told.
    """

    def __init__(self, what: str, ranks: Iterable[int] = ()) -> None:
        """Say what is wrong, in words that follow `learner 3`."""
        self.ranks = tuple(ranks)
        who = ", ".join(str(rank) for rank in self.ranks)
        super().__init__(f"{f'learner {who}' if self.ranks else 'one of the learners'} {what}")


# With numpy: what is said is a few numbers, for which torch takes four times as long.


def check_all(sound: np.ndarray, what: str) -> None:
    """Raise MisledError for the ranks where `sound` (bool `[learners]`) is False."""
    if not sound.all():
        raise MisledError(what, np.flatnonzero(~sound).tolist())


def is_count(numbers: np.ndarray, most: float) -> np.ndarray:
    """Which of these are whole numbers from 0 to `most`; NaN is none."""
    sound: np.ndarray = (numbers >= 0) & (numbers <= most) & (numbers == np.floor(numbers))
    return sound


def check_shares(table: np.ndarray, max_rows: int) -> None:
    """Look at the rows of each share, the first column of float64 `[learners, n]`."""
    check_all(np.isfinite(table).all(1), "sent numbers that are not finite")
    check_all(is_count(table[:, 0], max_rows), f"sent a row count outside 0 to {max_rows:,}")


def check_moments(counts: Tensor, means: Tensor, variances: Tensor) -> None:
    """Look at counts `[learners]`, means and variances `[learners, n]`; those of no samples are not used.

    NaN from rank 0 is let through: training has diverged there, and it says so itself.
    """
    count, mean, variance = (each.cpu().numpy() for each in (counts, means, variances))
    check_all(is_count(count, MAX_COUNT), f"sent a sample count outside 0 to {MAX_COUNT:,}")
    right = (np.abs(mean) <= MAX_MEAN).all(1) & ((variance >= 0) & (variance <= MAX_VARIANCE)).all(1)
    right[0] |= not (np.isfinite(mean[0]).all() and np.isfinite(variance[0]).all())
    check_all(right | (count == 0), "sent impossible statistics of samples")


def check_weights(weights: Tensor) -> None:
    """Look at what means weigh, `[learners, n]`."""
    check_all(np.all(is_count(weights.cpu().numpy(), MAX_COUNT), axis=1), "sent an impossible weight")
