"""What was synced is there after a power cut, whatever else the disk has kept of what was written since."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import CHAOS
from tests.replay.storage.power import Disk
from tests.replay.storage.replays import check_everything, check_windows, first_steps, make_insert
from troupe.common.data.columns import Payload
from troupe.common.data.inserts import HeldError, Insert
from troupe.common.data.schema import FieldSpec, Items
from troupe.common.data.table_config import TableConfig
from troupe.services.replay.storage.replay import Replay

TABLES = (
    TableConfig(capacity=120),
    TableConfig("queue", capacity=60, sampler="fifo", limiter="queue", max_times_sampled=1),
)
BUDGET = 1 << 16
CUTS = 200 if CHAOS else 15
MANY_CUTS, ITEMS_BETWEEN = (200, 5000) if CHAOS else (5, 600)
STEPS = 100
NUMBERS = (FieldSpec("number", "int64", ()), FieldSpec("bytes", "uint8", (100,)))


class Shard:
    """A shard on a disk of its own, and what it has acknowledged."""

    def __init__(self, folder):
        self.folder, self.disk = folder, Disk()
        self.waiting, self.acknowledged = {}, {}
        self.taken = set()
        self.sequence = self.start = self.boots = 0
        self.open()

    def open(self):
        self.boots += 1
        self.replay = Replay(
            *(self.folder, TABLES),
            budget_bytes=BUDGET,
            seed=0,
            durable="power",
            boot=f"boot {self.boots}",
            pager=self.disk.pager,
        )

    def insert(self, steps, table):
        insert = make_insert(
            self.sequence + 1, self.start, steps, range(steps), [1] * steps, [1.0] * steps, table=table
        )
        try:
            self.replay.insert(insert)
        except HeldError:
            return
        self.sequence += 1
        self.waiting[self.sequence] = (table, range(self.start, self.start + steps))
        self.start += steps

    def sync(self):
        self.replay.sync()
        for number in self.waiting:
            self.replay.acknowledged(9, number)
        self.acknowledged |= self.waiting
        self.waiting = {}

    def sample(self, table, count):
        sample = self.replay.sample({table: count})
        if not isinstance(sample, str):
            check_windows(sample)
            if table == "queue":
                self.taken |= set(sample.arrays["action"][:, 0].tolist())
            else:
                self.replay.update(table, sample.ids, np.arange(count) + 0.5)

    def cut(self, choose, times=1):
        """Lose the power, start again, and look whether all is there; then send what was not acknowledged.

        More `times` before that has been forced to the disk.
        """
        for _ in range(times):
            self._lose_power(choose)
            resent = dict(self.waiting)
            self._send_again(resent)
            check_everything(self.replay)
        self.sync()
        self.check_all_of(resent)

    def _lose_power(self, choose):
        present = {table: set(first_steps(self.replay, table)) for table in self.replay.tables}
        self.replay.close()
        self.disk.cut(choose)
        self.open()
        for table in self.replay.tables:
            for _ in range(3):
                sample = self.replay.draw({table: min(8, max(self.replay.tables[table].size, 1))})
                if not isinstance(sample, str):
                    check_windows(sample)
        check_everything(self.replay)
        for table in self.replay.tables:
            now = set(first_steps(self.replay, table))
            steps = (steps for name, steps in self.acknowledged.values() if name == table)
            there = present[table] & set(itertools.chain(*steps))
            assert there <= now, f"acknowledged items of {table} are lost: {sorted(there - now)}"

    def _send_again(self, resent):
        """As its producer does."""
        for sequence, (table, steps) in resent.items():
            again = make_insert(
                sequence,
                steps[0],
                len(steps),
                range(len(steps)),
                [1] * len(steps),
                [1.0] * len(steps),
                table=table,
            )
            again.oldest = min(self.waiting)
            try:
                self.replay.insert(again)
            except HeldError:
                self.sequence = sequence - 1
                self.start = steps[0]
                self.waiting = {n: each for n, each in self.waiting.items() if n < sequence}
                break

    def check_all_of(self, sequences):
        """All items of these inserts, the newest that were acknowledged, are there, and each once."""
        for table in TABLES:
            sent = [self.acknowledged[n] for n in sequences if n in self.acknowledged]
            steps = [*itertools.chain(*(steps for name, steps in sent if name == table.name))]
            found = first_steps(self.replay, table.name)
            assert len(set(found)) == len(found), f"items of {table.name} are there twice"
            missing = set(steps[-table.capacity :]) - set(found)
            assert not missing, f"items of {table.name} that came again are lost: {sorted(missing)}"


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.integers(1, 12), st.sampled_from(["default", "queue"])),
        st.tuples(st.just("sample"), st.sampled_from(["default", "queue"]), st.integers(1, 8)),
        st.tuples(st.just("sync")),
        st.tuples(st.just("cut"), st.integers(1, 2)),
    ),
    max_size=40,
)


@given(actions=ACTIONS, data=st.data())
@settings(
    max_examples=CUTS,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
def test_acknowledged_items_survive_a_power_cut(actions, data, tmp_path_factory):
    shard = Shard(tmp_path_factory.mktemp("power"))
    try:
        for action, *arguments in [*actions, ("cut", 1)]:
            if action == "cut":
                seed = data.draw(st.integers(0, 2**32), label="which states the pages are left in")
                rng = np.random.default_rng(seed)
                shard.cut(lambda count: int(rng.integers(count)), *arguments)  # noqa: B023 (called at once)
            else:
                getattr(shard, action)(*arguments)
    finally:
        shard.replay.close()


def test_an_insert_whose_chunk_is_left_without_its_items_comes_again(tmp_path):
    shard = Shard(tmp_path)
    shard.insert(5, "default")
    shard.sync()
    for _ in range(2):  # the second time it is what the first cut left open
        shard.insert(5, "default")
        leave_all_but(shard, "default.items")
    shard.cut(lambda count: 0)
    assert len(first_steps(shard.replay, "default")) == 15
    shard.replay.close()


def test_an_insert_that_came_again_comes_once_more_if_only_the_note_of_it_was_left(tmp_path):
    shard = Shard(tmp_path)
    shard.insert(5, "default")
    shard.sync()
    shard.insert(5, "default")
    leave_all_but(shard, "default.items")
    assert shard.replay.insert(make_insert(2, 5, 5, range(5), [1] * 5, [1.0] * 5))
    leave_all_but(shard, *(name for name in shard.disk.files if name != "producers"))
    shard.cut(lambda count: 0)
    assert len(first_steps(shard.replay, "default")) == 10
    shard.replay.close()


def leave_all_but(shard, *names):
    """Lose the power where everything has reached the disk but what was written to these files."""
    for name in names:
        for states in shard.disk.files[name].states.values():
            del states[1:]
    shard.replay.close()
    shard.disk.cut(lambda count: count - 1)
    shard.open()


def test_what_is_left_of_an_insert_goes_when_it_comes_again_and_a_full_queue_drops_it(tmp_path):
    queue = TableConfig(
        "queue", capacity=8, sampler="fifo", limiter="queue", max_times_sampled=1, when_full="keep_oldest"
    )
    disk = Disk()

    def start(boot):
        return Replay(tmp_path, [queue], budget_bytes=BUDGET, durable="power", boot=boot, pager=disk.pager)

    def insert(sequence, first, count, incarnation):
        numbers = range(count), [1] * count, [1.0] * count
        return replay.insert(
            make_insert(sequence, first, count, *numbers, table="queue", incarnation=incarnation)
        )

    replay = start("one")
    assert insert(1, 0, 5, 9)  # nobody is told
    replay.close()
    disk.cut(lambda count: count - 1)  # and all of it has reached the disk
    replay = start("two")
    assert replay.sample({"queue": 3}).arrays["action"][:, 0].tolist() == [0, 1, 2]
    assert insert(1, 100, 6, 11)  # another producer, for whose items there is room beside the other two
    assert sorted(first_steps(replay, "queue")) == [3, 4, *range(100, 106)]
    assert insert(1, 0, 5, 9)  # taken, for it may not be whole; and dropped, for the queue is full
    assert sorted(first_steps(replay, "queue")) == [*range(100, 106)]
    assert replay.tables["queue"].dropped_items == 5
    assert replay.store.chunks == 1
    check_everything(replay)
    assert not insert(1, 0, 5, 9), "it is settled now"
    assert insert(2, 5, 2, 9)
    assert sorted(first_steps(replay, "queue")) == [5, 6, *range(100, 106)]
    replay.close()


def numbered(start):
    """Of each step its number, and a hundred bytes that follow from it."""
    numbers = np.arange(start, start + STEPS)
    return numbers, (numbers[:, None] * np.arange(1, 101) % 251).astype(np.uint8)


@pytest.mark.timeout(3600)
def test_many_items_and_many_power_cuts(tmp_path):
    """In `make chaos`: 200 power cuts, and a million items that were acknowledged."""
    rng, disk, boots = np.random.default_rng(0), Disk(), itertools.count()
    capacity = 2 * ITEMS_BETWEEN

    def start():
        return Replay(
            *(tmp_path, [TableConfig(capacity=capacity)]),
            budget_bytes=1 << 24,
            durable="power",
            boot=str(next(boots)),
            pager=disk.pager,
        )

    def present():
        """The numbers of all items in the table, whose contents are right."""
        table = replay.tables["default"]
        items = table.items(table.filled())
        rows, offsets, lengths = (items[name].astype(np.int64) for name in ("row", "offset", "length"))
        found = replay.store.gather(rows, offsets, lengths)
        numbers = found["number"][:, 0]
        assert np.array_equal(found["bytes"][:, 0], numbers[:, None] * np.arange(1, 101) % 251)
        assert len(np.unique(numbers)) == len(numbers)
        return numbers

    replay, sequence, waiting, acknowledged = start(), 0, [], []
    for _ in range(MANY_CUTS):
        for chunk in range(ITEMS_BETWEEN // STEPS + 3):
            sequence += 1
            numbers, data = numbered(sequence * STEPS)
            items = Items(np.arange(STEPS, dtype=np.int32), np.ones(STEPS, np.int32), np.ones(STEPS))
            payloads = {"number": Payload(numbers), "bytes": Payload(data)}
            oldest = min(waiting, default=sequence)
            insert = Insert(9, sequence, oldest, NUMBERS, payloads, STEPS, 1, {"default": items})
            assert replay.insert(insert)
            waiting.append(sequence)
            last = ITEMS_BETWEEN // STEPS - 1
            if chunk == last or (chunk < last and rng.random() < 0.3):  # the last three wait at the cut
                replay.sync()
                for number in waiting:
                    replay.acknowledged(9, number)
                acknowledged, waiting = acknowledged + waiting, []
        before = present()
        before = before[np.isin(before // STEPS, acknowledged)]
        assert len(before) >= ITEMS_BETWEEN
        replay.close()
        disk.cut(lambda count: int(rng.integers(count)))
        replay = start()
        lost = np.setdiff1d(before, present())
        assert not len(lost), f"{len(lost)} acknowledged items are lost"
        waiting = []  # their producer has gone as well
    replay.close()
    items_acknowledged = STEPS * len(acknowledged)
    assert items_acknowledged >= MANY_CUTS * ITEMS_BETWEEN
    print(f"{MANY_CUTS} power cuts, {items_acknowledged:,} items acknowledged, none lost")
