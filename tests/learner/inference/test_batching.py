import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.services.learner.inference.batching import BatchError, BatchQueue


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def queue_of(min_batch=4, max_batch=8, timeout_s=1.0):
    clock = Clock()
    return BatchQueue(min_batch, max_batch, timeout_s, clock), clock


def names(batch):
    return [request.payload for request in batch]


def test_a_batch_is_due_at_the_minimum_or_after_the_timeout_of_its_oldest_request():
    queue, clock = queue_of()
    assert queue.due_in_s() is None
    assert queue.take() == []
    queue.put("a", 3, "a1")
    assert queue.due_in_s() == 1.0
    clock.now += 0.75
    assert queue.take() == []
    assert queue.due_in_s() == 0.25
    queue.put("b", 1, "b1")
    assert queue.due_in_s() == 0.0
    assert names(queue.take()) == ["a1", "b1"]
    queue.put("c", 1, "c1")
    clock.now += 1.0
    assert names(queue.take()) == ["c1"]
    assert queue.due_in_s() is None


def test_a_flood_of_one_caller_does_not_keep_others_waiting():
    queue, _ = queue_of(1, 4)
    for k in range(20):
        queue.put("flood", 1, f"f{k}")
    queue.put("a", 1, "a")
    queue.put("b", 1, "b")
    assert names(queue.take()) == ["f0", "a", "b", "f1"]
    assert names(queue.take()) == ["f2", "f3", "f4", "f5"]


def test_turns_go_round_over_batches():
    queue, _ = queue_of(1, 2)
    for k in range(3):
        for caller in "abc":
            queue.put(caller, 1, f"{caller}{k}")
    assert [names(queue.take()) for _ in range(5)] == [
        ["a0", "b0"], ["c0", "a1"], ["b1", "c1"], ["a2", "b2"], ["c2"]
    ]  # fmt: skip


def test_a_large_request_is_not_passed_over_for_ever():
    queue, clock = queue_of(1, 4)
    queue.put("small", 1, "s0")
    queue.put("large", 4, "large")
    for k in range(1, 9):
        clock.now += 0.01
        queue.put("small", 1, f"s{k}")
    assert names(queue.take()) == ["s0", "s1", "s2", "s3"]
    assert names(queue.take()) == ["large"]
    assert names(queue.take()) == ["s4", "s5", "s6", "s7"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=30))
def test_every_request_is_taken_once_in_its_callers_order_and_no_batch_is_too_large(requests):
    queue, _ = queue_of(1, 8)
    for k, (caller, rows) in enumerate(requests):
        queue.put(caller, rows, k)
    taken = []
    while batch := queue.take():
        assert sum(request.rows for request in batch) <= 8
        taken += batch
    assert sorted(names(taken)) == list(range(len(requests)))
    assert queue.rows == 0
    for caller in range(4):
        mine = [r.payload for r in taken if r.caller == caller]
        assert mine == sorted(mine)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_impossible_sizes_are_refused(rows):
    queue, _ = queue_of()
    with pytest.raises(BatchError, match="1 to 8"):
        queue.put("a", rows, None)
    assert queue.rows == 0


def test_who_has_gone_is_forgotten():
    queue, _ = queue_of(4)
    queue.put("a", 3, "a1")
    queue.put("b", 1, "b1")
    assert names(queue.drop("a")) == ["a1"]
    assert queue.drop("nobody") == []
    assert queue.rows == 1
    assert queue.due_in_s() == 1.0
    assert names(queue.take_now()) == ["b1"]
