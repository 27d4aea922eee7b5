"""Which candidates are taken of those that were drawn with replacement."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from troupe.common.data.candidates import STRATEGIES, choose


def oracle(strategy, rows, count):
    """Ids that the original takes of rows (distance, times sampled, id), equal ids with equal distances."""
    if strategy == "nearest":
        return [row[2] for row in sorted(rows)[:count]]
    rows = sorted(set(rows))
    size = len(rows) // count
    if strategy == "least_sampled":
        taken = []
        for times in range(max(row[1] for row in rows) + 1):
            taken += [row for row in rows if row[1] == times]
        taken = taken[:count]
    else:
        groups = [rows[i * size : (i + 1) * size] for i in range(count)]
        by = {"spread": lambda row: row[0], "spread_least_sampled": lambda row: (row[1], row[0])}[strategy]
        taken = [min(group, key=by) for group in groups]
    return [row[2] for row in taken]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    drawn=st.lists(st.integers(0, 15), min_size=1, max_size=40),
    count=st.integers(1, 12),
    seed=st.integers(0, 9),
)
@example(drawn=[3, 3, 3, 3, 3, 3], count=2, seed=0)
@example(drawn=[3, 5, 3, 5, 5, 3, 3], count=3, seed=0)
@settings(max_examples=150, deadline=None)
def test_the_original_s_choice_of_what_was_drawn_with_replacement(strategy, drawn, count, seed):
    rng = np.random.default_rng(seed)
    distance, times = rng.permutation(16).astype(float), rng.integers(0, 4, 16)
    ids = np.array(drawn)
    places = choose(strategy, distance[ids], times[ids], ids.astype(np.uint64), count)
    assert len(set(places.tolist())) == len(places) == min(count, len(drawn))
    taken = Counter(ids[places].tolist())
    rows = list(zip(distance[ids].tolist(), times[ids].tolist(), drawn, strict=True))
    if count >= len(drawn):
        assert taken == Counter(drawn)
    elif strategy != "nearest" and len(set(drawn)) < count:  # where the original never ends, or fails
        assert set(taken) == set(drawn)
    else:
        assert taken == Counter(oracle(strategy, rows, count))
