"""When a run in AWS ends, and how many actors it has: by figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from troupe.common.errors import ConfigError
from troupe.services.cloud.appetite import Bounds, Look, wanted_actors
from troupe.services.cloud.decisions import (
    Known,
    Limits,
    actors_to_have,
    ending,
    has_moved,
)
from troupe.services.cloud.goal import parse_goal
from troupe.services.cloud.spending import Spending, end_s, is_used_up, lasting_s, reserve_usd

HOUR_S = 3600.0
BOUNDS = Bounds(per_machine=4, low=4, high=64)
LIMITS = Limits(
    budget_usd=5.0,
    once_usd=0.1,
    goal=parse_goal("return>=18", evaluated=True),
    total_steps=1_000_000,
    patience_s=1800.0,
    actors=BOUNDS,
)
STATUS: dict[str, Any] = {"steps": 1000, "metrics": {"eval/episode_return": 17.9}}


def known(**changes: Any) -> Known:
    now_s = 10 * HOUR_S
    plain = Known(Spending(1.0, now_s, 0.4), STATUS, moved_s=now_s, actors=16, looks=[])
    return replace(plain, **changes)


def looks(wait: float, blocked: float = 0.0, joined: int = 16, seconds: int = 300) -> list[Look]:
    return [Look(float(at_s), wait, blocked, joined) for at_s in range(0, seconds + 1, 60)]


def test_between_two_looks_the_dearer_rate_counts() -> None:
    before = Spending(1.0, 0.0, hourly_usd=0.4)
    assert before.counted(HOUR_S / 2, 0.2) == Spending(1.2, HOUR_S / 2, 0.2)
    assert before.counted(HOUR_S / 2, 0.8) == Spending(1.4, HOUR_S / 2, 0.8)
    assert before.counted(-5.0, 0.4).usd == 1.0, "a clock that was put back gives no money back"


def test_what_ending_takes_is_kept_back() -> None:
    assert reserve_usd(0.4, 0.1) == pytest.approx(0.2)  # a quarter of an hour, and the copy
    assert not is_used_up(Spending(4.79, 0.0, 0.4), 5.0, 0.1)
    assert is_used_up(Spending(4.8, 0.0, 0.4), 5.0, 0.1)


def test_aws_ends_the_machines_within_the_budget_and_a_little_later_than_this_program() -> None:
    at_s = end_s(Spending(1.0, 0.0, 0.4), 5.0, 0.1, hourly_usd=0.4)
    assert at_s == pytest.approx(9.5 * HOUR_S + 120)  # 3.8 dollars at 0.4, and two minutes
    # Five minutes until the learner's group lets it go, and the copy, are within the budget.
    assert 1.0 + 0.4 * (at_s + 300) / HOUR_S + 0.1 < 5.0
    assert lasting_s(Spending(1.0, 0.0, 0.4), 5.0, 0.1, 0.8) == pytest.approx(4.625 * HOUR_S)
    assert lasting_s(Spending(4.95, 0.0, 0.4), 5.0, 0.1, 0.8) == 0.0


def test_aws_is_told_when_the_end_comes_sooner_or_much_later() -> None:
    assert has_moved(0.0, 3600.0, 3500.0)
    assert not has_moved(0.0, 3600.0, 3550.0)
    assert not has_moved(0.0, 3600.0, 3900.0)
    assert has_moved(0.0, 3600.0, 4000.0)


def test_a_learner_that_waits_gets_more_machines_of_actors() -> None:
    assert wanted_actors(16, looks(0.21), BOUNDS) == 20
    assert wanted_actors(64, looks(0.9, joined=64), BOUNDS) == 64, "no more than there may be"
    assert wanted_actors(32, looks(0.5, joined=32), BOUNDS) == 40, "a quarter more"


def test_a_learner_that_never_waits_gets_fewer() -> None:
    assert wanted_actors(16, looks(0.049), BOUNDS) == 12
    assert wanted_actors(60, looks(0.0), BOUNDS) == 48, "a fifth fewer"
    assert wanted_actors(4, looks(0.0), BOUNDS) == 4, "never none"
    assert wanted_actors(16, looks(0.0, joined=3), BOUNDS) == 12, "also while some are away"


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (looks(0.20), "neither"),
        (looks(0.05), "neither"),
        (looks(0.9, seconds=240), "too short a time"),
        ([Look(0.0, 0.9, 0.0, 16), Look(300.0, 0.9, 0.0, 16)], "too few looks"),
        (looks(0.9, blocked=0.3), "replay holds them up"),
        (looks(0.9, joined=15), "those that were asked for have not come"),
        (looks(0.9, seconds=600)[:6] + looks(0.1, seconds=600)[6:], "what was longer ago"),
    ],
)
def test_the_number_stays(seen: list[Look], why: str) -> None:
    assert wanted_actors(16, seen, BOUNDS) == 16, why


def test_more_actors_come_only_where_the_budget_lasts_with_them() -> None:
    waiting = known(looks=looks(0.5))
    assert actors_to_have(LIMITS, waiting, lambda actors: 0.1 * actors) == 20  # 3.4 dollars at 2 an hour
    assert actors_to_have(LIMITS, waiting, lambda actors: 1.0 * actors) == 16  # at 20 an hour none are left
    idle = known(looks=looks(0.0))
    assert actors_to_have(LIMITS, idle, lambda actors: 1.0 * actors) == 12, "fewer always"


def test_a_run_goes_on_until_something_ends_it() -> None:
    assert ending(LIMITS, known()) is None


@pytest.mark.parametrize(
    ("change", "goal", "why", "reached"),
    [
        ({"status": {"metrics": {"eval/episode_return": 18.0}}}, True, "is reached (18)", True),
        ({"status": {"steps": 1_000_000}}, True, "all 1,000,000 steps", False),
        ({"status": {"steps": 1_000_000}}, False, "all 1,000,000 steps", True),
        ({"spending": Spending(4.81, 0.0, 0.4)}, True, "the budget is used up", False),
        ({"spending": Spending(4.81, 0.0, 0.4)}, False, "the budget is used up", True),
        ({"moved_s": 9.4 * HOUR_S}, True, "no step for 30 minutes", False),
        ({"status": {}, "moved_s": 9.4 * HOUR_S}, True, "no step for 30 minutes", False),
    ],
)
def test_what_ends_a_run(change: dict[str, Any], goal: bool, why: str, reached: bool) -> None:
    found = ending(LIMITS if goal else replace(LIMITS, goal=None), known(**change))
    assert found is not None
    assert why in found.why
    assert found.reached == reached


def test_the_budget_comes_before_the_goal() -> None:
    both = known(spending=Spending(4.9, 0.0, 0.4), status={"metrics": {"eval/episode_return": 20.0}})
    found = ending(LIMITS, both)
    assert found is not None
    assert "budget" in found.why


@pytest.mark.parametrize(
    ("text", "evaluated", "name", "bound"),
    [
        ("return>=18", True, "eval/episode_return", 18.0),
        ("return >= 18", False, "train/episode_return", 18.0),
        ("steps>=1e6", False, "steps", 1e6),
        ("learner/wait_share<0.05", False, "learner/wait_share", 0.05),
        ("return>-150.5", True, "eval/episode_return", -150.5),
    ],
)
def test_goals(text: str, evaluated: bool, name: str, bound: float) -> None:
    goal = parse_goal(text, evaluated=evaluated)
    assert (goal.name, goal.bound) == (name, bound)


@pytest.mark.parametrize("comparison", [">=", ">", "<=", "<"])
def test_goals_compare(comparison: str) -> None:
    goal = parse_goal(f"steps{comparison}10", evaluated=False)
    reached = [goal.is_reached({"steps": steps}) for steps in (9, 10, 11)]
    assert reached == [comparison[0] == "<", "=" in comparison, comparison[0] == ">"]
    assert not goal.is_reached({}), "what is not known is not reached"


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("return", "look like 'return>=18'"),
        ("return>=much", "look like 'return>=18'"),
        ("score>=3", "score is not a goal"),
        ("eval/episode_return>=3", "no evaluator"),
    ],
)
def test_what_is_no_goal_is_refused(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_goal(text, evaluated=False)
