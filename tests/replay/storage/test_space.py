"""Places of chunks: never two in the same place, and never without room while there is some."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.services.replay.storage.space import Space

ROWS, UNITS = 64, 400


class Model:
    """A space with what it has given out."""

    def __init__(self, budget=10**9, most=(ROWS, UNITS, 4 * UNITS)):
        self.starts = np.zeros((ROWS, 3), np.int64)
        self.counts = np.zeros((ROWS, 3), np.int64)
        self.most = most
        self.space = Space(most, (8, 1, 1), budget, self.starts, self.counts)
        self.chunks: dict[int, int] = {}  # row -> age
        self.kept: set[int] = set()
        self.age = 0

    def insert(self, units, more):
        """Insert a chunk, evicting as long as it has to; the ages of what went, None if too few may go."""
        counts, gone = [1, units, more], []
        while (starts := self.space.place(counts)) is None:
            assert self.chunks, "no room in an empty space"
            row = self.space.oldest()
            ages = [age for each, age in self.chunks.items() if each not in self.kept]
            if row is None:
                assert not ages
                assert not self.has_gap(counts)
                return None
            assert self.chunks[row] == min(ages)
            gone.append(self.chunks.pop(row))
            self.space.evict(row)
        row = starts[0]
        assert row not in self.chunks
        self.starts[row], self.counts[row] = starts, counts
        self.space.take(starts, counts)
        self.age += 1
        self.chunks[row] = self.age
        return gone

    def has_gap(self, counts):
        """Whether there is room between two chunks, or before the first one."""
        rows = sorted(self.chunks)
        begins = [[0, 0, 0]] + [(self.starts[row] + self.counts[row]).tolist() for row in rows]
        ends = [self.starts[row].tolist() for row in rows]
        pairs = zip(begins[:-1], ends, strict=True)
        return any(all(np.array(begin) + counts <= end) for begin, end in pairs)

    def keep(self, row):
        self.kept ^= {row}
        (self.space.keep if row in self.kept else self.space.let_go)(row)

    def free(self, row):
        self.chunks.pop(row)
        self.kept.discard(row)
        self.space.free(row)

    def check(self):
        rows = np.array(sorted(self.chunks), np.int64)
        starts, ends = self.starts[rows], self.starts[rows] + self.counts[rows]
        assert np.all(ends[:-1] <= starts[1:]), "two chunks in one place, or not in one order"
        assert not len(rows) or np.all(ends[-1] <= self.space.limits)
        assert np.all(np.array(self.space.limits) <= self.most)
        assert self.space.used_bytes <= self.space.budget_bytes
        assert len(self.space) == len(rows)
        live = (self.counts[rows] * [8, 1, 1]).sum() if len(rows) else 0
        assert self.space.live_bytes == live


OPERATION = st.one_of(
    st.tuples(st.just("insert"), st.integers(1, 40), st.integers(1, 160)),
    st.tuples(st.just("insert"), st.integers(1, 10), st.integers(1, 20)),
    st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("insert and keep"), st.integers(1, 20), st.integers(1, 80)),
    st.tuples(st.just("let go"), st.integers(0, 1000), st.just(0)),
    st.tuples(st.just("restore"), st.just(0), st.just(0)),
)


@given(st.lists(OPERATION, max_size=200), st.sampled_from([600, 1500, 10**9]))
@settings(max_examples=200, deadline=None)
def test_never_two_chunks_in_one_place(operations, budget):
    model = Model(budget)
    for operation, a, b in operations:
        if operation.startswith("insert"):
            if model.insert(a, b) is not None and operation != "insert":
                model.keep(max(model.chunks, key=model.chunks.get))
        elif operation == "free" and model.chunks:
            model.free(sorted(model.chunks)[a % len(model.chunks)])
        elif operation == "let go" and model.kept:
            model.keep(sorted(model.kept)[a % len(model.kept)])
        elif operation == "restore":
            space = Space(model.most, (8, 1, 1), budget, model.starts, model.counts)
            rows = sorted(model.chunks, key=model.chunks.get)
            space.restore(np.array(rows, np.int64), model.space.limits)
            for row in model.kept:
                space.keep(row)
            model.space = space
        model.check()


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=60, max_size=150))
@settings(max_examples=50, deadline=None)
def test_nothing_is_evicted_while_the_space_may_grow(sizes):
    """A few chunks at a time, freed in order, whatever their sizes."""
    model = Model(most=(ROWS, 10**6, 10**6))
    for a, b in sizes:
        assert not model.insert(a, b)
        if len(model.chunks) > 6:
            model.free(min(model.chunks, key=model.chunks.get))
        model.check()


def test_a_ring_of_equal_chunks_evicts_each_in_turn():
    model = Model(budget=1000)
    for _ in range(100):
        model.insert(20, 20)
    gone = [model.insert(20, 20) for _ in range(40)]
    assert all(len(each) == 1 for each in gone)
    assert len(model.chunks) == 1000 // 48


@pytest.mark.parametrize("seed", range(3))
def test_room_between_the_living_is_used(seed):
    """Chunks that go in any order: the space stays near what is alive, and nothing has to be evicted."""
    rng = np.random.default_rng(seed)
    rows = 4000
    starts, counts = np.zeros((rows, 2), np.int64), np.zeros((rows, 2), np.int64)
    space = Space((rows, 10**6), (8, 1), 10**9, starts, counts)
    alive = []
    for _ in range(20_000):
        units = [1, int(rng.integers(90, 110))]
        place = space.place(units)
        assert place is not None
        starts[place[0]], counts[place[0]] = place, units
        space.take(place, units)
        alive.append(place[0])
        if len(alive) > 500:
            space.free(alive.pop(int(rng.integers(len(alive)))))
    assert space.used_bytes < 2.2 * space.live_bytes


def test_a_chunk_larger_than_everything_is_not_placed():
    model = Model(budget=500)
    model.insert(10, 10)
    model.free(next(iter(model.chunks)))
    assert model.space.place([1, 300, 300]) is None
    assert model.space.place([1, 10, 10]) == [0, 0, 0]
