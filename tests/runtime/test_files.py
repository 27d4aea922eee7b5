"""Directories that are made whole or not at all."""

import fcntl
import os
from contextlib import ExitStack

import pytest

from troupe.common.runtime.files import is_locked, lock_file, made_whole, write_output


def test_an_output_goes_through_a_link_and_into_a_pipe(tmp_path):
    """`/dev/stdout` is both, and in a container anybody may replace it."""
    link, pipe, target = tmp_path / "link", tmp_path / "pipe", tmp_path / "elsewhere" / "report.csv"
    target.parent.mkdir()
    link.symlink_to(target)
    for data in (b"new", b"newer"):
        write_output(link, data)
        assert (link.is_symlink(), target.read_bytes()) == (True, data)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    write_output(pipe, b"data")
    assert (os.read(reader, 100), pipe.is_fifo()) == (b"data", True)
    os.close(reader)


def test_a_directory_that_fails_leaves_nothing(tmp_path):
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(ValueError, match="no"))
        stack.enter_context(made_whole(tmp_path / "a", ".part")).joinpath("x").touch()
        int("no")
    assert not list(tmp_path.iterdir())


def test_of_two_that_make_one_directory_neither_takes_what_the_other_has_half_made(tmp_path):
    for first_ends_first in (True, False):
        whole = tmp_path / str(first_ends_first)
        first, second = ExitStack(), ExitStack()
        first.enter_context(made_whole(whole, ".part")).joinpath("first").touch()
        place = second.enter_context(made_whole(whole, ".part"))
        if first_ends_first:
            with pytest.raises(OSError, match="another process"):
                first.close()
            assert not whole.exists()
        (place / "second").touch()
        second.close()
        if not first_ends_first:
            with pytest.raises(OSError, match="another process"):
                first.close()
        assert [path.name for path in whole.iterdir()] == ["second"]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_lock_is_of_the_file_that_is_there(tmp_path, monkeypatch):
    """Who removes its lock file before it lets go leaves the next one with a file that nobody finds."""
    path = tmp_path / "lock"
    first = lock_file(path, "held")

    def gone(seconds):
        path.unlink(missing_ok=True)
        first.close()

    monkeypatch.setattr("troupe.common.system.sleep", gone)
    with lock_file(path, "held", wait_s=60):
        assert is_locked(path)

    kept, flock = lock_file(path, "held"), fcntl.flock

    def removed(file, kind):
        """It goes between the opening and the lock."""
        monkeypatch.setattr("fcntl.flock", flock)
        path.unlink()
        kept.close()
        flock(file, kind)

    monkeypatch.setattr("fcntl.flock", removed)
    with lock_file(path, "held", wait_s=60):
        assert is_locked(path)
