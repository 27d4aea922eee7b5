import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.services.replay.storage.sumtree import SumTree, stratified

WEIGHTS = st.one_of(
    st.just(0.0),
    st.floats(0, 1e6, allow_subnormal=False),
    st.sampled_from([1e-300, 1e-12, 1e18]),
)


@st.composite
def writes(draw):
    capacity = draw(st.integers(1, 400))
    slots = st.lists(st.integers(0, capacity - 1), min_size=1, max_size=80)
    batches = []
    for _ in range(draw(st.integers(1, 5))):
        chosen = draw(slots)
        batches.append((chosen, draw(st.lists(WEIGHTS, min_size=len(chosen), max_size=len(chosen)))))
    return capacity, batches


@given(writes(), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_agrees_with_a_plain_array(case, seed):
    capacity, batches = case
    tree, oracle = SumTree(capacity), np.zeros(capacity)
    for slots, weights in batches:
        tree.set(np.array(slots), np.array(weights))
        for slot, weight in zip(slots, weights, strict=True):
            oracle[slot] = weight
    assert np.array_equal(tree[np.arange(tree.capacity)], oracle)
    assert tree.total == pytest.approx(oracle.sum(), rel=1e-12)
    points = np.concatenate([[0.0, np.nextafter(1, 0)], stratified(np.random.default_rng(seed), 50)])
    if not tree.total > 0:
        with pytest.raises(ValueError, match="zero"):
            tree.sample(points)
        return
    slots = tree.sample(points)
    assert slots.min() >= 0
    assert slots.max() < capacity
    assert np.all(oracle[slots] > 0), "a zero weight was sampled"
    # Each point lies in its slot's part of the line, but for rounding.
    ends = np.cumsum(oracle)
    slack = 1e-9 * ends[-1]
    values = points * ends[-1]
    assert np.all(values <= ends[slots] + slack)
    assert np.all(values >= ends[slots] - oracle[slots] - slack)


def test_sums_do_not_drift():
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    for _ in range(3000):
        slots = rng.integers(0, 5000, 64)
        tree.set(slots, 10.0 ** rng.uniform(-12, 12, 64))
    tree.set(np.arange(5000), 1.0)
    assert tree.total == 5000.0
    tree.set(np.arange(5000), 0.0)
    assert tree.total == 0.0


def test_sampled_distribution_is_proportional():
    rng = np.random.default_rng(3)
    weights = rng.random(300) ** 4
    weights[rng.random(300) < 0.2] = 0
    tree = SumTree(300)
    tree.fill(weights)
    draws = 200_000
    counts = np.bincount(tree.sample(rng.random(draws)), minlength=300)
    expected = draws * weights / weights.sum()
    tested = expected > 5
    chi2 = ((counts - expected)[tested] ** 2 / expected[tested]).sum()
    freedom = tested.sum() - 1
    assert abs(chi2 - freedom) < 5 * np.sqrt(2 * freedom)  # five standard deviations
    assert not counts[weights == 0].any()


def test_strata_cover_the_whole_line_once():
    points = stratified(np.random.default_rng(0), 64)
    assert np.array_equal((points * 64).astype(int), np.arange(64))
