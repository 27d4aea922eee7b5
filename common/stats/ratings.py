"""How strong policies are that have played against each other, and whom one should play next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

OPPONENT_VERSION, OPPONENT_GAMES = "eval/opponent_version", "eval/opponent_games"
OPPONENT_WIN_RATE = "eval/opponent_win_rate"
"""What an evaluator says of the games that it has played against an earlier version."""

_ELO_PER_LOGIT = 400 / math.log(10)
_MAX_STEPS = 100


class Match(NamedTuple):
    """Games of `one` against `other`: their number, and the points of `one`, half of one for a draw."""

    one: int
    other: int
    games: float
    points: float


class Rating(NamedTuple):
    """Elo, and its standard error against the player whose rating is 0."""

    elo: float
    error: float


def elo_ratings(matches: Sequence[Match], oldest: int) -> dict[int, Rating]:
    """The ratings under which all results together are most likely; that of `oldest` is 0.

    This is the model of Bradley & Terry 1952 on the scale of Elo 1978: the expected score of a player that is
    400 points ahead is 10/11. It is fitted to all matches at once by Newton's method; a sequential update
    with a K-factor would depend on the order, and forget. Every match counts one drawn game more than was
    played, or a player that has won all games would have no finite rating.

    Args:
        matches: a chain of them has to lead from every player to `oldest`.
        oldest: a player.

    Returns:
        The rating of each player in `matches`, and of `oldest`.
    """
    players = {oldest, *(match.one for match in matches), *(match.other for match in matches)}
    others = sorted(players - {oldest})
    if not others:
        return {oldest: Rating(0.0, 0.0)}
    places = {player: place for place, player in enumerate(others)}
    ahead = np.zeros((len(matches), len(others)))  # by whom each match is decided; `oldest` is at 0
    for row, match in enumerate(matches):
        for player, sign in ((match.one, 1.0), (match.other, -1.0)):
            if player != oldest:
                ahead[row, places[player]] = sign
    games = np.array([match.games + 1 for match in matches])
    points = np.array([match.points + 0.5 for match in matches])
    logits = np.zeros(len(others))
    for _ in range(_MAX_STEPS):
        expected = 1 / (1 + np.exp(-ahead @ logits))
        curve = (ahead.T * (games * expected * (1 - expected))) @ ahead
        step = np.linalg.solve(curve, ahead.T @ (points - games * expected))
        # No match by more than one logit at a time: far from the top Newton's steps are too long.
        longest = float(np.abs(ahead @ step).max())
        logits += step / max(1.0, longest)
        if longest < 1e-9:
            break
    errors = np.sqrt(np.diag(np.linalg.inv(curve)))
    rated = zip((logits * _ELO_PER_LOGIT).tolist(), (errors * _ELO_PER_LOGIT).tolist(), strict=True)
    return {oldest: Rating(0.0, 0.0)} | {
        player: Rating(*rating) for player, rating in zip(others, rated, strict=True)
    }


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
