from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from troupe.common.data.table_config import TableConfig
from troupe.services.replay.storage.limiter import Limiter


def test_minimum_size():
    limiter = Limiter(min_items=10)
    assert "min size: 9 of 10" in limiter.sample_blocked(9, 4)
    assert limiter.sample_blocked(10, 4) is None
    assert limiter.insert_blocked(10**9) is None


@given(
    st.floats(0.1, 16),
    st.integers(1, 500),
    st.integers(1, 64),
    st.integers(1, 60),
    st.lists(st.booleans(), max_size=300),
)
@example(ratio=0.1, min_items=85, batch=1, chunk=57, moves=[False] * 6)  # 25.7 and 25.700000000000003
@settings(max_examples=150, deadline=None)
def test_ratio_holds_and_one_side_can_always_move(ratio, min_items, batch, chunk, moves):
    error = TableConfig(samples_per_insert=ratio, min_items=min_items).limiter_error(batch)
    limiter = Limiter(min_items, ratio, error)
    items = 0
    for sampling in moves:
        may_sample = limiter.sample_blocked(items, batch) is None
        may_insert = limiter.insert_blocked(items) is None
        assert may_sample or may_insert
        if sampling and may_sample:
            limiter.sampled += batch
        elif may_insert:
            limiter.inserted += chunk
            items += chunk
        if items >= min_items:
            surplus = ratio * (limiter.inserted - min_items) - limiter.sampled
            rounding = 1e-9 * (error + ratio * limiter.inserted)
            assert -error - rounding <= surplus <= error + ratio * chunk + rounding


def test_reasons_say_which_side_waits():
    limiter = Limiter(min_items=100, samples_per_insert=2.0, error=64, inserted=200, sampled=260)
    assert limiter.sample_blocked(200, 4) is None
    assert "waits for inserts" in limiter.sample_blocked(200, 5)
    limiter.sampled = 100
    assert "waits for samples" in limiter.insert_blocked(200)


def test_a_queue_counts_all_of_its_inserts_and_others_those_beyond_the_minimum():
    assert Limiter(min_items=1, inserted=2, sampled=2, queue_capacity=5).current == 1
    assert Limiter(min_items=1, queue_capacity=5).current == 0
    assert Limiter(min_items=10, inserted=50, sampled=80).current == 2


def test_batch_that_would_wait_for_ever_is_named():
    assert "twice" in Limiter(1, 1.0, 10).impossible(21)
    assert Limiter(1, 1.0, 10).impossible(20) is None
    assert Limiter(1, 0.0, 0).impossible(10**6) is None


def test_change_of_limits_starts_to_count_anew():
    limiter = Limiter(10, 4.0, 100, inserted=1000, sampled=5)
    assert limiter.insert_blocked(1000)
    limiter.forgive()
    assert limiter.insert_blocked(1000) is None
    assert limiter.sample_blocked(1000, 100) is None
    assert limiter.sample_blocked(1000, 101)


@pytest.mark.parametrize("ratio", [0.25, 8.0])
def test_automatic_error_admits_the_batch(ratio):
    assert Limiter(1, ratio, TableConfig(samples_per_insert=ratio).limiter_error(512)).impossible(512) is None


class Oracle:
    """The limits as documented, in fractions, from the list of everything that has happened."""

    def __init__(self, min_items, ratio, error, queue_capacity):
        self.min_items, self.queue_capacity = min_items, queue_capacity
        self.ratio, self.error = Fraction(ratio), Fraction(error)
        self.inserts, self.samples, self.removed = [], [], 0

    @property
    def items(self):
        return sum(self.inserts) - self.removed

    @property
    def owed(self):
        """Samples that the items inserted beyond the minimum are good for and that were not taken."""
        return self.ratio * (sum(self.inserts) - self.min_items) - sum(self.samples)

    def may_sample(self, batch):
        return self.items >= self.min_items and (not self.ratio or self.owed - batch >= -self.error)

    def may_insert(self):
        if self.queue_capacity and self.items >= self.queue_capacity:
            return False
        return not self.ratio or self.items < self.min_items or self.owed <= self.error

    def has_room(self, count):
        return not self.queue_capacity or self.items + count <= self.queue_capacity


@given(
    st.integers(1, 30),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, 8.0]),
    st.integers(0, 60),
    st.sampled_from([0, 0, 5, 40]),
    st.lists(st.tuples(st.sampled_from(["insert", "sample", "remove"]), st.integers(1, 12)), max_size=80),
)
@settings(max_examples=200, deadline=None)
def test_every_answer_is_that_of_the_documented_rules(min_items, ratio, error, queue_capacity, moves):
    """Whatever was inserted, sampled and removed, and whether or not anybody kept to the answers."""
    limiter = Limiter(min_items, ratio, error, queue_capacity=queue_capacity)
    oracle = Oracle(min_items, ratio, error, queue_capacity)
    for move, count in moves:
        items = oracle.items
        assert (limiter.sample_blocked(items, count) is None) == oracle.may_sample(count)
        assert (limiter.insert_blocked(items) is None) == oracle.may_insert()
        assert limiter.insert_held(items, count) == (not oracle.has_room(count))
        if move == "insert":
            limiter.inserted += count
            oracle.inserts.append(count)
        elif move == "sample":
            limiter.sampled += count
            oracle.samples.append(count)
        else:
            oracle.removed += min(count, items)
