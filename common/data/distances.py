"""How far two unrolls are apart in features: what elite and attentive replay go by."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Distance = Literal["norm", "cosine", "kl"]
FEATURES = "features"
"""Field of a chunk by which replay measures distances: float numbers of each step."""

DISTANCES: tuple[Distance, ...] = get_args(Distance)


def distances(kind: str, left: NDArray, right: NDArray, power: float = 2.0) -> NDArray[np.float64]:
    """How far `left [n, T, F]` is from `right`, of that shape or one that spreads to it: `[n]`, from 0.

    Args:
        kind: `norm`, of the difference of all T x F numbers, with exponent `power`. `cosine`, one minus
            the cosine of the angle between them: 0 for the same direction, 2 for the opposite one, 1 where
            one of the two has none. `kl`, the sum over T of KL(softmax(left) || softmax(right)).
        left: features of any float dtype; computed in float64.
        right: the same.
        power: at least 1.
    """
    # float64, since features are stored as float16, whose squares overflow from 256 on.
    ours, theirs = np.broadcast_arrays(np.asarray(left, np.float64), np.asarray(right, np.float64))
    if kind == "kl":
        log_p, log_q = _log_softmax(ours), _log_softmax(theirs)
        divergence: NDArray[np.float64] = (np.exp(log_p) * (log_p - log_q)).sum(axis=(1, 2))
        return np.maximum(divergence, 0.0)  # rounding
    ours, theirs = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    if kind == "cosine":
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = (ours * theirs).sum(axis=1) / np.where(lengths > 0, lengths, 1.0)
        # Equal vectors, also two of zeros, are at 0 exactly; rounding would put them slightly apart.
        return np.where(np.all(ours == theirs, axis=1), 0.0, 1.0 - np.clip(cosine, -1.0, 1.0))
    apart = np.abs(ours - theirs)
    if power == 2.0:
        return np.sqrt((apart * apart).sum(axis=1))
    # Over the largest: a high power of it could be infinite.
    most = apart.max(axis=1, initial=0.0)
    shares = apart / np.where(most > 0, most, 1.0)[:, None]
    return most * (shares**power).sum(axis=1) ** (1.0 / power)


def nearness(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Priorities in (0, 1] of items that are so far off policy; 1 for those that are not at all."""
    return 1.0 / (1.0 + distance)


def _log_softmax(features: NDArray[np.float64]) -> NDArray[np.float64]:
    # exp overflows beyond 709; the shift cancels out of the softmax.
    shifted = features - features.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
