"""Scores and their uncertainty. Pure functions over numbers."""

from common.stats.intervals import Interval, bootstrap_mean, ci95
from common.stats.scores import RANDOM_AND_HUMAN, atari_game, human_normalized

__all__ = ["RANDOM_AND_HUMAN", "Interval", "atari_game", "bootstrap_mean", "ci95", "human_normalized"]
