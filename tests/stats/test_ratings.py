from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from troupe.common.stats.ratings import Match, elo_ratings, win_rate_weights


def test_hard_opponents_are_drawn_more_often() -> None:
    # (1 - 0.9)^2 = 0.01, (1 - 0.5)^2 = 0.25, (1 - 0.2)^2 = 0.64
    assert win_rate_weights([0.9, 0.5, 0.2], 2.0).tolist() == pytest.approx([1 / 90, 25 / 90, 64 / 90])
    assert win_rate_weights([0.75, 0.25], 1.0).tolist() == pytest.approx([0.25, 0.75])
    assert win_rate_weights([0.9, 0.5, 1.0], 0.0).tolist() == pytest.approx([1 / 3] * 3)


def test_opponents_that_never_win_are_drawn_alike() -> None:
    assert win_rate_weights([1.0, 1.0], 2.0).tolist() == [0.5, 0.5]


def log_likelihood(free: np.ndarray, matches: list[Match], players: list[int]) -> float:
    """Of Elo's own formula, player by player, with the drawn game that every match has more."""
    elo = dict(zip(players, [0.0, *free], strict=True))
    total = 0.0
    for one, other, games, points in matches:
        chance = 1 / (1 + 10 ** ((elo[other] - elo[one]) / 400))
        total += (points + 0.5) * np.log(chance) + (games - points + 0.5) * np.log(1 - chance)
    return total


def test_ratings_are_the_most_likely_ones() -> None:
    matches = [
        Match(4, 1, 20, 13.5),
        Match(9, 4, 20, 20.0),
        Match(9, 1, 10, 9.0),
        Match(12, 9, 40, 15.0),
        Match(12, 4, 6, 6.0),
    ]
    players = [1, 4, 9, 12]
    found = minimize(
        lambda free: -log_likelihood(free, matches, players), np.zeros(3), method="BFGS", tol=1e-10
    )
    ratings = elo_ratings(matches, oldest=1)
    assert [ratings[player].elo for player in players] == pytest.approx([0, *found.x], abs=0.05)
    # The curvature at the top, by differences, says how far each may be wrong.
    curve = np.zeros((3, 3))
    for i, j in np.ndindex(3, 3):

        def at(a: int, b: int, i: int = i, j: int = j) -> float:
            return log_likelihood(found.x + a * np.eye(3)[i] + b * np.eye(3)[j], matches, players)

        curve[i, j] = -(at(1, 1) - at(1, -1) - at(-1, 1) + at(-1, -1)) / 4
    errors = np.sqrt(np.diag(np.linalg.inv(curve)))
    assert [ratings[player].error for player in players[1:]] == pytest.approx(errors.tolist(), rel=1e-3)


def test_two_players_are_as_far_apart_as_their_points_say() -> None:
    rating = elo_ratings([Match(7, 2, 99, 90.5)], oldest=2)[7]
    assert rating.elo == pytest.approx(400 * math.log10(91 / 9))
    assert rating.error == pytest.approx(400 / math.log(10) / math.sqrt(100 * 0.91 * 0.09))
    assert elo_ratings([Match(7, 2, 20, 20.0)], oldest=2)[7].elo == pytest.approx(400 * math.log10(41))
    assert elo_ratings([], oldest=3) == {3: (0.0, 0.0)}


def test_a_player_with_one_match_says_nothing_of_the_others() -> None:
    """So its match may be forgotten as soon as its own rating is known."""
    matches = [Match(4, 1, 20, 13.0), Match(9, 4, 20, 15.0), Match(9, 1, 20, 18.0)]
    some, all_of_them = (elo_ratings(each, 1) for each in (matches, [*matches, Match(6, 4, 20, 17.0)]))
    for player in (1, 4, 9):
        assert some[player] == pytest.approx(all_of_them[player])


def test_a_long_chain_of_clear_wins_converges() -> None:
    matches = [Match(n + 1, n, 50, 50.0) for n in range(30)]
    assert elo_ratings(matches, 0)[30].elo == pytest.approx(30 * 400 * math.log10(101), rel=1e-6)
