"""Scores and their uncertainty. Pure functions over numbers."""

from troupe.common.stats.intervals import (
    Interval,
    bootstrap,
    bootstrap_mean,
    ci95,
    iqm,
    mean,
    mean_curve,
    median,
    optimality_gap,
)
from troupe.common.stats.scores import (
    RANDOM_AND_HUMAN,
    atari_game,
    human_normalized,
    normalized,
    random_and_human,
)

__all__ = [
    "RANDOM_AND_HUMAN",
    "Interval",
    "atari_game",
    "bootstrap",
    "bootstrap_mean",
    "ci95",
    "human_normalized",
    "iqm",
    "mean",
    "mean_curve",
    "median",
    "normalized",
    "optimality_gap",
    "random_and_human",
]
