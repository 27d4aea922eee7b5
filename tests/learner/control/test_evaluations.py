"""Which evaluator plays what: every game once, whoever comes and goes."""

import math

import pytest

from troupe.common.errors import RefusedError
from troupe.services.learner.control.evaluations import Evaluations


def play(evaluations, asker, live=(1, 2, 3), newest=7, stopping=False, now_s=0.0):
    return evaluations.next(asker, live, newest, stopping, now_s)


@pytest.mark.parametrize(("episodes", "size"), [(1, 4), (4, 4), (5, 4), (12, 4), (7, 1)])
@pytest.mark.parametrize("evaluators", [1, 2, 3])
def test_every_game_is_played_once(episodes, size, evaluators):
    split = Evaluations(episodes, size, 60.0, 600.0)
    played = {}
    while len(played) < math.ceil(episodes / size):
        held = {asker: play(split, asker) for asker in range(1, 1 + evaluators)}
        given = {asker: part for asker, part in held.items() if part is not None}
        assert len(set(given.values())) == len(given)
        for asker, part in given.items():
            played[part] = split.games(part)
            split.hand_in(asker, 7, part, split.games(part))
    assert sum(played.values()) == episodes
    assert sorted(played) == list(range(len(played)))
    assert play(split, 1) is None


def test_who_asks_again_is_told_the_same():
    split = Evaluations(12, 4, 60.0, 600.0)
    assert [play(split, 1), play(split, 1), play(split, 2), play(split, 1)] == [0, 0, 1, 0]


def test_the_part_of_one_that_has_gone_is_played_by_another():
    split = Evaluations(8, 4, 60.0, 600.0)
    assert [play(split, 1), play(split, 2)] == [0, 1]
    assert play(split, 3) is None
    assert play(split, 3, live=(2, 3)) == 0
    with pytest.raises(RefusedError, match="not its to play"):
        split.hand_in(1, 7, 0, 4)
    split.hand_in(3, 7, 0, 4)


@pytest.mark.parametrize(
    ("holder", "version", "part", "games", "why"),
    [(2, 7, 0, 4, "not its"), (1, 6, 0, 4, "not its"), (1, 7, 1, 4, "not its"), (1, 7, 0, 5, "which has 4")],
)
def test_nobody_hands_in_what_is_not_his(holder, version, part, games, why):
    split = Evaluations(8, 4, 60.0, 600.0)
    assert play(split, 1) == 0
    with pytest.raises(RefusedError, match=why):
        split.hand_in(holder, version, part, games)
    assert play(split, 1) == 0


def test_the_next_evaluation_begins_after_its_period_with_the_newest_version():
    split = Evaluations(4, 4, 60.0, 600.0)
    assert play(split, 1, newest=7) == 0
    assert play(split, 2, newest=9, now_s=100.0) is None  # it is not over
    split.hand_in(1, 7, 0, 4)
    assert play(split, 1, newest=9, now_s=59.0) is None
    assert play(split, 1, newest=7, now_s=61.0) is None  # there is nothing new
    assert play(split, 1, newest=9, now_s=61.0) == 0
    assert split.version == 9


def test_one_that_hangs_is_given_up():
    split = Evaluations(8, 4, 60.0, 600.0)
    assert [play(split, 1), play(split, 2)] == [0, 1]
    split.hand_in(2, 7, 1, 4)
    assert play(split, 2, newest=8, now_s=599.0) is None
    assert play(split, 2, newest=8, now_s=601.0) == 0
    assert split.version == 8
    with pytest.raises(RefusedError, match="not its"):
        split.hand_in(1, 7, 0, 4)


def test_a_part_that_cannot_be_played_is_given_to_nobody_else():
    split = Evaluations(8, 4, 60.0, 600.0)
    assert [play(split, 1), play(split, 2)] == [0, 1]
    split.hand_in(1, 7, 0, None)
    assert play(split, 1) is None
    split.hand_in(2, 7, 1, None)
    assert split.over(7, True, 1.0)
    assert play(split, 1, newest=8, now_s=61.0) == 0  # the next evaluation is tried


def test_the_last_version_takes_the_place_of_an_older_one():
    split = Evaluations(8, 4, 60.0, 600.0)
    assert play(split, 1, newest=7) == 0
    assert not split.over(9, True, 1.0)
    assert [play(split, asker, newest=9, stopping=True, now_s=1.0) for asker in (1, 2)] == [0, 1]
    split.hand_in(1, 9, 0, 4)
    assert not split.over(9, True, 1.0)
    split.hand_in(2, 9, 1, 4)
    assert split.over(9, True, 1.0)
    assert not split.over(9, False, 1.0)
    assert play(split, 1, newest=9, stopping=True, now_s=2.0) is None
