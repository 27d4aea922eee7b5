"""Elite and attentive replay: what is chosen, and that something always is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.replay.storage.chosen import appear, chi_square, make, vanish
from tests.replay.storage.replays import SPECS, features, open_tables, simple
from troupe.common.data.candidates import STRATEGIES
from troupe.common.data.columns import Payload
from troupe.common.data.distances import DISTANCES, distances, nearness
from troupe.common.data.inserts import RefusedError, check_insert
from troupe.common.data.packing import pack_entries
from troupe.common.data.schema import FieldSpec
from troupe.common.data.table_config import parse_table, shard_tables
from troupe.common.errors import ConfigError
from troupe.common.wire.codec import WireError
from troupe.common.wire.replay.codec import decode_batch, encode_batch
from troupe.services.replay.storage.samplers import REMOVERS

RNG = np.random.default_rng


def oracle(strategy, rows, count):
    """Rows (distance, times sampled), chosen as in the description of the original, without ties."""
    rows, size = sorted(rows), len(rows) // count
    groups = [rows[i * size : (i + 1) * size] for i in range(count)]
    return {
        "nearest": rows[:count],
        "spread": [group[0] for group in groups],
        "least_sampled": sorted(rows, key=lambda row: (row[1], row[0]))[:count],
        "spread_least_sampled": [min(group, key=lambda row: (row[1], row[0])) for group in groups],
    }[strategy]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    sampled=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    count=st.integers(1, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_strategies(strategy, sampled, count, seed):
    count = min(count, len(sampled))
    distance = RNG(seed).permutation(len(sampled)).astype(float)
    chosen = STRATEGIES[strategy](distance, np.array(sampled, np.int32), count)
    rows = list(zip(distance.tolist(), sampled, strict=True))
    assert sorted(rows[place] for place in chosen) == sorted(oracle(strategy, rows, count))


@pytest.mark.parametrize("kind", ["elite", "attentive"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    per_row=st.floats(1, 12),
    filled=st.integers(0, 60),
    count=st.integers(1, 80),
    different=st.integers(1, 60),
    seed=st.integers(0, 99),
)
@example(per_row=1.0, filled=60, count=60, different=1, seed=0)
@example(per_row=1.09, filled=60, count=10, different=60, seed=0)
@example(per_row=1.16, filled=9, count=10, different=2, seed=0)
@settings(max_examples=60, deadline=None)
def test_there_is_always_a_batch(kind, strategy, per_row, filled, count, different, seed):
    """As many as asked for, whatever lambda is, how full the table, and how many items are as far."""
    selector, items = make(kind, 60, candidates_max=per_row, strategy=strategy)
    rng = RNG(seed)
    appear(selector, items, np.arange(filled), rng.integers(1, different + 1, filled) / different)
    items["sampled"] = rng.integers(0, 3, 60)
    slots, probabilities = selector.select(count, rng)
    assert len(slots) == len(probabilities) == (count if filled else 0)
    assert len(set(slots.tolist())) == min(count, filled)
    assert (slots < filled).all()


@pytest.mark.parametrize("kind", ["elite", "attentive"])
def test_one_candidate_is_uniform_sampling(kind):
    selector, items = make(kind, 20, candidates_max=1.0)
    appear(selector, items, np.arange(20), np.linspace(0.1, 0.9, 20))
    rng, counts = RNG(0), np.zeros(20)
    for _ in range(2000):
        counts[selector.select(5, rng)[0]] += 1
    assert chi_square(counts, 500.0) < 19 + 5 * np.sqrt(38)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_as_far_is_a_matter_of_chance(strategy):
    selector, items = make("elite", 20, candidates_max=4.0, strategy=strategy)
    appear(selector, items, np.arange(20), np.ones(20))
    rng, counts = RNG(0), np.zeros(20)
    for _ in range(2000):
        counts[selector.select(5, rng)[0]] += 1
    assert chi_square(counts, 500.0) < 19 + 5 * np.sqrt(38)


def test_candidates_become_fewer():
    selector, _ = make("elite", candidates_max=5.0, candidates_anneal_samples=1000)
    seen = []
    for done in (0, 250, 999, 1000, 10**9):
        selector._table = replace(selector._table, samples=lambda done=done: done)
        seen.append(selector.per_row)
    assert seen == pytest.approx([5.0, 4.0, 1.004, 1.0, 1.0])
    assert make("elite", candidates_max=5.0)[0].per_row == 5.0


def test_elite_goes_by_how_far_items_are_by_now():
    """Measured far and long ago, measured near at the same age, near and new, and never measured."""
    selector, items = make("elite", 10, candidates_max=1000.0)
    for slot in range(4):
        appear(selector, items, [slot], [1.0])
    selector.update(np.array([0, 1]), nearness(np.array([8.0, 2.0])))  # at ages 4 and 3
    for slot in range(4, 8):
        appear(selector, items, [slot], [1.0])
    selector.update(np.array([6]), nearness(np.array([0.1])))  # at age 2
    # Rates 2, 2/3 and 0.05; the mean is that of the first two, and 0.01 of the way to the third.
    mean = 0.99 * (2 + 2 / 3) / 2 + 0.01 * 0.05
    want = np.array([2 * 8, 2 / 3 * 7, mean * 6, mean * 5, mean * 4, mean * 3, 0.05 * 2, mean * 1])
    np.testing.assert_allclose(selector._distances(np.arange(8)), want)
    for count in range(1, 9):
        chosen = selector.select(count, RNG(count))[0]
        assert set(chosen.tolist()) == set(np.argsort(want)[:count].tolist())
    removed, items = make("elite", 10, REMOVERS, removal_candidates=10)
    appear(removed, items, np.arange(8), np.ones(8))
    removed.update(np.arange(8), nearness(want))
    assert removed.distinct(3, RNG(0)).tolist() == np.argsort(want)[-3:].tolist()


def test_what_nobody_can_learn_from_is_infinitely_far():
    selector, items = make("elite", 10, candidates_max=1000.0)
    appear(selector, items, np.arange(3), np.ones(3))
    selector.update(np.array([0, 1]), np.array([0.0, 0.5]))
    for _ in range(10):
        assert 0 not in selector.select(2, RNG(0))[0]
    np.testing.assert_allclose(selector._distances(np.array([2])), 1.0)  # it has no part in the mean


def test_the_remover_looks_at_some():
    rng, counts = RNG(0), np.zeros(10)
    for _ in range(500):
        selector, items = make("elite", 10, REMOVERS, removal_candidates=2)
        appear(selector, items, np.arange(10), np.ones(10))
        selector.update(np.arange(10), nearness(np.arange(10.0)))
        counts[selector.distinct(1, rng)] += 1
    # The farther of two different ones: k of the 45 pairs have slot k as theirs.
    assert counts[0] == 0
    assert chi_square(counts[1:], 500 * np.arange(1, 10) / 45) < 8 + 5 * 4


@pytest.mark.parametrize("distance", DISTANCES)
def test_attentive_goes_by_the_newest_state(distance):
    selector, items = make("attentive", 12, candidates_max=1000.0, distance=distance, distance_power=3.0)
    data = RNG(7).normal(size=(12, 3, 2))  # as `make` has them
    for slot in (3, 7, 1, 9, 4, 0):
        appear(selector, items, [slot], [1.0])
    for newest in (0, 4):
        here = np.flatnonzero(items["commit"])
        far = distances(distance, data[here], np.broadcast_to(data[newest, -1], (len(here), 3, 2)), 3.0)
        for count in (1, 3, len(here)):
            assert set(selector.select(count, RNG(0))[0].tolist()) == set(
                here[np.argsort(far)[:count]].tolist()
            )
        vanish(selector, items, np.array([newest]))


def test_attentive_reads_the_features_of_the_store(tmp_path):
    replay = open_tables(tmp_path, "default:capacity=40,sampler=attentive,candidates_max=100")
    for sequence in range(1, 13):
        replay.insert(simple(sequence, sequence * 4, 4))
    steps = np.arange(12, 52)  # the last 40 items, of one step each; the newest is step 51
    seen = features(steps).astype(float)
    far = np.linalg.norm(seen - seen[-1], axis=1)
    sample = replay.sample({"default": 5})
    assert set(sample.arrays["action"][:, 0].tolist()) == set(steps[np.argsort(far)[:5]].tolist())


def test_attentive_refuses_what_has_no_features(tmp_path):
    replay = open_tables(tmp_path, "default:capacity=40,sampler=attentive")
    numbers = np.zeros((4, 3), np.int32)
    for instead in (
        {},
        {FieldSpec("features", "int32", (3,)): Payload(numbers)},
        {FieldSpec("features", "float32", ()): Payload(numbers[:, 0].astype("f4"))},
        {FieldSpec("features", "float32", (3, 1)): Payload(numbers[..., None].astype("f4"))},
        {FieldSpec("features", "float32", (3,), compress=True): Payload(*pack_entries(numbers.astype("f4")))},
    ):
        insert = simple(1, 0, 4)
        insert.specs = (*SPECS[:-1], *instead)
        del insert.payloads["features"]
        insert.payloads |= {spec.name: payload for spec, payload in instead.items()}
        with pytest.raises(RefusedError, match="is sampled by the field `features`"):
            check_insert(insert, None, {"default": replay.tables["default"].config})
        check_insert(insert, None, {"default": parse_table("default:capacity=40")})


def test_attentive_refuses_a_folder_that_has_no_features(tmp_path):
    replay = open_tables(tmp_path, "default:capacity=40")
    insert = simple(1, 0, 4)
    insert.specs = SPECS[:-1]
    del insert.payloads["features"]
    replay.insert(insert)
    replay.close()
    with pytest.raises(ConfigError, match=r"has none, take another sampler"):
        open_tables(tmp_path, "default:capacity=40,sampler=attentive")


def test_attentive_measures_few_at_a_time_where_they_are_large(monkeypatch):
    selector, items = make("attentive", 60, candidates_max=4.0)
    appear(selector, items, np.arange(60), np.ones(60))
    items["length"] = 3
    want = selector._distances(np.arange(60))
    features, seen = selector._table.features, []
    selector._table = replace(
        selector._table, features=lambda slots: (seen.append(len(slots)), features(slots))[1]
    )
    monkeypatch.setattr("troupe.services.replay.storage.elite.BLOCK_NUMBERS", 50)  # of 3 steps of 2 numbers
    np.testing.assert_array_equal(selector._distances(np.arange(60)), want)
    assert seen == [1, *[8] * 7, 4]


def test_an_absurd_priority_says_nothing_of_others():
    """Whoever has an actor's key chooses priorities; what is new stays as near as what was measured."""
    selector, items = make("elite", 10)
    appear(selector, items, [0], [1.0])
    selector.update(np.array([0]), nearness(np.array([2.0])))
    appear(selector, items, [1, 2], [5e-324, 1e-30])
    appear(selector, items, [3], [1.0])
    np.testing.assert_array_equal(selector._distances(np.arange(4)), [6.0, np.inf, np.inf, 2.0])


