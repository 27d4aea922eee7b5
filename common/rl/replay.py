"""Corrections for sampling by priority."""

from __future__ import annotations

import numpy as np


def importance_weights(probabilities: np.ndarray, items: int, exponent: float) -> np.ndarray:
    """Weights that undo the bias of prioritized sampling, scaled so that the largest of the batch is 1.

    `w_i = (N P(i)) ** -beta / max_j w_j` (Schaul et al. 2016, section 3.4).

    Args:
      probabilities: `[B]` float64, the chance of each item per draw, all above 0.
      items: N, the number of items that could have been drawn.
      exponent: beta; 0 gives ones, 1 undoes the bias wholly.

    Returns:
      `[B]` float32 in (0, 1].
    """
    logs = -exponent * (np.log(items) + np.log(probabilities))
    weights: np.ndarray = np.exp(logs - logs.max()).astype(np.float32)
    return weights


def annealed(start: float, final: float, updates: int, period: int) -> float:
    """Moves linearly from `start` to `final` over `period` updates; a `period` of 0 stays at `start`."""
    if period <= 0:
        return start
    return start + (final - start) * min(1.0, updates / period)
