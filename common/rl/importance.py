"""Corrections for sampling by priority."""

from __future__ import annotations

import numpy as np


def importance_weights(probabilities: np.ndarray, min_probability: float, exponent: float) -> np.ndarray:
    """Weights that undo the bias of prioritized sampling, scaled so that the largest is 1.

    `w_i = (N P(i)) ** -beta / max_j w_j` (Schaul et al. 2016, section 3.4): N, the number of items, cancels
    out, and `w_i = (P(i) / P_min) ** -beta`. Over which items the maximum is taken, the paper leaves open. It
    is that of a batch here, as in DeepMind's code: over all that are stored, the one item that is nearest to
    a priority of 0 would set the scale, and with it what a learning rate and an epsilon mean.

    Args:
        probabilities: `[B]` float64, the chance of each item per draw, all above 0.
        min_probability: the least chance in the batch, or, where batches come from several shards, in the
          last batches of all of them: the weights of all need one scale, or an improbable batch would weigh
          as much as any other.
        exponent: beta; 0 gives ones, 1 undoes the bias wholly.

    Returns:
        `[B]` float32 in (0, 1].
    """
    weights: np.ndarray = (probabilities / min_probability) ** -exponent
    return weights.astype(np.float32)


def annealed(start: float, final: float, done: float, period: float) -> float:
    """Move linearly from `start` to `final` while `done` goes from 0 to `period`, if that is not 0."""
    if period <= 0:
        return start
    return start + (final - start) * min(1.0, done / period)
