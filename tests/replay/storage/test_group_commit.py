"""A sync that fails in whatever way is told, and never taken for one that went well."""

import itertools
import select
import threading

import numpy as np
import pytest

from troupe.common.data.pager import FilePager
from troupe.common.errors import SyncFailedError
from troupe.services.replay.storage.group_commit import GroupCommit


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), RuntimeError("can't start new thread")])
def test_a_sync_that_raises_is_told_of_at_once_and_acknowledges_nothing(error):
    def sync():
        raise error

    commit = GroupCommit(sync)
    try:
        number = commit.begin()
        assert select.select([commit], [], [], 60)[0], "nobody was told"
        with pytest.raises(SyncFailedError, match=r"Input/output error|new thread"):
            commit.check()
        assert commit.done < number
    finally:
        commit.close()


@pytest.mark.parametrize("line", range(1, 25))
def test_the_end_waits_for_a_sync_that_is_asked_for_at_any_line_of_the_one_before(line):
    reached, go_on, lines = threading.Event(), threading.Event(), itertools.count(1)

    def trace(frame, event, _):
        if frame.f_code is not GroupCommit._run.__code__:
            return None
        if event == "line" and next(lines) == line:
            reached.set()
            go_on.wait(60)
        return trace

    threading.settrace(trace)
    try:
        commit = GroupCommit(lambda: None)
    finally:
        threading.settrace(None)
    try:
        while not reached.wait(0.001):
            commit.begin()
        number = commit.begin()
        go_on.set()
        assert commit.finish() >= number
    finally:
        go_on.set()
        commit.close()


def test_a_file_that_cannot_be_forced_to_the_disk_fails_the_sync_whatever_the_error(tmp_path):
    pager = FilePager(tmp_path)
    file = pager.open("file", np.dtype("u8"), (4,))
    file.close()
    with pytest.raises(ValueError, match="closed file"):
        pager.sync()
