"""Replay against a model that keeps everything in Python lists."""

import errno
import os
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.storage.replays import (
    BUDGET,
    FRAME,
    SPECS,
    check_windows,
    contents,
    make_insert,
    open_replay,
    open_tables,
    simple,
)
from troupe.common.data.columns import Payload
from troupe.common.data.inserts import GapError, RefusedError
from troupe.common.data.schema import FieldSpec
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.services.replay.storage.producers import MAX_PRODUCERS

CHUNK = st.tuples(st.integers(1, 12), st.integers(1, 8), st.floats(0, 10))
OPERATION = st.one_of(
    st.tuples(st.just("insert"), CHUNK),
    st.tuples(st.just("insert"), CHUNK),
    st.tuples(st.just("sample"), st.integers(1, 16)),
    st.tuples(st.just("update"), st.floats(0, 100)),
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("repeat"), st.none()),
)


@given(operations=st.lists(OPERATION, max_size=40), capacity=st.integers(8, 60), small=st.booleans())
@settings(max_examples=60, deadline=None)
def test_agrees_with_a_model(tmp_path_factory, operations, capacity, small):
    folder = tmp_path_factory.mktemp("replay")
    budget = 4000 if small else BUDGET
    replay = open_replay(folder, capacity, budget)
    rng = np.random.default_rng(0)
    model: deque = deque()  # [first step, length, priority, id], oldest first
    start, sequence, last = 0, 0, None
    seen = set()
    for operation, value in operations:
        if operation == "insert":
            steps, wanted, priority = value
            count = min(wanted, steps)
            offsets = np.sort(rng.integers(0, steps, count))
            lengths = [int(rng.integers(1, steps - o + 1)) for o in offsets]
            priorities = priority * rng.random(count)
            sequence += 1
            last = (sequence, start, steps, offsets, lengths, priorities)
            assert replay.insert(make_insert(*last))
            for offset, length, p in zip(offsets, lengths, priorities, strict=True):
                model.append([start + int(offset), length, float(p)])
            start += steps
            while len(model) > capacity:
                model.popleft()
        elif operation == "repeat" and last is not None:
            assert not replay.insert(make_insert(*last))
        elif operation == "sample":
            sample = replay.sample({"default": value})
            if isinstance(sample, str):
                assert not any(p for _, _, p in model)
                continue
            check_windows(sample)
            alive = contents(replay)
            weights = {i: p**0.6 for i, (_, _, p) in alive.items()}
            total = sum(weights.values())
            for i, probability in zip(sample.ids.tolist(), sample.probabilities, strict=True):
                assert weights[i] > 0
                assert probability == pytest.approx(weights[i] / total, rel=1e-9)
        elif operation == "update":
            alive = contents(replay)
            if alive:
                chosen = rng.choice(list(alive), size=3).astype(np.uint64)
                values = value * rng.random(3)
                before = dict(alive)
                replay.update("default", chosen, values)
                for i, v in zip(chosen.tolist(), values, strict=True):
                    before[i] = (*before[i][:2], float(v))
                assert contents(replay) == before
                for item, i in zip(model, sorted(before), strict=True):
                    item[2] = before[i][2]
        elif operation == "reopen":
            replay.close()
            replay = open_replay(folder, capacity, budget)
        # Ids of a FIFO table ascend with age, so sorting them gives the model's order.
        alive = contents(replay)
        stored = [alive[i] for i in sorted(alive)]
        expected = [tuple(item) for item in model]
        missing = len(expected) - len(stored)
        assert stored == expected[missing:]
        assert small or not missing
        for _ in range(missing):  # the store was too small for them
            model.popleft()
        assert alive or replay.store is None or not replay.store.chunks
        assert max(alive, default=0) >= max(seen, default=0) or not set(alive) - seen
        seen |= set(alive)
    replay.close()


def test_ids_are_never_reused_and_stale_updates_are_counted(tmp_path):
    replay = open_replay(tmp_path, capacity=10)
    ids = set()
    for sequence in range(1, 40):
        replay.insert(simple(sequence, sequence * 4, 4))
        new = set(contents(replay))
        ids |= new
    assert len(ids) == 39 * 4
    gone = np.array(sorted(ids - set(contents(replay))), np.uint64)
    before = contents(replay)
    replay.update("default", gone, np.full(len(gone), 7.0))
    replay.update("default", np.array([2**63, 0], np.uint64), np.ones(2))
    assert contents(replay) == before
    assert replay.counters.unknown_priorities == len(gone) + 2


