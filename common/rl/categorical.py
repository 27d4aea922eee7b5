"""Returns as chances of evenly spaced places (C51: Bellemare et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor


def projected(values: Tensor, chances: Tensor, low: float, high: float) -> Tensor:
    """Chances `[B, K]` of K evenly spaced places from `low` to `high`, for `chances` of `values` `[B, K]`.

    Each value's chance goes to the two places beside it, the more the nearer (algorithm 1); what lies beyond
    the ends goes to them.
    """
    last = chances.shape[1] - 1
    # Clamped again: the scale is rounded, and a place behind the last one does not exist.
    place = ((values.clamp(low, high) - low) * (last / (high - low))).clamp(max=last)
    below = place.floor()
    share = place - below
    first = below.long()
    moved = torch.zeros_like(chances).scatter_add_(1, first, chances * (1.0 - share))
    return moved.scatter_add_(1, (first + 1).clamp(max=last), chances * share)
