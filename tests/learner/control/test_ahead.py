"""Sums that are kept up to date, beside the same sums over all processes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.services.learner.control.ahead import Ahead
from troupe.services.learner.control.budget import StepBudget

NAMES = "abc"


def take(held: dict[int, tuple[str, int]], one: int, place: str, slots: int) -> None:
    """Give a process a place, unless it holds slots in another."""
    if one not in held or not held[one][1] or held[one][0] == place:
        held[one] = place, slots


def check(ahead: Ahead, held: dict[int, tuple[str, int]], far: dict[int, int]) -> None:
    """Compare with sums over all who are held, by place and slots, and how far each may go."""
    assert ahead.total == sum(far.get(one, 0) for one in held)
    assert ahead.replaced == sum(far.get(one, 0) for one, (_, slots) in held.items() if not slots)
    assert ahead.slots == sum(slots for _, slots in held.values())
    assert ahead.holders == sum(slots > 0 for _, slots in held.values())
    assert len(ahead._places) == len({place for place, _ in held.values()})
    for asking, (own, _) in held.items():
        others: Counter[str] = Counter()
        due: Counter[str] = Counter()
        for one, (place, slots) in held.items():
            if one != asking:
                others[place] += far.get(one, 0)
            if place != own:  # whoever asks has its round counted elsewhere
                due[place] += slots
        assert ahead.reserved_beside(asking) == sum(max(0, others[each] - due[each]) for each in others)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hold", "set", "forget"]),
            st.integers(0, 5),
            st.sampled_from(NAMES),
            st.integers(0, 4),
            st.integers(0, 20),
        ),
        max_size=60,
    )
)
def test_sums_are_those_over_all_processes(moves):
    ahead = Ahead()
    held: dict[int, tuple[str, int]] = {}
    far: dict[int, int] = {}
    for move, one, place, slots, steps in moves:
        if move == "hold":
            ahead.hold(one, place, slots)
            take(held, one, place, slots)
        elif move == "set":
            ahead.set(one, steps)
            if one in held:
                far[one] = steps
        else:
            ahead.forget(one, place)
            if held.get(one, ("",))[0] == place:
                del held[one]
                far.pop(one, None)
        check(ahead, held, far)


@settings(max_examples=300, deadline=None)
@given(
    total=st.integers(1, 500),
    moves=st.lists(
        st.tuples(
            st.sampled_from(["hold", "extend", "extend", "extend", "report", "forget", "load"]),
            st.integers(0, 5),
            st.sampled_from(NAMES),
            st.integers(0, 4),
            st.floats(0.0, 1.0),
        ),
        max_size=80,
    ),
)
def test_a_budget_keeps_its_sums_true(total, moves):
    budget = StepBudget(total, clock=iter(range(10**6)).__next__)
    held: dict[int, tuple[str, int]] = {}
    told: dict[int, int] = {}
    saved = budget.to_meta()
    for move, one, place, slots, share in moves:
        if move == "hold":
            budget.hold(one, place, slots)
            take(held, one, place, slots)
        elif move == "extend":
            made = int(share * told.get(one, 0))
            told[one] = budget.extend(one, made, told.get(one, 0))
        elif move == "report":
            budget.report(one, int(share * 2 * total), 3)
        elif move == "load":
            budget.load_meta(saved)
        else:
            budget.forget(one, place)
            if held.get(one, ("",))[0] == place:
                del held[one]
        far = {
            each: max(0, max(limits) - budget._made.get(each, 0)) for each, limits in budget._limits.items()
        }
        assert far.keys() <= held.keys()
        check(budget._ahead, held, far)
        saved = budget.to_meta() if share < 0.1 else saved
