"""The launcher knows an error of a service again by its line; what that says: runtime/test_lifecycle.py."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from troupe.common.errors import defect_line, sameness


def line_of(call):
    try:
        call()
    except Exception as error:
        return defect_line(error)
    raise AssertionError("it did not fail")


def fails(text):
    raise KeyError(text)


def fails_elsewhere(text):
    raise KeyError(text)


def test_one_error_is_known_again_whatever_it_says():
    line, *same = [line_of(functools.partial(fails, text)) for text in ("x", "a: (b) (my.py:7)", "")]
    others = [line_of(functools.partial(fails_elsewhere, "x")), line_of(functools.partial(divmod, 1, 0))]
    others += [f"internal error, ValueError: {value}" for value in (1, 2)]  # of no line of a user's own
    assert {sameness(each) for each in same} == {sameness(line)}
    assert len({sameness(each) for each in [line, *others]}) == 5


@pytest.mark.parametrize("package", ["zmq", "pydantic"])
def test_a_file_of_the_user_s_that_hides_a_package_is_named(tmp_path, package):
    """Python does as it is told by PYTHONPATH, whose packages may be meant: the error says what to do."""
    (tmp_path / f"{package}.py").touch()
    path = f"{Path(__file__).parents[1]}:{tmp_path}"
    run = subprocess.run(
        [sys.executable, "-P", "-m", "troupe.services.actor", "--control", "tcp://127.0.0.1:1"],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 1
    line = run.stderr.splitlines()[-1]
    assert line.startswith("troupe: error: internal error, ")
    assert line.endswith(f"; {tmp_path / package}.py hides the package {package}: rename it")


def test_an_import_that_fails_otherwise_ends_with_a_line_too_but_not_in_another_s_program(tmp_path):
    (tmp_path / "zmq.py").write_text("raise ValueError('mine')")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import troupe")
    (tmp_path / "mine" / "train.py").write_text("import zmq")
    path = f"{Path(__file__).parents[1]}:{tmp_path}"

    def last_line(module):
        words = [sys.executable, "-P", "-m", module]
        run = subprocess.run(
            words, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path}
        )
        return run.stderr.splitlines()[-1]

    assert last_line("troupe.services.actor") == "troupe: error: ValueError: mine (zmq.py:1)"
    assert last_line("mine.train") == "ValueError: mine"


def test_so_it_is_where_only_a_name_is_missed(monkeypatch):
    mine = ModuleType("psutil")
    monkeypatch.setitem(sys.modules, "psutil", mine)
    assert "hides" not in line_of(lambda: mine.virtual_memory)
    mine.__file__ = "/home/me/psutil.py"
    assert "; /home/me/psutil.py hides the package psutil: rename it (" in line_of(
        lambda: mine.virtual_memory
    )


def test_a_package_that_python_has_found_through_a_link_hides_nothing(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(Path(psutil.__file__).parents[1])
    monkeypatch.setattr(psutil, "__file__", str(tmp_path / "link" / "psutil" / "__init__.py"))
    assert "hides" not in line_of(lambda: psutil.nothing)