def test_priorities_that_come_back_choose_and_outlive_a_restart(tmp_path):
    table = "default:capacity=30,sampler=elite,remover=elite,candidates_max=100,removal_candidates=100"
    replay = open_tables(tmp_path, table)
    for sequence in range(1, 4):
        replay.insert(simple(sequence, sequence * 10, 10))
    sample = replay.sample({"default": 30})
    far = 1.0 + sample.arrays["action"][:, 0] % 10  # in each chunk
    replay.update("default", sample.ids, nearness(far))
    for again in range(2):
        steps = replay.sample({"default": 3}).arrays["action"][:, 0]
        assert sorted(steps.tolist()) == [10, 20, 30]
        if not again:
            replay.close()
            replay = open_tables(tmp_path, table)
    replay.insert(simple(4, 40, 2))  # the farthest make room
    left = replay.sample({"default": 30}).arrays["action"][:, 0].tolist()
    gone = set(range(10, 42)) - set(left)
    assert len(gone) == 2
    assert gone < {19, 29, 39}


@pytest.mark.parametrize("kind", ["elite", "attentive"])
def test_candidates_for_the_learner_are_drawn_as_by_the_original(kind):
    """Uniformly and with replacement; attentive adds the newest, to compare with; at lambda 1 only rows."""
    selector, items = make(kind, 20, candidates_max=4.5, candidates_anneal_samples=1000, scored_by="learner")
    for slot in range(20):
        appear(selector, items, [slot], [1.0])
    rng, counts, repeats = RNG(0), np.zeros(20), 0
    for _ in range(2000):
        slots, probabilities = selector.select(3, rng)
        assert len(slots) == len(probabilities) == 13 + (kind == "attentive")
        assert kind == "elite" or slots[-1] == 19
        counts += np.bincount(slots[:13], minlength=20)
        repeats += len(set(slots[:13].tolist())) < 13
    assert chi_square(counts, 1300.0) < 19 + 5 * np.sqrt(38)
    none_twice = np.prod(1 - np.arange(13) / 20)
    assert abs(repeats / 2000 - (1 - none_twice)) < 0.02
    selector._table = replace(selector._table, samples=lambda: 1000)
    assert len(selector.select(3, rng)[0]) == 3


