"""Several tables over the same chunks, items that go in any order, queues, and shares of a batch."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.storage.replays import (
    BUDGET,
    check_everything,
    check_windows,
    first_steps,
    make_insert,
    open_tables,
    several,
    simple,
)
from troupe.common.data import inserts
from troupe.common.data.candidates import STRATEGIES
from troupe.common.data.inserts import MAX_PRIORITY, HeldError, RefusedError
from troupe.common.data.schema import Items
from troupe.common.data.table_config import (
    MAX_EXPONENT,
    REMOVER_NAMES,
    SAMPLER_NAMES,
    STRATEGY_NAMES,
    TableConfig,
    parse_table,
)
from troupe.common.errors import ConfigError
from troupe.services.replay.storage.samplers import REMOVERS, SAMPLERS


def test_tables_share_chunks_without_copies(tmp_path):
    replay = open_tables(tmp_path, "a:capacity=100", "b:capacity=10,sampler=uniform", "c:capacity=30")
    for sequence in range(1, 41):
        replay.insert(several(sequence, sequence * 5, 5, "a", "b", "c"))
    assert [table.size for table in replay.tables.values()] == [100, 10, 30]
    assert replay.store.chunks == 20, "a chunk is there once, and as long as any table has an item of it"
    assert len(first_steps(replay, "b")) == 10
    assert max(first_steps(replay, "a")) == max(first_steps(replay, "b")) == 204
    for name in replay.tables:
        check_windows(replay.sample({name: 20}))
    # Priorities are each table's own.
    ids = np.array(list(first_steps(replay, "c").values()), np.uint64)
    replay.update("c", ids[1:], np.zeros(len(ids) - 1))
    assert len(set(replay.sample({"c": 50}).ids.tolist())) == 1
    assert len(set(replay.sample({"a": 50}).ids.tolist())) > 10
    replay.close()
    replay = open_tables(tmp_path, "a:capacity=100", "b:capacity=10,sampler=uniform", "c:capacity=30")
    assert [table.size for table in replay.tables.values()] == [100, 10, 30]
    assert replay.store.chunks == 20


SPECS_OF_TABLES = st.lists(
    st.tuples(
        st.sampled_from(list(SAMPLERS)),
        st.sampled_from(list(REMOVERS)),
        st.integers(0, 3),
        st.integers(8, 40),
    ),
    min_size=1,
    max_size=3,
)
OPERATION = st.one_of(
    st.tuples(st.just("insert"), st.integers(1, 12), st.integers(1, 7)),
    st.tuples(st.just("insert"), st.integers(1, 12), st.integers(1, 7)),
    st.tuples(st.just("sample"), st.integers(1, 8), st.integers(0, 2)),
    st.tuples(st.just("update"), st.integers(0, 100), st.integers(0, 2)),
    st.tuples(st.just("reopen"), st.just(0), st.just(0)),
)


@given(tables=SPECS_OF_TABLES, operations=st.lists(OPERATION, max_size=50), small=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_kind_of_table_keeps_its_items_whole(tmp_path_factory, tables, operations, small):
    """Whatever goes and whatever stays, every window that is left shows what was inserted."""
    folder = tmp_path_factory.mktemp("tables")
    configs = [
        TableConfig(f"t{i}", capacity, sampler, remover, max_times_sampled=times, soft_period_batches=3)
        for i, (sampler, remover, times, capacity) in enumerate(tables)
    ]
    names = [config.name for config in configs]
    budget = 6000 if small else BUDGET

    def reopen():
        return open_tables(folder, *configs, budget=budget, seed=1)

    replay = reopen()
    rng = np.random.default_rng(0)
    sequence, start = 0, 0
    for operation, a, b in operations:
        if operation == "insert":
            sequence += 1
            chosen = [name for i, name in enumerate(names) if b & (1 << i)] or names
            insert = make_insert(sequence, start, a, range(a), [1] * a, rng.random(a) + 0.01)
            every = insert.items["default"]
            parts = {}
            for name in chosen:
                count = min(int(rng.integers(1, a + 1)), 8)
                parts[name] = Items(every.offsets[:count], every.lengths[:count], every.priorities[:count])
            insert.items = parts
            assert replay.insert(insert)
            newest = first_steps(replay, chosen[0])
            assert set(range(start, start + len(parts[chosen[0]].offsets))) <= set(newest)
            start += a
        elif operation == "sample":
            name = names[b % len(names)]
            size = replay.tables[name].size
            sample = replay.sample({name: a})
            if isinstance(sample, str):
                assert size < a
                continue
            check_windows(sample)
            assert len(sample.ids) == a
            config = replay.tables[name].config
            ordered = replay.tables[name].sampler.ordered
            most = 1 if ordered else config.max_times_sampled or a
            assert max(np.unique(sample.ids, return_counts=True)[1]) <= most
        elif operation == "update":
            name = names[b % len(names)]
            ids = np.array(list(first_steps(replay, name).values()), np.uint64)
            replay.update(name, ids, a * rng.random(len(ids)))
        else:
            sizes = [table.size for table in replay.tables.values()]
            chunks = replay.store.chunks if replay.store else 0
            replay.close()
            replay = reopen()
            assert [table.size for table in replay.tables.values()] == sizes
            assert (replay.store.chunks if replay.store else 0) == chunks
        check_everything(replay)
    replay.close()


@pytest.mark.parametrize(
    ("remover", "left"),
    [
        ("fifo", {8, 9, 10, 11}),
        ("lifo", {0, 1, 2, 11}),
        ("lowest", {9, 10, 11, 8}),
    ],
)
def test_removers(tmp_path, remover, left):
    replay = open_tables(tmp_path, f"default:capacity=4,remover={remover}")
    for step in range(12):
        assert replay.insert(simple(step + 1, step, 1, priority=step + 1.0))
    assert set(first_steps(replay, "default")) == left
    assert replay.store.chunks == 4


def test_a_lowest_remover_keeps_the_best(tmp_path):
    replay = open_tables(tmp_path, "default:capacity=20,remover=lowest")
    rng = np.random.default_rng(0)
    priorities = rng.random(300)
    for step, priority in enumerate(priorities):
        replay.insert(simple(step + 1, step, 1, priority=priority))
    best = set(np.argsort(priorities[:-1])[-19:].tolist()) | {299}
    assert set(first_steps(replay, "default")) == best
    check_everything(replay)


def test_a_soft_limit_admits_everything_and_is_kept_every_so_often(tmp_path):
    replay = open_tables(tmp_path, "default:capacity=40,remover=soft,soft_period_batches=5")
    for sequence in range(1, 31):
        replay.insert(simple(sequence, sequence * 4, 4))
    table = replay.tables["default"]
    assert table.size == 120
    for _ in range(4):
        replay.sample({"default": 8})
    assert table.size == 120
    replay.sample({"default": 8})
    assert table.size == 40
    assert set(first_steps(replay, "default")) == set(range(84, 124)), "the oldest go"
    # Nobody samples: the room that there is is not exceeded, whatever comes.
    for sequence in range(31, 31 + table.config.slots // 4 + 20):
        replay.insert(simple(sequence, sequence * 4, 4))
        assert table.size <= table.config.slots
    check_everything(replay)


def test_soft_limit_in_mid_life_survives_a_restart(tmp_path):
    texts = ["default:capacity=40,remover=soft"]
    replay = open_tables(tmp_path, *texts)
    for sequence in range(1, 31):
        replay.insert(simple(sequence, sequence * 4, 4))
    replay.close()
    assert open_tables(tmp_path, *texts).tables["default"].size == 120


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("times", [1, 3])
def test_an_item_goes_after_so_many_samples(tmp_path, sampler, times):
    replay = open_tables(tmp_path, f"default:capacity=64,sampler={sampler},max_times_sampled={times}")
    for sequence in range(1, 9):
        replay.insert(simple(sequence, sequence * 8, 8, priority=float(sequence)))
    counts: dict[int, int] = {}
    while not isinstance(sample := replay.sample({"default": 4}), str):
        check_windows(sample)
        for number in sample.arrays["action"][:, 0].tolist():
            counts[number] = counts.get(number, 0) + 1
    assert max(counts.values()) == times
    if sampler in ("fifo", "lifo", "max_heap", "min_heap"):
        assert len(counts) == 64
        assert set(counts.values()) == {times}
        assert replay.store.chunks == 0
    else:  # what is left is too little for a batch
        assert 64 * times - sum(counts.values()) <= 3 * times
    check_everything(replay)


def test_a_queue_passes_everything_on_once_and_in_order(tmp_path):
    replay = open_tables(tmp_path, "default:limiter=queue,capacity=6")
    table = replay.tables["default"]
    sequence, seen = 1, []
    for _ in range(30):
        while True:
            try:
                assert replay.insert(simple(sequence, sequence * 2, 2))
            except HeldError:
                break
            sequence += 1
        assert table.size == 6
        assert "queue is full" in replay.insert_blocked()["default"]
        sample = replay.sample({"default": 4})
        check_windows(sample)
        seen += sample.arrays["action"][:, 0].tolist()
        assert not replay.insert_blocked()
        assert "batch size: 2 of 4" in replay.sample({"default": 4})
    assert seen == list(range(2, 2 + 120))
    assert not replay.insert(simple(1, 2, 2)), "what is gone has been stored all the same"
    with pytest.raises(RefusedError, match="batch_size"):
        replay.sample({"default": 7})


def test_a_queue_of_one(tmp_path):
    replay = open_tables(tmp_path, "default:limiter=queue,capacity=1")
    for sequence in range(1, 20):
        assert replay.insert(make_insert(sequence, sequence * 6, 6, [0], [6], [1.0]))
        with pytest.raises(HeldError):
            replay.insert(make_insert(sequence + 1, 0, 6, [0], [6], [1.0]))
        sample = replay.sample({"default": 1})
        assert sample.arrays["action"].tolist() == [list(range(sequence * 6, sequence * 6 + 6))]
        assert replay.store.chunks == 0
        assert replay.specs, "the fields stay what they are when nothing is left"


def test_a_held_insert_changes_nothing_and_a_queue_survives_a_restart(tmp_path):
    texts = ["default:capacity=50", "queue:limiter=queue,capacity=3"]
    replay = open_tables(tmp_path, *texts)
    replay.insert(several(1, 0, 3, "default", "queue"))
    with pytest.raises(HeldError):
        replay.insert(several(2, 3, 1, "default", "queue"))
    assert replay.tables["default"].size == 3
    assert set(replay.sample({"queue": 1}).arrays["action"][:, 0]) == {0}
    replay.close()
    replay = open_tables(tmp_path, *texts)
    assert replay.tables["queue"].size == 2
    assert replay.insert(several(2, 3, 1, "default", "queue"))
    assert replay.sample({"queue": 3}).arrays["action"][:, 0].tolist() == [1, 2, 3]
    assert replay.tables["default"].size == 4


def test_an_insert_that_waits_is_unpacked_once(tmp_path, monkeypatch):
    unpacked = []
    check = inserts.check_blocks
    monkeypatch.setattr(inserts, "check_blocks", lambda *args: unpacked.append(check(*args)))
    replay = open_tables(tmp_path, "default:limiter=queue,capacity=4")
    replay.insert(simple(1, 0, 4))
    waiting = simple(2, 10, 4)
    for _ in range(5):
        with pytest.raises(HeldError):
            replay.insert(waiting)
    assert len(unpacked) == 2
    replay.sample({"default": 4})
    assert replay.insert(waiting)
    assert len(unpacked) == 2


def test_a_queue_too_small_for_batch_and_chunk_says_so(tmp_path):
    replay = open_tables(tmp_path, "default:limiter=queue,capacity=10")
    replay.insert(simple(1, 0, 7))
    assert replay.sample({"default": 8}) == "batch size: 7 of 8 items"
    with pytest.raises(HeldError):
        replay.insert(simple(2, 10, 7))
    reason = "batch size: 7 of 8 items, and 7 more do not fit in a queue of 10"
    assert replay.sample({"default": 8}) == reason
    replay.sample({"default": 7})
    assert replay.sample({"default": 8}) == "batch size: 0 of 8 items"
    assert replay.insert(simple(2, 10, 7))


def test_shares_are_exact_and_in_order(tmp_path):
    replay = open_tables(
        tmp_path, "default:capacity=50", "elite:capacity=5,remover=lowest", "late:min_items=40"
    )
    for sequence in range(1, 11):
        replay.insert(several(sequence, sequence * 3, 3, "default", "elite", priority=sequence))
    assert "min size" in replay.sample({"default": 4, "late": 2})
    assert replay.tables["default"].limiter.sampled == 0, "all or nothing"
    for shares in ({"default": 12, "elite": 4}, {"elite": 1, "default": 31}):
        sample = replay.sample(shares)
        check_windows(sample)
        assert [(share.table, share.count) for share in sample.shares] == list(shares.items())
        at = 0
        for share in sample.shares:
            table = replay.tables[share.table]
            assert (share.table_items, share.total_priority) == (table.size, table.sampler.total)
            ids = sample.ids[at : at + share.count]
            assert set(ids.tolist()) <= set(first_steps(replay, share.table).values())
            weights = table.priorities(((ids - 1) % table.config.slots).astype(np.int64)) ** 0.6
            assert np.allclose(sample.probabilities[at : at + share.count], weights / table.sampler.total)
            at += share.count
    assert replay.tables["default"].limiter.sampled == 43
    assert replay.tables["elite"].limiter.sampled == 5
    with pytest.raises(RefusedError, match="no_table"):
        replay.sample({"default": 4, "other": 2})


def test_living_chunks_are_kept_when_others_go(tmp_path):
    """One item in ten has a priority: they stay in place for good while the rest comes and goes."""
    replay = open_tables(tmp_path, "default:capacity=300,remover=lowest", budget=200_000)
    for sequence in range(1, 3000):
        priority = 100.0 if sequence % 50 == 0 and sequence <= 1500 else 1.0
        replay.insert(simple(sequence, sequence * 5, 5, priority=priority))
    steps = set(first_steps(replay, "default"))
    for sequence in range(50, 1501, 50):
        assert set(range(sequence * 5, sequence * 5 + 5)) <= steps
    assert replay.counters.evicted_early_items == 0
    check_everything(replay)
    check_windows(replay.sample({"default": 100}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a:sampler=priority", "prioritized"),
        ("a:remover=best", "lowest"),
        ("a:limiter=strict", "rate, queue"),
        ("a:capasity=4", "nearest: capacity"),
        ("a:capacity=many", "number"),
        ("a:capacity=5,min_items=6", "min_items"),
        ("a:limiter=queue,max_times_sampled=0", "max_times_sampled"),
        ("a:limiter=queue,samples_per_insert=2", "samples_per_insert"),
        ("a b:capacity=5", "a name is"),
        ("../a:capacity=5", "a name is"),
        # Its files would be those of the chunks.
        ("chunks:capacity=5", "own files"),
        # Weights would be infinite, or zero, and what has none is never removed.
        ("a:priority_exponent=12", "priority_exponent"),
        ("a:priority_exponent=nan", "priority_exponent"),
        ("a:remover=prioritized,removal_exponent=0", "removal_exponent"),
        ("a:remover=prioritized,removal_exponent=-11", "removal_exponent"),
        ("a:samples_per_insert=nan", "samples_per_insert"),
        ("a:samples_per_insert=2,samples_per_insert_error=inf", "samples_per_insert"),
    ],
)
def test_wrong_tables_are_named(text, error):
    with pytest.raises(ConfigError, match=error):
        parse_table(text)


@pytest.mark.parametrize("priority", [0.0, MAX_PRIORITY])
def test_the_steepest_exponents_remove_and_sample_every_priority(tmp_path, priority):
    text = (
        f"a:capacity=10,remover=prioritized,removal_exponent=-{MAX_EXPONENT},priority_exponent={MAX_EXPONENT}"
    )
    replay = open_tables(tmp_path, text)
    for sequence in range(1, 9):
        replay.insert(several(sequence, sequence * 10, 4, "a", priority=priority))
    assert replay.tables["a"].size == len(replay.tables["a"].filled()) == 10
    sample = replay.sample({"a": 4})
    assert sample == "every priority is zero" if not priority else sample.probabilities.tolist() == [0.1] * 4


def test_tables_as_text():
    assert parse_table("rollouts:limiter=queue,capacity=7") == TableConfig(
        "rollouts", 7, "fifo", "fifo", "queue", max_times_sampled=1
    )
    assert parse_table("a").limiter_error() == 4096
    assert parse_table("a:samples_per_insert=2,samples_per_insert_error=9,min_items=3") == TableConfig(
        "a", min_items=3, samples_per_insert=2.0, samples_per_insert_error=9.0
    )


def test_two_tables_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="another name"):
        open_tables(tmp_path, "a:capacity=3", "a:capacity=4")


def test_what_could_never_fit_is_refused_at_the_first_insert(tmp_path):
    def first(folder, capacity, *, must_fit=True):
        table = TableConfig(capacity=capacity)
        replay = open_tables(tmp_path / folder, table, budget=1 << 20, must_fit=must_fit)
        with contextlib.closing(replay):
            return replay.insert(simple(1, 0, 4))

    # Four items of 96 bytes together that are not compressed.
    assert first("a", (1 << 20) * 4 // 96)
    with pytest.raises(RefusedError, match="lower the capacity") as error:
        first("b", (1 << 20) * 4 // 96 + 1)
    assert error.value.kind == "plan"
    assert "signature.json" not in {path.name for path in (tmp_path / "b").iterdir()}
    assert first("c", 10**6, must_fit=False), "the oldest leave early, as was asked for"


def test_what_a_table_may_name_is_what_there_is():
    assert tuple(SAMPLERS) == SAMPLER_NAMES
    assert tuple(REMOVERS) == REMOVER_NAMES
    assert tuple(STRATEGIES) == STRATEGY_NAMES
