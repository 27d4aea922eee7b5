import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.rings import Ring


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), max_size=200), st.integers(30, 200))
@settings(max_examples=200, deadline=None)
def test_runs_never_overlap_and_leave_in_order(operations, most):
    ring, runs = Ring(most), []

    def free():
        runs.pop(0)
        ring.free(runs[0][0] if runs else 0)

    for count, frees in operations:
        for _ in range(min(frees, len(runs))):
            free()
        while (start := ring.place(count, most)) is None:
            assert runs, "no room in an empty ring"
            free()
        ring.take(start, count)
        runs.append((start, count))
        assert start + count <= ring.limit <= most
        taken = np.zeros(most, int)
        for begin, size in runs:
            taken[begin : begin + size] += 1
        assert taken.max() == 1
        copy = Ring(most)
        starts, sizes = np.array(runs).T
        copy.restore(starts, starts + sizes, ring.limit)
        assert vars(copy) == vars(ring)


def test_ring_settles_a_little_above_what_is_alive():
    ring, runs, rng = Ring(1_000_000), [], np.random.default_rng(0)
    for _ in range(20_000):
        count = int(rng.integers(1, 57))
        while len(runs) >= 500:
            runs.pop(0)
            ring.free(runs[0])
        start = ring.place(count, 1_000_000)
        assert start is not None
        ring.take(start, count)
        runs.append(start)
    assert ring.limit < 1.25 * 500 * 28.5


def test_growth_is_limited_by_the_budget():
    ring = Ring(1000)
    assert ring.place(10, growth=9) is None
    ring.take(ring.place(10, growth=10), 10)
    assert ring.place(1, growth=0) is None
    ring.free(0)
    assert ring.place(10, growth=0) == 0