def test_ids_ascend_with_age_over_restarts(tmp_path):
    starts = []
    for sequence in range(1, 9):
        replay = open_replay(tmp_path)
        replay.insert(simple(sequence, sequence * 10, 4))
        alive = contents(replay)
        starts = [alive[i][0] for i in sorted(alive)]
        assert starts == sorted(starts)
        replay.close()
    assert len(starts) == 32


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 1e300])
def test_bad_priorities_are_refused(tmp_path, bad):
    replay = open_replay(tmp_path)
    with pytest.raises(RefusedError, match="bad_priority"):
        replay.insert(simple(1, 0, 3, priority=bad))
    replay.insert(simple(2, 0, 3))
    before = contents(replay)
    ids = np.array(sorted(before), np.uint64)
    replay.update("default", ids, np.array([bad, 5.0, bad]))
    assert replay.counters.invalid_priorities == 2
    assert [contents(replay)[i][2] for i in sorted(before)] == [1.0, 5.0, 1.0]


def test_zero_priorities_are_never_sampled(tmp_path):
    replay = open_replay(tmp_path)
    replay.insert(make_insert(1, 0, 4, range(4), [1] * 4, [0.0, 0.0, 3.0, 0.0]))
    sample = replay.sample({"default": 64})
    assert set(sample.arrays["action"][:, 0].tolist()) == {2}
    replay.update("default", sample.ids[:1], np.zeros(1))
    assert replay.sample({"default": 64}) == "every priority is zero"


def test_a_gap_is_told_and_a_refused_insert_leaves_none(tmp_path):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 2))
    insert = simple(3, 0, 2)
    insert.oldest = 1
    with pytest.raises(GapError) as error:
        replay.insert(insert)
    assert error.value.expected == 2
    with pytest.raises(RefusedError):
        replay.insert(make_insert(2, 0, 2, [0], [3], [1.0]))
    insert.oldest = 2
    assert replay.insert(insert)
    # A producer whose earlier inserts were acknowledged by somebody else may start anywhere.
    other = simple(700, 0, 2)
    other.incarnation = 55
    assert replay.insert(other)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda i: i.payloads.pop("raw"), "bad_chunk"),
        (lambda i: i.payloads.update(raw=Payload(np.zeros((3, 2), np.int32))), "bad_chunk"),
        (lambda i: i.payloads.update(raw=Payload(np.zeros((5, 3), np.int32))), "bad_chunk"),
        (lambda i: i.payloads.update(raw=Payload(np.zeros((5, 2), np.int64))), "bad_chunk"),
        (
            lambda i: i.payloads.update(obs=Payload(np.zeros(9, np.uint8), np.full(9, 1, np.uint32))),
            "bad_chunk",
        ),
        (lambda i: setattr(i, "specs", SPECS[:2]), "signature"),
        (lambda i: i.items.update(other=i.items["default"]), "no_table"),
        (lambda i: setattr(i.items["default"], "offsets", np.array([-1, 0, 0, 0], np.int32)), "bad_items"),
        (
            lambda i: setattr(i.items["default"], "lengths", np.array([2**31 - 1, 1, 1, 1], np.int32)),
            "bad_items",
        ),
        (lambda i: setattr(i.items["default"], "lengths", np.array([1], np.int32)), "bad_items"),
    ],
)
def test_wrong_inserts_are_refused_and_change_nothing(tmp_path, change, kind):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    before = contents(replay)
    insert = simple(2, 10, 4)
    change(insert)
    with pytest.raises(RefusedError) as error:
        replay.insert(insert)
    assert error.value.kind == kind
    assert contents(replay) == before
    assert replay.counters.refused == {kind: 1}
    assert replay.insert(simple(3, 10, 4))


def test_margins_may_be_split_in_another_way(tmp_path):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    other = (
        FieldSpec("action", "int64", ()),
        FieldSpec("obs", "uint8", FRAME, 5, 0, True),
        SPECS[1],
        SPECS[3],
    )
    assert replay.insert(make_insert(2, 4, 4, range(4), [1] * 4, [1.0] * 4, specs=other))


def test_a_chunk_larger_than_the_store_is_refused(tmp_path):
    replay = open_replay(tmp_path, budget=3000)
    replay.insert(simple(1, 0, 4))
    before = contents(replay)
    with pytest.raises(RefusedError, match="too_large"):
        replay.insert(simple(2, 0, 50))
    assert contents(replay) == before, "nothing leaves for what has no place even so"
    assert replay.insert(simple(3, 0, 4))


