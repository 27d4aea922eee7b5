"""What waits in a queue stays until it is given away, once, whatever needs room meanwhile."""

import contextlib
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.storage import replays
from tests.replay.storage.replays import BUDGET, check_everything, check_windows, first_steps, several, simple
from troupe.common.data.inserts import HeldError
from troupe.services.replay.storage import producers as producers_module

TABLES = ("default:capacity=400", "queue:limiter=queue,capacity=300")


def open_tables(folder, budget, *texts):
    return replays.open_tables(folder, *(texts or TABLES), budget=budget)


OPERATION = st.one_of(
    st.tuples(st.just("queue"), st.integers(1, 30)),
    st.tuples(st.just("queue"), st.integers(1, 8)),
    st.tuples(st.just("default"), st.integers(1, 30)),
    st.tuples(st.just("both"), st.integers(1, 8)),
    st.tuples(st.just("sample"), st.integers(1, 12)),
    st.tuples(st.just("reopen"), st.just(0)),
)


@given(operations=st.lists(OPERATION, min_size=20, max_size=120), budget=st.integers(6000, 30_000))
@settings(max_examples=60, deadline=None)
def test_an_acknowledged_item_of_a_queue_is_given_once_and_in_order(tmp_path_factory, operations, budget):
    folder = tmp_path_factory.mktemp("queued")
    replay = open_tables(folder, budget)
    waiting: deque[int] = deque()
    sequence = start = 0
    for operation, count in operations:
        if operation in ("queue", "default", "both"):
            names = ("default", "queue") if operation == "both" else (operation,)
            try:
                assert replay.insert(several(sequence + 1, start, count, *names))
            except HeldError:
                assert waiting, "only what waits in a queue is in the way"
                continue
            sequence += 1
            if operation != "default":
                waiting.extend(range(start, start + count))
            start += count
        elif operation == "sample" and len(waiting) >= count:
            sample = replay.sample({"queue": count})
            check_windows(sample)
            assert sample.arrays["action"][:, 0].tolist() == [waiting.popleft() for _ in range(count)]
        elif operation == "reopen":
            replay.close()
            replay = open_tables(folder, budget)
        assert list(first_steps(replay, "queue")) == list(waiting)
    replay.close()


def test_another_table_makes_room_for_itself(tmp_path):
    """What a queue holds is the oldest, and the other table goes on in the rest of the files."""
    replay = open_tables(tmp_path, 40_000)
    for sequence in range(1, 6):
        replay.insert(several(sequence, 4 * sequence, 4, "queue"))
    for sequence in range(6, 200):
        assert replay.insert(simple(sequence, 4 * sequence, 4))
        assert first_steps(replay, "default")[4 * sequence]
    assert list(first_steps(replay, "queue")) == list(range(4, 24))
    assert replay.counters.evicted_early_items > 100
    assert replay.store.used_bytes <= 40_000


def test_a_chunk_that_leaves_the_queue_is_the_oldest_again(tmp_path):
    replay = open_tables(tmp_path, 40_000)
    for sequence in range(1, 6):
        replay.insert(several(sequence, 4 * sequence, 4, "default", "queue"))
    sequence = 6
    while not replay.counters.evicted_early_items:
        replay.insert(simple(sequence, 4 * sequence, 4))
        sequence += 1
    assert set(range(4, 24)) <= set(first_steps(replay, "default")), "kept by the queue"
    replay.sample({"queue": 8})
    for more in range(sequence, sequence + 2):
        replay.insert(simple(more, 4 * more, 4))
    assert not set(range(4, 12)) & set(first_steps(replay, "default"))
    assert set(range(12, 24)) <= set(first_steps(replay, "default"))


def test_files_full_of_a_queue_hold_every_insert_and_say_so(tmp_path):
    replay = open_tables(tmp_path, 10_000)
    sequence = 0
    with contextlib.suppress(HeldError):
        while sequence < 1000:
            replay.insert(several(sequence + 1, 4 * sequence, 4, "queue"))
            sequence += 1
    assert 3 < sequence < 75, "the queue is not full"
    assert "full of items of queues" in replay.stuck
    insert = simple(sequence + 1, 0, 4)
    with pytest.raises(HeldError):
        replay.insert(insert)
    assert all("waits for samples" in reason for reason in replay.insert_blocked().values())
    assert set(replay.insert_blocked()) == {"default", "queue"}
    assert "inserts wait: the files are full" in replay.draw({"queue": 300})
    replay.sample({"queue": 8})
    assert replay.insert(insert)
    assert replay.insert_blocked() == {}


