"""How many actors a learner can feed on: more while it waits, fewer while they are in vain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MORE_ABOVE = 0.20
FEWER_BELOW = 0.05
"""Shares of the time in which the learner waits for batches."""
BLOCKED = 0.20
"""Share of the time in which replay holds actors up: more of them would wait like these."""
SETTLE_S = 300.0
"""So long the looks have to go back before anything follows from them."""
LOOKS = 3


@dataclass(frozen=True)
class Look:
    """What a status of the learner said.

    Attributes:
        at_s: when.
        wait_share: of its time in which the learner waited for batches.
        blocked_share: of their time in which actors could not hand in what they had.
        joined: actor processes in the run.
    """

    at_s: float
    wait_share: float
    blocked_share: float
    joined: int


@dataclass(frozen=True)
class Bounds:
    """Actor processes of a machine, and of the whole run at least and at most."""

    per_machine: int
    low: int
    high: int


def wanted_actors(actors: int, looks: Sequence[Look], bounds: Bounds) -> int:
    """How many actor processes there should be, in whole machines; `actors` where nothing says otherwise.

    Args:
        actors: how many there should be so far.
        looks: those since that number was last changed, and since the learner learns.
        bounds: of the answer.
    """
    if len(looks) < LOOKS or looks[-1].at_s - looks[0].at_s < SETTLE_S:
        return actors
    recent = [look for look in looks if look.at_s > looks[-1].at_s - SETTLE_S]
    waits = sum(look.wait_share for look in recent) / len(recent)
    blocked = sum(look.blocked_share for look in recent) / len(recent)
    machines = -(-actors // bounds.per_machine)
    # Where those that were asked for have not come, asking for more brings none.
    if waits > MORE_ABOVE and blocked <= BLOCKED and looks[-1].joined >= actors:
        machines += max(1, machines // 4)
    elif waits < FEWER_BELOW:
        machines -= max(1, machines // 5)
    else:
        return actors
    return min(bounds.high, max(bounds.low, machines * bounds.per_machine))
