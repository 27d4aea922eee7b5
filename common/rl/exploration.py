"""Exploration of agents that act by Q values. numpy only: it is part of acting."""

from __future__ import annotations

import numpy as np


def epsilon_ladder(base: float, alpha: float, indices: list[int], total_slots: int) -> np.ndarray:
    """`base ** (1 + i / (N - 1) * alpha)` for slots `i` of `N`, float32; a single slot gets `base` itself.

    Horgan et al. 2018, section 4.1.
    """
    place = np.asarray(indices, np.float64) / max(1, total_slots - 1)
    ladder: np.ndarray = base ** (1.0 + place * alpha)
    return ladder.astype(np.float32)


def epsilon_greedy(q: np.ndarray, epsilon: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Best actions `[S]` of `q [S, A]`; with chance `epsilon [S]` any action, all being equally likely."""
    # Random actions are drawn for all slots and used for some: the generator then advances alike whatever is
    # explored.
    explores = rng.random(len(q)) < epsilon
    return np.where(explores, rng.integers(0, q.shape[1], len(q)), q.argmax(axis=1))
