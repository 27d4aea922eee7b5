import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.runtime.batching import Batcher, BatchError, BatchQueue


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


# ------------------------------------------------------------------ the rule


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


# ------------------------------------------------------------------ the thread


@pytest.fixture
def batcher():
    made = []

    def make(function=lambda x: {"y": x["x"] * 2}, min_batch=1, max_batch=16, timeout_s=0.01):
        made.append(Batcher(function, min_batch, max_batch, timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def row(*values):
    return {"x": np.asarray(values, np.float32)}


def test_every_caller_gets_its_own_rows(batcher):
    serve = batcher(min_batch=6, timeout_s=0.02)
    with ThreadPoolExecutor(8) as pool:
        inputs = [row(*range(k, k + 1 + k % 3)) for k in range(200)]
        outputs = list(pool.map(lambda x: serve(x, timeout_s=30.0), inputs))
    for given_x, got in zip(inputs, outputs, strict=True):
        np.testing.assert_array_equal(got["y"], given_x["x"] * 2)
    assert serve.rows_total == sum(len(x["x"]) for x in inputs)
    assert serve.calls_total < 200


def test_fewer_than_the_minimum_are_served_after_the_timeout(batcher):
    serve = batcher(min_batch=10, timeout_s=0.05)
    assert serve(row(1.0), timeout_s=30.0)["y"].tolist() == [2.0]


def test_the_minimum_is_served_at_once(batcher):
    serve = batcher(min_batch=3, timeout_s=3600.0)
    futures = [serve.submit(row(k), caller=k) for k in range(3)]
    assert [f.result(30.0)["y"].tolist() for f in futures] == [[0.0], [2.0], [4.0]]
    assert serve.calls_total == 1


def test_failure_of_one_caller_is_its_own(batcher):
    def function(x):
        if (x["x"] < 0).any():
            raise ArithmeticError("negative")
        return {"y": np.sqrt(x["x"])}

    serve = batcher(function, min_batch=3, timeout_s=3600.0)
    good, bad, other = (serve.submit(row(v), caller=v) for v in (4.0, -1.0, 9.0))
    assert good.result(30.0)["y"].tolist() == [2.0]
    assert other.result(30.0)["y"].tolist() == [3.0]
    with pytest.raises(ArithmeticError, match="negative"):
        bad.result(30.0)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"x": np.float32(1)},
        {"x": np.zeros(2, np.float32), "z": np.zeros(2)},
        {"x": np.zeros(2, np.float64)},
        {"x": np.zeros((2, 3), np.float32)},
        {"x": np.zeros(17, np.float32)},
        {"x": np.zeros(0, np.float32)},
    ],
)
def test_a_bad_request_is_refused_and_harms_nobody(batcher, bad):
    serve = batcher()
    assert serve(row(1.0), timeout_s=30.0)
    with pytest.raises(BatchError):
        serve.submit(bad)
    with pytest.raises(BatchError, match="2, 3 rows"):
        serve.submit({"x": np.zeros(2), "z": np.zeros(3)})
    assert serve(row(3.0), timeout_s=30.0)["y"].tolist() == [6.0]


def test_a_first_request_that_fails_does_not_settle_the_shape(batcher):
    serve = batcher(lambda x: {"y": x["x"] @ np.ones(2)}, min_batch=2, timeout_s=3600.0)
    bad = serve.submit({"x": np.ones((1, 3))}, caller="bad")
    good = serve.submit({"x": np.ones((1, 2))}, caller="good")
    assert good.result(30.0)["y"].tolist() == [2.0]
    with pytest.raises(ValueError, match="mismatch"):
        bad.result(30.0)


def test_a_caller_that_gives_up_holds_up_nobody(batcher):
    release = threading.Event()

    def function(x):
        release.wait(30.0)
        return {"y": x["x"]}

    serve = batcher(function, min_batch=1, max_batch=1)
    first = serve.submit(row(1.0), caller="a")
    with pytest.raises(BatchError, match="no result within"):
        serve(row(2.0), timeout_s=0.05, caller="b")
    third = serve.submit(row(3.0), caller="c")
    gone = serve.submit(row(4.0), caller="d")
    serve.drop("d")
    release.set()
    assert first.result(30.0)["y"].tolist() == [1.0]
    assert third.result(30.0)["y"].tolist() == [3.0]
    assert gone.cancelled()
    assert serve.calls_total == 2


def test_closing_answers_who_waits(batcher):
    serve = batcher(min_batch=10, timeout_s=3600.0)
    future = serve.submit(row(1.0))
    serve.close()
    with pytest.raises(BatchError, match="closed"):
        future.result(30.0)
    with pytest.raises(BatchError, match="closed"):
        serve.submit(row(1.0))


def test_a_function_that_loses_rows_is_an_error(batcher):
    serve = batcher(lambda x: {"y": x["x"][:-1]})
    with pytest.raises(BatchError, match="other than 1 rows of y"):
        serve(row(1.0), timeout_s=30.0)
