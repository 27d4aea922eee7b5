"""Directories that are made whole or not at all."""

from contextlib import ExitStack

import pytest

from troupe.common.runtime.files import made_whole


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