def test_a_candidate_counts_as_sampled_once_it_is_chosen(tmp_path):
    table = (
        "default:capacity=40,sampler=elite,scored_by=learner,candidates_max=5,candidates_anneal_samples=20"
    )
    replay = open_tables(tmp_path, table)
    for sequence in range(1, 11):
        replay.insert(simple(sequence, sequence * 4, 4))
    sample = replay.sample({"default": 2})
    assert [(share.count, share.wanted) for share in sample.shares] == [(10, 2)]
    assert not sample.sampled.any()
    assert replay.tables["default"].limiter.sampled == 2
    ids = sample.ids[[0, 0, 1]]
    replay.update("default", ids, np.full(3, 0.5), chosen=True)
    replay.update("default", sample.ids[2:], np.full(8, 0.5))
    times = {}
    for _ in range(9):
        sample = replay.sample({"default": 2})
        times |= dict(zip(sample.ids.tolist(), sample.sampled.tolist(), strict=True))
    expected = {int(ids[0]): 2 + (ids[0] == ids[2]), int(ids[2]): 1 + 2 * (ids[0] == ids[2])}
    assert {each: count for each, count in times.items() if count} == expected
    assert replay.tables["default"].limiter.sampled == 20
    sample = replay.sample({"default": 2})  # lambda is 1
    assert [(share.count, share.wanted) for share in sample.shares] == [(2, None)]
    after = replay.sample({"default": 40})
    again = dict(zip(after.ids.tolist(), after.sampled.tolist(), strict=True))
    for each in set(sample.ids.tolist()) & again.keys():
        assert again[each] == expected.get(each, 0) + sample.ids.tolist().count(each)


