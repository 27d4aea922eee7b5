"""Replay as the tests open and fill it: every entry tells its number, so windows can be checked."""

import weakref

import numpy as np

from troupe.common.data.columns import Payload
from troupe.common.data.inserts import Insert
from troupe.common.data.packing import pack_entries, unpack_frame
from troupe.common.data.schema import FieldSpec, Items
from troupe.common.data.table_config import TableConfig, parse_table
from troupe.services.replay.storage.records import SAMPLED_UNIT
from troupe.services.replay.storage.replay import Replay

FRAME = (6, 5)
SPECS = (
    FieldSpec("obs", "uint8", FRAME, before=3, after=2, compress=True),
    FieldSpec("raw", "int32", (2,), before=1),
    FieldSpec("action", "int64", ()),
    FieldSpec("features", "float16", (3,)),
)
BUDGET = 1 << 24
OPENED: weakref.WeakSet[Replay] = weakref.WeakSet()
"""All that were opened, to be closed after the test."""


def open_tables(folder, *tables, budget=BUDGET, seed=0, **options):
    """Replay with tables, given as text or as `TableConfig`."""
    configs = [parse_table(table) if isinstance(table, str) else table for table in tables]
    replay = Replay(folder, configs, budget_bytes=budget, seed=seed, **options)
    OPENED.add(replay)
    return replay


def open_replay(folder, capacity=50, budget=BUDGET, **options):
    """Replay with one table."""
    return open_tables(folder, TableConfig(capacity=capacity, **options), budget=budget)


def entry(number):
    """The frame of one global entry number."""
    return ((number * 7 + np.arange(30)) % 256).astype(np.uint8).reshape(FRAME)


def features(numbers):
    """What a network might have seen in these steps."""
    return np.cos(np.outer(numbers, [1.0, 0.1, 0.01])).astype(np.float16)


def make_insert(
    sequence, start, steps, offsets, lengths, priorities, *, incarnation=9, table="default", specs=SPECS
):
    """A chunk whose entries tell their global number: step i of the chunk is number start + i."""
    obs = np.stack([entry(start + i) for i in range(-3, steps + 2)])
    raw = np.stack([np.full(2, start + i, np.int32) for i in range(-1, steps)])
    payloads = {
        "obs": Payload(*pack_entries(obs)),
        "raw": Payload(raw),
        "action": Payload(np.arange(start, start + steps, dtype=np.int64)),
        "features": Payload(features(np.arange(start, start + steps))),
    }
    items = Items(np.array(offsets, np.int32), np.array(lengths, np.int32), np.array(priorities, np.float64))
    return Insert(incarnation, sequence, sequence, specs, payloads, steps, 4, {table: items})


def simple(sequence, start, count, priority=1.0):
    return make_insert(sequence, start, count, range(count), [1] * count, [priority] * count)


def check_windows(sample):
    """Every window of the sample is what its first step says."""
    longest = int(sample.lengths.max())
    count = len(sample.ids)
    obs = unpack_frame(
        sample.arrays["obs"].data, (count, 3 + longest + 2, *FRAME), "uint8", entry_bytes=6 * 5
    )
    assert sample.arrays["raw"].shape == (count, 1 + longest, 2)
    steps = np.minimum(np.arange(longest), sample.lengths[:, None] - 1) + sample.arrays["action"][:, :1]
    assert np.array_equal(sample.arrays["features"], features(steps.ravel()).reshape(count, longest, 3))
    for row in range(count):
        start, length = int(sample.arrays["action"][row, 0]), int(sample.lengths[row])
        for field, before, after in (("obs", 3, 2), ("raw", 1, 0), ("action", 0, 0)):
            window = obs[row] if field == "obs" else sample.arrays[field][row]
            for i in range(before + longest + after):
                number = start - before + min(i, before + length + after - 1)
                expected = {"obs": entry(number), "raw": [number, number], "action": number}[field]
                assert np.array_equal(window[i], expected)


def contents(replay):
    """Id -> (first step, length, raw priority) of every item."""
    table = replay.tables["default"]
    slots = table.filled()
    items = table.items(slots)
    if not len(slots):
        return {}
    arrays = replay.store.gather(
        items["row"].astype(np.int64), items["offset"].astype(np.int64), items["length"].astype(np.int64)
    )
    starts = arrays["action"][:, 0]
    priorities = table.priorities(slots)
    return {
        int(i): (int(s), int(n), float(p))
        for i, s, n, p in zip(items["id"], starts, items["length"], priorities, strict=True)
    }


def first_steps(replay, name):
    """First step -> id of every item of a table, oldest first."""
    table = replay.tables[name]
    slots = table.filled()
    items = table.items(slots)
    if not len(slots):
        return {}
    arrays = replay.store.gather(
        items["row"].astype(np.int64), items["offset"].astype(np.int64), items["length"].astype(np.int64)
    )
    starts = arrays["action"][:, 0]
    return dict(sorted(zip(starts.tolist(), items["id"].tolist(), strict=True)))


def several(sequence, start, count, *tables, priority=1.0):
    """A chunk with one item per step for each of the tables."""
    insert = simple(sequence, start, count, priority)
    insert.items = dict.fromkeys(tables, insert.items["default"])
    return insert


def check_everything(replay):
    """References, sizes and windows agree."""
    if replay.store is None:
        return
    references = np.zeros_like(replay.store.references)
    for name, table in replay.tables.items():
        slots = table.filled()
        assert table.size == len(slots) <= table.config.slots
        items = table.items(slots)
        np.add.at(references, items["row"], 1)
        assert np.array_equal(replay.store.commits[items["row"]], items["commit"])
        if table.config.max_times_sampled:
            assert np.all(items["sampled"] // SAMPLED_UNIT < table.config.max_times_sampled)
        assert len(first_steps(replay, name)) == len(slots), "an item shows the data of another"
    live = np.flatnonzero(replay.store.commits)
    assert np.array_equal(np.flatnonzero(references), live), "a chunk without items, or items without one"
    assert np.array_equal(references, replay.store.references)
