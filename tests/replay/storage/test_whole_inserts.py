"""An insert that fails at any line is there or not, never in part: in memory, and in the files."""

import gc
import itertools
import resource
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import troupe.services.replay.storage
from tests.replay.storage.replays import make_insert, open_tables
from troupe.common import system
from troupe.common.data.schema import Items
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import TornStateError
from troupe.services.replay.storage import producers

TABLES = (
    TableConfig(capacity=12),
    TableConfig("best", capacity=9, sampler="min_heap", remover="lowest"),
    TableConfig(
        "any", capacity=10, sampler="uniform", samples_per_insert=2.0, samples_per_insert_error=400.0
    ),
    TableConfig("queue", capacity=200, sampler="fifo", limiter="queue", max_times_sampled=1),
)
STEPS = 4
STRIDE = 11
"""Of 640 to 1,300 lines those fail that are so far apart from each other; all of them would take minutes."""

FOLDER = str(Path(troupe.services.replay.storage.__file__).parent)
RECOVERY = "changes.py"


class FailingAt:
    """Raises MemoryError before the `n`-th line of replay's own code that is run inside of it.

    Attributes:
        failed: where, once it has.
    """

    def __init__(self, n):
        self._left = n
        self.failed = ""

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before)

    def _trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        if self.failed or not name.startswith(FOLDER) or name.endswith(RECOVERY):
            return None
        if event == "line":
            self._left -= 1
            if self._left < 0:
                self.failed = f"{Path(name).name}:{frame.f_lineno}"
                raise MemoryError
        return self._trace


def open_replay(folder, budget_bytes):
    return open_tables(folder, *TABLES, budget=budget_bytes)


def chunk(sequence, tables):
    insert = make_insert(
        sequence, 100 * sequence, STEPS, range(STEPS), [1] * STEPS, np.arange(1.0, STEPS + 1)
    )
    items = insert.items["default"]
    insert.items = {
        name: Items(items.offsets, items.lengths, items.priorities + i) for i, name in enumerate(tables)
    }
    return insert


def state(replay):
    """All that the tables hold and count, but where it stands."""
    found = {}
    for name, table in replay.tables.items():
        slots = table.filled()
        items = table.items(slots)
        assert len(np.unique(items["id"])) == len(items) == table.size
        assert table.sampler.total == pytest.approx(_total(table, slots))
        chunks = replay.store.live() if replay.store else []
        rows = {int(each["commit"]): int(each["sequence"]) for each in chunks}
        found[name] = (
            sorted(
                (rows[int(item["commit"])], int(item["offset"]), float(priority))
                for item, priority in zip(items, table.priorities(slots), strict=True)
            ),
            table.limiter.inserted,
            table.limiter.sampled,
        )
    return found


def _total(table, slots):
    if table.config.sampler != "prioritized":
        return table.size
    return np.sum(table.priorities(slots) ** table.config.priority_exponent)


def ids(replay):
    return {name: sorted(table.items(table.filled())["id"].tolist()) for name, table in replay.tables.items()}


def stored(replay):
    """The state, and what could betray a part of an insert besides."""
    store = replay.store
    space = (len(store.space), store.space.live_bytes, int(store.references.sum()), int(store.queued.sum()))
    return state(replay), ids(replay), space if store.chunks else (0, 0, 0, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # it may fail between opening and keeping
@pytest.mark.parametrize(
    ("before", "budget_bytes", "tables"),
    [
        pytest.param(0, 1 << 20, ("default", "any", "queue"), id="the first of all"),
        pytest.param(4, 1 << 20, ("default", "best", "any", "queue"), id="into full tables"),
        pytest.param(4, 2300, ("default", "best", "any"), id="with no room left in the files"),
    ],
)
def test_an_insert_that_fails_at_any_line_is_whole_or_absent(
    tmp_path, monkeypatch, before, budget_bytes, tables
):
    monkeypatch.setattr(system.random, "randrange", lambda limit: 0)  # the twins should draw the same ids
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 64)  # files that are copied hundreds of times
    replay = open_replay(tmp_path / "origin", budget_bytes)
    for sequence in range(1, before + 1):
        assert replay.insert(chunk(sequence, tables))
    replay.close()

    def twin(name):
        shutil.copytree(tmp_path / "origin", tmp_path / name)
        return open_replay(tmp_path / name, budget_bytes)

    wanted = chunk(before + 1, tables)
    untouched = twin("untouched")
    absent = stored(untouched) if untouched.store else None
    assert untouched.insert(chunk(before + 1, tables))
    whole = stored(untouched)
    if budget_bytes == 2300:
        assert untouched.counters.evicted_early_items, "the case should be one without room"
    outcomes = {"absent": 0, "whole": 0, "torn": 0}
    for n in itertools.count(0, STRIDE):
        folder = f"twin{n}"
        replay, wanted = twin(folder), chunk(before + 1, tables)
        failing = FailingAt(n)
        try:
            with failing:
                replay.insert(wanted)
        except MemoryError:
            outcome = "absent" if wanted.sequence > replay._producers.newest(wanted.incarnation) else "whole"
            if outcome == "absent" and replay.store and replay.counters.evicted_early_items == 0:
                assert (stored(replay) == absent) if absent else not replay.store.chunks, failing.failed
        except TornStateError:
            outcome = "torn"  # the process ends; the next one has the files
            replay.close()
            replay = open_replay(tmp_path / folder, budget_bytes)
            there = wanted.sequence in (replay.store.live()["sequence"] if replay.store else ())
            if absent and not there:
                for name, (items, inserted, sampled) in state(replay).items():
                    assert set(items) <= set(absent[0][name][0]), (failing.failed, name)
                    assert (inserted, sampled) == absent[0][name][1:], (failing.failed, name)
        else:
            assert not failing.failed
            break
        outcomes[outcome] += 1
        again = replay.insert(wanted)
        assert again or outcome != "absent", failing.failed
        if outcome == "torn":  # an id that was given once is not given again, so they may differ
            now = state(replay)
            for name, (items, _, _) in whole[0].items():
                assert now[name][0] == items, (failing.failed, name)
        else:
            assert stored(replay) == whole, failing.failed
        replay.close()
        shutil.rmtree(tmp_path / folder)
    gc.collect()  # here, where it is known what for, and not in a later test
    assert outcomes["absent"] > 10, outcomes
    assert outcomes["torn"] > 10, outcomes


def test_an_insert_that_memory_does_not_suffice_for_is_refused_before_anything_changes(tmp_path):
    """In a process of its own: in this one, other tests may have left freed memory that suffices."""
    child = get_context("spawn").Process(target=insert_without_memory, args=(tmp_path,))
    child.start()
    child.join(120)
    assert child.exitcode == 0


def insert_without_memory(tmp_path):
    table = TableConfig(capacity=1 << 20)
    replay = open_tables(tmp_path, table, budget=1 << 20)
    assert replay.insert(chunk(1, ["default"]))
    before = stored(replay)
    limit, most = resource.getrlimit(resource.RLIMIT_AS)
    in_use_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use_bytes + (1 << 25), most))
    try:
        with pytest.raises(MemoryError):
            replay.insert(chunk(2, ["default"]))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    assert stored(replay) == before
    assert replay.insert(chunk(2, ["default"]))
    replay.close()
