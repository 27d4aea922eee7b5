"""The fewest faults with which a plan still fails, by delta debugging (Zeller and Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.plan import Plan
from tests.simulation.run import run_plan


def fails(plan: Plan) -> bool:
    return bool(run_plan(plan).problems)


def shrunk(plan: Plan, fails: Callable[[Plan], bool] = fails) -> Plan:
    """A plan of the same seed that fails with some of the faults, none of which can be left out."""
    kept = list(range(len(plan.faults)))

    def of(places: list[int]) -> Plan:
        return plan.without(set(range(len(plan.faults))) - set(places))

    if fails(of([])):
        return of([])
    parts = 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            if rest and fails(of(rest)):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return of(kept)
