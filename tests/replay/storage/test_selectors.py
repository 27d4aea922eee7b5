"""Every selector against a list that is searched from end to end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.storage.chosen import CAPACITY, appear, chi_square, make, vanish
from troupe.services.replay.storage.samplers import REMOVERS, SAMPLERS

OPERATION = st.one_of(
    st.tuples(st.just("insert"), st.lists(st.floats(0, 1e6), min_size=1, max_size=40)),
    st.tuples(st.just("delete"), st.integers(1, 30)),
    st.tuples(st.just("update"), st.floats(0, 1e6)),
    st.tuples(st.just("select"), st.integers(1, 60)),
    st.tuples(st.just("remove"), st.integers(1, 60)),
)


def expected_order(kind, model):
    """Priorities and ages in the order in which an ordered selector gives them."""
    items = [(slot, priority) for slot, priority in model.items()]
    if kind == "fifo":
        return items
    if kind == "lifo":
        return items[::-1]
    assert kind in ("max_heap", "min_heap"), "a sampler that is new says here what it should choose"
    return sorted(items, key=lambda item: item[1], reverse=kind == "max_heap")


def check_choice(kind, model, count, slots, probabilities):
    if kind in ("prioritized", "uniform"):
        weights = {
            s: p**0.6 if kind == "prioritized" and p > 0 else float(kind == "uniform")
            for s, p in model.items()
        }
        total = sum(weights.values())
        assert len(slots) == (count if total > 0 else 0)
        for slot, probability in zip(slots.tolist(), probabilities, strict=True):
            assert weights[slot] > 0
            assert probability == pytest.approx(weights[slot] / total, rel=1e-9)
        return
    if kind in ("elite", "attentive"):  # see test_elite.py
        assert len(slots) == (count if model else 0)
        assert len(set(slots.tolist())) == min(count, len(model)), "twice only where there are too few"
        assert set(slots.tolist()) <= set(model)
        assert np.allclose(probabilities, 1 / max(len(model), 1))
        return
    order = expected_order(kind, model)[:count]
    assert len(slots) == len(set(slots.tolist())) == len(order)
    if kind in ("fifo", "lifo"):
        assert slots.tolist() == [slot for slot, _ in order]
    else:  # equal priorities come in any order
        assert [model[slot] for slot in slots.tolist()] == [priority for _, priority in order]
    assert np.allclose(probabilities, 1 / max(len(model), 1))


@pytest.mark.parametrize("kind", SAMPLERS)
@given(operations=st.lists(OPERATION, max_size=60), seed=st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_agrees_with_a_list(kind, operations, seed):
    rng = np.random.default_rng(seed)
    selector, items = make(kind)
    model: dict[int, float] = {}  # slot -> priority, oldest first
    free = list(range(CAPACITY))
    for operation, value in operations:
        if operation == "insert":
            priorities = np.array(value[: len(free)])
            if not len(priorities):
                continue
            slots = np.array([free.pop(int(rng.integers(len(free)))) for _ in priorities])
            appear(selector, items, slots, priorities)
            model |= dict(zip(slots.tolist(), priorities.tolist(), strict=True))
        elif operation == "delete" and model:
            slots = rng.choice(list(model), min(value, len(model)), replace=False)
            vanish(selector, items, slots)
            for slot in slots.tolist():
                del model[slot]
                free.append(slot)
        elif operation == "update" and model:
            slots = rng.choice(list(model), 5)
            priorities = value * rng.random(5)
            selector.update(slots, priorities)
            model |= dict(zip(slots.tolist(), priorities.tolist(), strict=True))
        elif operation == "select":
            slots, probabilities = selector.select(value, rng)
            check_choice(kind, model, value, slots, probabilities)
        elif operation == "remove":
            slots = selector.distinct(value, rng)
            possible = len(model)
            if kind == "prioritized":
                possible = sum(p > 0 for p in model.values())
            assert len(slots) == len(set(slots.tolist())) == min(value, possible)
            assert set(slots.tolist()) <= set(model)
            vanish(selector, items, slots)
            for slot in slots.tolist():
                del model[slot]
                free.append(slot)
        weights = sum(p**0.6 for p in model.values() if p > 0) if kind == "prioritized" else len(model)
        assert selector.total == pytest.approx(weights, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("kind", "exponent"), [("prioritized", 0.6), ("prioritized", 1.0), ("uniform", 0.6)])
def test_what_is_drawn_follows_the_distribution(kind, exponent):
    count, draws = 200, 400_000
    rng = np.random.default_rng(3)
    priorities = rng.random(count) * 10
    priorities[::7] = 0
    selector, items = make(kind, count, priority_exponent=exponent)
    appear(selector, items, np.arange(count), priorities)
    weights = np.where(priorities > 0, priorities**exponent, 0) if kind == "prioritized" else np.ones(count)
    # One at a time: a batch is stratified, and so more even than chance.
    slots = np.concatenate([selector.select(1, rng)[0] for _ in range(2000)])
    stratified = np.concatenate([selector.select(500, rng)[0] for _ in range(draws // 500)])
    for sample in (slots, stratified):
        counts = np.bincount(sample, minlength=count)
        assert not counts[weights == 0].any()
        present = weights > 0
        expected = len(sample) * weights[present] / weights.sum()
        freedom = int(present.sum()) - 1
        # Five standard deviations above the mean of the chi-square distribution.
        assert chi_square(counts[present], expected) < freedom + 5 * np.sqrt(2 * freedom)


def test_a_negative_exponent_prefers_low_priorities():
    rng = np.random.default_rng(0)
    gone = np.zeros(4)
    for _ in range(2000):
        selector, items = make("prioritized", 4, REMOVERS, removal_exponent=-0.4)
        appear(selector, items, np.arange(4), np.array([0.5, 1.0, 2.0, 1e30]))
        gone[selector.distinct(1, rng)] += 1
    weights = np.array([0.5, 1.0, 2.0]) ** -0.4
    assert gone[3] == 0
    assert chi_square(gone[:3], 2000 * weights / weights.sum()) < 2 + 5 * 2
    # Zero goes first, and does not break the sum.
    selector, items = make("prioritized", 4, REMOVERS, removal_exponent=-0.4)
    appear(selector, items, np.arange(3), np.array([0.0, 1.0, 1.0]))
    assert selector.distinct(1, rng).tolist() == [0]


def test_uniform_removal_is_uniform():
    rng = np.random.default_rng(0)
    counts = np.zeros(20)
    selector, items = make("uniform", 20)
    appear(selector, items, np.arange(20), np.ones(20))
    for _ in range(4000):
        counts[selector.distinct(5, rng)] += 1
    assert chi_square(counts, 1000.0) < 19 + 5 * np.sqrt(38)
