"""What follows from what is known of a run in AWS: whether it ends, and how many actors it should have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from troupe.services.cloud.appetite import Bounds, Look, wanted_actors
from troupe.services.cloud.goal import Goal
from troupe.services.cloud.spending import Spending, is_used_up, lasting_s

WORTH_S = 1800.0
"""More actors have to be affordable for so long: until they learn, minutes go by."""
EARLIER_S, LATER_SHARE = 60.0, 0.1
"""By how much the end of the budget has moved when AWS is told: sooner, or later by a share of the rest."""


@dataclass(frozen=True)
class Limits:
    """What bounds a run.

    Attributes:
        budget_usd: all that it may cost.
        once_usd: of that, what fetching its files takes.
        goal: None for as long as the budget lasts.
        total_steps: of the run.
        patience_s: how long it may make no step.
        actors: see `wanted_actors`.
    """

    budget_usd: float
    once_usd: float
    goal: Goal | None
    total_steps: int
    patience_s: float
    actors: Bounds


@dataclass(frozen=True)
class Known:
    """What is known now.

    Attributes:
        spending: up to now.
        status: the newest that the learner wrote; empty before the first.
        moved_s: when it last made a step, as far as is known, or began.
        actors: how many there should be so far.
        looks: see `wanted_actors`.
    """

    spending: Spending
    status: Mapping[str, Any]
    moved_s: float
    actors: int
    looks: Sequence[Look]


@dataclass(frozen=True)
class End:
    """Why a run ends; `reached`: it has done what it was to do."""

    why: str
    reached: bool


def ending(limits: Limits, known: Known) -> End | None:
    """Whether the run ends now; the budget comes first."""
    if is_used_up(known.spending, limits.budget_usd, limits.once_usd):
        # Without a goal it was to learn for so much money.
        return End("the budget is used up", limits.goal is None)
    if limits.goal is not None and limits.goal.is_reached(known.status):
        return End(f"{limits.goal} is reached ({limits.goal.value(known.status):g})", True)
    if known.status.get("steps", 0) >= limits.total_steps:
        return End(f"all {limits.total_steps:,} steps are made", limits.goal is None)
    if known.spending.until_s - known.moved_s > limits.patience_s:
        minutes = limits.patience_s / 60
        return End(f"it made no step for {minutes:.0f} minutes: its logs in CloudWatch say why", False)
    return None


def actors_to_have(limits: Limits, known: Known, hourly_usd: Callable[[int], float]) -> int:
    """How many actors there should be from now on; more only where the budget lasts for a while with them.

    Args:
        limits: of the run.
        known: of the run.
        hourly_usd: says what an hour costs with so many actors.
    """
    wanted = wanted_actors(known.actors, known.looks, limits.actors)
    if wanted > known.actors:
        left_s = lasting_s(known.spending, limits.budget_usd, limits.once_usd, hourly_usd(wanted))
        if left_s < WORTH_S:
            return known.actors
    return wanted


def has_moved(now_s: float, told_s: float, end_s: float) -> bool:
    """Whether AWS has to be told of another end of the budget than it was."""
    return end_s < told_s - EARLIER_S or end_s - told_s > LATER_SHARE * max(0.0, told_s - now_s)