def test_other_capacity_and_second_process_are_refused(tmp_path):
    replay = open_replay(tmp_path, capacity=10)
    with pytest.raises(ConfigError, match="in use"):
        open_replay(tmp_path, capacity=10)
    replay.insert(simple(1, 0, 4))
    replay.close()
    with pytest.raises(ConfigError, match="capacities"):
        open_replay(tmp_path, capacity=11)
    (tmp_path / "signature.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        open_replay(tmp_path, capacity=10)


@pytest.mark.parametrize("at", ["columns", "table", "before commit", "after commit", "evicting"])
def test_death_in_the_middle_of_an_insert(tmp_path, monkeypatch, at):
    """What a process leaves that dies half-way is either all of a chunk or nothing of it."""
    capacity = 12
    replay = open_replay(tmp_path, capacity)
    for sequence in range(1, 5):
        replay.insert(simple(sequence, sequence * 10, 4))
    before = contents(replay)

    class DeathError(BaseException):
        pass

    def die(*_args, **_options):
        raise DeathError

    store, table = replay.store, replay.tables["default"]
    if at == "columns":
        monkeypatch.setattr(store.columns["action"], "write", die)
    elif at == "table":
        monkeypatch.setattr(table.sampler, "insert", die)
    elif at == "before commit":
        monkeypatch.setattr(store, "commit", die)
    elif at == "evicting":
        monkeypatch.setattr(store, "release", die)
    else:
        commit = store.commit

        def commit_and_die(*args, **options):
            commit(*args, **options)
            die()

        monkeypatch.setattr(store, "commit", commit_and_die)
    with pytest.raises(DeathError):
        replay.insert(simple(5, 50, 4))
    replay.close()
    replay = open_replay(tmp_path, capacity)
    after = contents(replay)
    new = {i: v for i, v in after.items() if i not in before}
    if at == "after commit":
        assert sorted(v[0] for v in new.values()) == [50, 51, 52, 53]
    else:
        assert not new
    assert all(after[i] == before[i] for i in after if i in before)
    # The producer was not answered, so it sends again, and it is there once.
    assert replay.insert(simple(5, 50, 4)) is (at != "after commit")
    assert sorted(v[0] for v in contents(replay).values())[-4:] == [50, 51, 52, 53]
    for sequence in range(6, 30):
        replay.insert(simple(sequence, sequence * 10, 4))
        check_windows(replay.sample({"default": 16}))
    assert len(contents(replay)) == capacity


def test_limits_survive_a_restart(tmp_path):
    options = {"min_items": 4, "samples_per_insert": 1.0, "samples_per_insert_error": 16}
    replay = open_replay(tmp_path, **options)
    for sequence in range(1, 4):
        replay.insert(simple(sequence, 0, 4))
    assert not isinstance(replay.sample({"default": 16}), str)
    assert "waits for inserts" in replay.sample({"default": 16})
    replay.close()
    replay = open_replay(tmp_path, **options)
    assert "waits for inserts" in replay.sample({"default": 16})
    replay.close()
    replay = open_replay(tmp_path, **{**options, "samples_per_insert": 2.0})
    assert not isinstance(replay.sample({"default": 16}), str)


def test_disk_use_follows_what_is_alive(tmp_path):
    replay = open_replay(tmp_path, capacity=2000, budget=1 << 30)
    for sequence in range(1, 2000):
        replay.insert(simple(sequence, sequence * 4, 4))
    used = sum(os.stat(file).st_blocks * 512 for file in tmp_path.iterdir())
    assert used < 3 * (replay.store.used_bytes + 2000 * 48 + MAX_PRODUCERS * 40) + 200_000


def test_a_full_disk_evicts_instead_of_growing(tmp_path, monkeypatch):
    replay = open_replay(tmp_path, capacity=1000)
    replay.insert(simple(1, 0, 4))
    room = replay.store.used_bytes + 20_000

    def fallocate(_descriptor, offset, length):
        if replay.store.used_bytes > room:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    for sequence in range(2, 400):
        assert replay.insert(simple(sequence, sequence * 4, 4))
        check_windows(replay.sample({"default": 8}))
    assert 50 < len(contents(replay)) < 1000
    assert replay.counters.evicted_early_items > 100


def test_a_folder_with_other_fields_than_those_wanted_is_refused(tmp_path):
    table = TableConfig(capacity=10)
    first = open_tables(tmp_path, table, specs=SPECS)
    first.insert(make_insert(1, 0, 3, [0], [1], [1.0]))
    first.close()
    open_tables(tmp_path, table, specs=SPECS).close()
    with pytest.raises(ConfigError, match="holds items with other fields"):
        open_tables(tmp_path, table, specs=SPECS[:1])
