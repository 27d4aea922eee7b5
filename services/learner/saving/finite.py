"""Training that has diverged: what is not finite must neither act nor be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from troupe.common.errors import TroupeError


class DivergedError(TroupeError):
    """Learning produced numbers that are not finite."""


def check_metrics(metrics: Mapping[str, float], updates: int) -> None:
    """Refuse a loss or a gradient that is not finite after this update."""
    _refuse([name for name, value in metrics.items() if not np.isfinite(value)], updates)


def check_weights(arrays: Mapping[str, NDArray[np.generic]], updates: int) -> None:
    """Refuse weights after this update: what a bad one leaves in them is NaN."""
    _refuse([name for name, array in arrays.items() if np.isnan(array).any()], updates)


def _refuse(bad: Sequence[str], updates: int) -> None:
    if bad:
        raise DivergedError(
            f"{', '.join(bad[:3])} not finite at update {updates}: resume from the last checkpoint with a "
            "lower agent.learning_rate"
        )
