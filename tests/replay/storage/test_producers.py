"""INSERTED is said of what is stored, and of nothing else."""

import contextlib
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.replay.storage.replays import contents, open_replay, simple
from troupe.common import system
from troupe.common.data.inserts import GapError, RefusedError
from troupe.common.data.pager import FilePager
from troupe.services.replay.storage import producers as module
from troupe.services.replay.storage.producers import Producers

STEPS = st.lists(
    st.tuples(st.sampled_from(["stored", "refused", "left out", "reopened"]), st.integers(1, 100)),
    max_size=60,
)


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_no_number_is_called_stored_that_is_not_and_no_recent_one_the_contrary(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("producers")
    pager = FilePager(folder)
    producers, newest, since = Producers(pager), 0, 0
    stored: dict[int, bool] = {}
    for what, count in steps:
        if what == "reopened":
            pager.close()
            pager = FilePager(folder)
            producers = Producers(pager)
        elif what == "left out":
            newest += count
            since = newest
        else:
            for _ in range(count if what == "stored" else 1):
                newest += 1
                stored[newest] = what == "stored"
                producers.admit(7)
                producers.settle(7, newest, stored=what == "stored")
    settled = producers.newest(7)
    assert settled == max(stored, default=0)
    for number in range(1, settled + 1):
        if producers.is_stored(7, number):
            assert stored.get(number)
        elif stored.get(number):
            assert number <= max(since, settled - 64), "an insert that may not have been acknowledged yet"
    pager.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_a_refused_insert_is_never_called_stored(tmp_path, reopened):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    with pytest.raises(RefusedError, match="bad_priority"):
        replay.insert(simple(2, 10, 4, priority=np.nan))
    replay.insert(simple(3, 20, 4))
    if reopened:
        replay.close()
        replay = open_replay(tmp_path)
    before = contents(replay)
    with pytest.raises(RefusedError, match="not_stored"):
        replay.insert(simple(2, 10, 4))
    assert replay.insert(simple(1, 0, 4)) is False
    assert replay.insert(simple(3, 20, 4)) is False
    assert contents(replay) == before


def test_a_number_that_was_left_out_is_not_called_stored(tmp_path):
    replay = open_replay(tmp_path)
    replay.insert(simple(1, 0, 4))
    late = simple(3, 20, 4)
    replay.insert(late)  # its `oldest` is 3: whoever sends it does not wait for 2
    with pytest.raises(RefusedError, match="not_stored"):
        replay.insert(simple(2, 10, 4))
    early = simple(5, 30, 4)
    early.oldest = 1
    with pytest.raises(GapError):
        replay.insert(early)
    assert replay.insert(late) is False


def test_the_number_0_is_none(tmp_path):
    replay = open_replay(tmp_path)
    with pytest.raises(RefusedError, match="not_stored"):
        replay.insert(simple(0, 0, 4))


@pytest.fixture
def pager(tmp_path):
    with contextlib.closing(FilePager(tmp_path)) as pager:
        yield pager


def test_one_owner_takes_a_share_of_the_places(pager, monkeypatch):
    monkeypatch.setattr(module, "MAX_SHARE", 3)
    producers = Producers(pager)
    for incarnation in (1, 2, 3):
        producers.admit(incarnation, "greedy")
    with pytest.raises(RefusedError, match="3 processes of one key or connection"):
        producers.admit(4, "greedy")
    producers.admit(2, "greedy")
    producers.admit(5, "honest")
    producers.settle(1, 9, stored=True)
    producers._rows["time_s"][producers._places[1]] -= module.FORGET_S + 1
    producers.admit(4, "greedy")
    assert [producers.newest(each) for each in (1, 4)] == [0, 0]
    with pytest.raises(RefusedError):
        producers.admit(6, "greedy")


def test_a_clock_that_was_put_back_keeps_nobody_for_ever(pager, monkeypatch):
    monkeypatch.setattr(module, "MAX_SHARE", 3)
    producers = Producers(pager)
    for incarnation in (1, 2, 3):
        producers.admit(incarnation, "one key")
    now_s = time.time() - 1e8  # by years
    monkeypatch.setattr(system, "time", lambda: now_s)
    with pytest.raises(RefusedError, match="3 processes"):
        producers.admit(4, "one key")
    now_s += module.FORGET_S + 1
    producers.admit(4, "one key")
