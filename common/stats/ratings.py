"""How strong policies are that have played against each other, and whom one should play next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def win_rate_weights(win_rates: Sequence[float], exponent: float) -> np.ndarray:
    """The chance of each opponent in prioritised fictitious self-play: `(1 - win rate) ** exponent`.

    Args:
        win_rates: `[K]`, from 0 to 1, of the one who plays against each; a draw is half a win.
        exponent: at 0 all are alike; the larger, the more go to those that are hardest to beat.

    Returns:
        `[K]` float64, with a sum of 1; all alike where every opponent is always beaten.

    Source: Vinyals et al. 2019, "Grandmaster level in StarCraft II", Methods, `f_hard`.
    """
    weights = (1.0 - np.asarray(win_rates, np.float64)) ** exponent
    total = weights.sum()
    return weights / total if total > 1e-10 else np.full(len(weights), 1.0 / len(weights))
