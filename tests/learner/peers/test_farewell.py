"""How long a learner that was told to end waits for the others to go on without it."""

import pytest

from troupe.common import system
from troupe.services.learner.peers.member import Rounds
from troupe.services.learner.peers.shares import Lesson

TO_BE_LET_GO = 4
"""Rounds that it takes."""


@pytest.mark.parametrize(
    ("round_s", "asks"), [(0.1, TO_BE_LET_GO), (3.0, TO_BE_LET_GO), (8.0, TO_BE_LET_GO), (30.0, 2)]
)
def test_a_learner_waits_for_as_many_updates_as_it_takes_to_be_let_go_within_a_limit(
    monkeypatch, round_s, asks
):
    now_s, asked = [100.0], []
    monkeypatch.setattr(system, "monotonic", lambda: now_s[0])

    def learn():
        now_s[0] += round_s
        return Lesson()

    def let_go():
        asked.append(now_s[0])
        return len(asked) > TO_BE_LET_GO

    rounds = Rounds(learn)
    rounds.learn()
    rounds.leave(let_go)
    assert len(asked) - 1 == asks


def test_what_is_no_update_says_nothing_of_how_long_they_take(monkeypatch):
    now_s, asked = [100.0], []
    monkeypatch.setattr(system, "monotonic", lambda: now_s[0])
    lessons = iter([Lesson(), None, *[Lesson()] * 100])

    def learn():
        lesson = next(lessons)
        now_s[0] += 1.0 if lesson else 20.0
        return lesson

    rounds = Rounds(learn)
    rounds.learn()
    rounds.learn()
    rounds.leave(lambda: bool(asked.append(now_s[0])))
    assert asked[-1] - asked[0] == 15.0