def test_what_was_taken_is_not_given_again_after_a_death(tmp_path):
    """The process dies when a batch has been sent, and before it is counted."""
    replay = open_tables(tmp_path, 1 << 20)
    replay.insert(several(1, 0, 6, "queue"))
    replay.take(replay.draw({"queue": 2}))
    replay.close()
    replay = open_tables(tmp_path, 1 << 20)
    assert list(first_steps(replay, "queue")) == [2, 3, 4, 5]
    undelivered = replay.draw({"queue": 2})
    replay.take(undelivered)
    replay.put_back(undelivered)
    assert replay.sample({"queue": 4}).arrays["action"][:, 0].tolist() == [2, 3, 4, 5]


def test_many_new_producers_do_not_make_replay_forget_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(producers_module, "MAX_PRODUCERS", 50)
    clock = [1e9]
    monkeypatch.setattr(producers_module.system, "time", lambda: clock[0])
    replay = open_tables(tmp_path, 1 << 20)

    def insert(incarnation, sequence=1):
        chunk = simple(sequence, 0, 1)
        chunk.incarnation = incarnation
        return replay.insert(chunk)

    def reopen():
        replay.close()
        return open_tables(tmp_path, 1 << 20)

    assert insert(7)
    for other in range(100, 149):
        assert insert(other)
    clock[0] += producers_module.FORGET_S / 2
    replay = reopen()
    for other in range(200, 300):
        with pytest.raises(HeldError):
            insert(other)
    assert not insert(7), "still known"
    assert insert(7, 2)
    clock[0] += producers_module.FORGET_S / 2 + 1
    replay = reopen()
    for other in range(200, 249):
        assert insert(other), "those that were silent for long make place"
    with pytest.raises(HeldError):
        insert(299)
    assert not insert(7, 2)
    # A clock that was put back keeps nobody out for longer.
    clock[0] -= 1e6
    replay = reopen()
    clock[0] += producers_module.FORGET_S + 1
    assert insert(299)
    assert np.count_nonzero(replay._producers.files()["producers"]["incarnation"]) == 50
    replay.close()


class Model:
    """A full queue that drops, as a list."""

    def __init__(self, when_full, capacity):
        self.items, self.dropped = [], 0
        self._when_full, self._capacity = when_full, capacity
        self._drops_what_comes = when_full == "keep_oldest"
        if when_full == "alternate":
            self._drops_what_comes = True

    def insert(self, items):
        excess = len(self.items) + len(items) - self._capacity
        if excess <= 0:
            self.items += items
            return
        if self._drops_what_comes:
            self.dropped += len(items)
        else:
            self.items = self.items[excess:] + items
            self.dropped += excess
        if self._when_full == "alternate":
            self._drops_what_comes = not self._drops_what_comes


@pytest.mark.parametrize("when_full", ["keep_latest", "keep_oldest", "alternate"])
def test_a_full_queue_drops_what_it_is_told_to_and_counts_it(tmp_path, when_full):
    tables = ("default:capacity=30", f"queue:limiter=queue,capacity=10,when_full={when_full}")
    replay, model, rng = (
        open_tables(tmp_path, BUDGET, *tables),
        Model(when_full, 10),
        np.random.default_rng(4),
    )
    sequence = start = 0
    for round_ in range(120):
        count, sequence = int(rng.integers(1, 5)), sequence + 1
        names = ("queue", "default") if rng.random() < 0.5 else ("queue",)
        assert replay.insert(several(sequence, start, count, *names)), (
            "it is acknowledged, whatever becomes of it"
        )
        model.insert(list(range(start, start + count)))
        if len(names) > 1:
            assert start + count - 1 in first_steps(replay, "default"), "the other table has it all the same"
        start += count
        assert list(first_steps(replay, "queue")) == model.items
        assert not replay.insert(several(sequence, start, count, *names)), "repeated, it is known"
        if rng.random() < 0.3:
            taken = min(int(rng.integers(1, 8)), len(model.items))
            sample = replay.sample({"queue": taken})
            check_windows(sample)
            assert sample.arrays["action"][:, 0].tolist() == model.items[:taken]
            model.items = model.items[taken:]
        if round_ == 60 and when_full != "alternate":  # whose turn it is is forgotten
            replay.close()
            replay = open_tables(tmp_path, BUDGET, *tables)
        assert replay.tables["queue"].dropped_items == model.dropped
        check_everything(replay)
    assert model.dropped > 50
    assert not replay.insert_blocked()