def test_a_batch_is_as_it_was_asked_for_or_of_candidates(tmp_path):
    table = "default:capacity=40,sampler=elite,scored_by=learner,candidates_max=5"
    replay = open_tables(tmp_path, table)
    replay.insert(simple(1, 0, 8))
    sample = replay.sample({"default": 2})
    message = encode_batch(sample, replay.specs).message()
    batch = decode_batch(message, shares={"default": 2})
    assert batch.candidates == {"default"}
    assert batch.sampled.tolist() == [0] * 10
    part = batch.part(np.array([1, 4]), {})
    assert (part.rows(), part.candidates, part.ids.tolist()) == (
        {"default": slice(0, 2)},
        set(),
        batch.ids[[1, 4]].tolist(),
    )
    with pytest.raises(WireError, match="not the rows"):
        decode_batch(message, shares={"default": 11})
    with pytest.raises(WireError, match="not the tables"):
        decode_batch(message, shares={"other": 2})
    del message.arrays["sampled"]
    with pytest.raises(WireError, match="not the rows"):
        decode_batch(message, shares={"default": 2})


def test_what_cannot_be_is_refused():
    for text, match in (
        ("candidates_max=0.5", "from 1 to"),
        ("removal_candidates=0", "from 1 to"),
        ("distance_power=0.5", "from 1 to"),
        ("candidates_anneal_samples=-1", "from 0 to"),
        ("strategy=nearst", "nearest: nearest"),
        ("distance=cos", "nearest: cosine"),
        ("scored_by=lerner", "nearest: learner"),
        ("scored_by=learner,max_times_sampled=3", "has to be 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_table(f"default:sampler=elite,{text}")
    for text, match in (
        ("sampler=uniform,candidates_max=5", "sampler elite or attentive"),
        ("sampler=uniform,scored_by=learner", "sampler elite or attentive"),
        ("sampler=elite,distance=kl", "sampler attentive: take one of those instead of elite"),
        ("sampler=elite,removal_candidates=5", "remover elite: .* instead of fifo, or leave"),
    ):
        with pytest.raises(ConfigError, match=match):
            parse_table(f"default:{text}")
    assert parse_table("default:sampler=uniform,strategy=nearest").strategy == "nearest", (
        "as a run's file has it"
    )
    parts = shard_tables([parse_table("a:sampler=elite,capacity=10,candidates_anneal_samples=1000")], 3, 8)
    assert parts[0].candidates_anneal_samples == 334, "each shard gives its share of the samples"
