"""Tests that start services or threads get a second try; the summary names each that needed it, and why."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness import Context
from tests.replay.storage import replays

SECOND_TRY = {
    *("actor", "cli", "evaluator", "examples", "troupe"),
    *("fuzz", "learner", "launcher", "replay", "wire"),
}
"""Folders whose tests depend on what else the machine does. Arithmetic is right the first time."""


def pytest_configure():
    # In the background of a script, or under nohup, both are ignored, which every service would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items):
    # One that ran into its limit is not tried again: pytest-timeout sets no second one.
    mark = pytest.mark.flaky(reruns=1, rerun_except="from pytest-timeout")
    folders = [Path(__file__).parent / name for name in SECOND_TRY]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker(mark)


@pytest.fixture
def context():
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(autouse=True)
def _closed_replays():
    """What a test has opened is closed after it."""
    yield
    for replay in list(replays.OPENED):
        replay.close()


@pytest.fixture
def disk(tmp_path):
    """A folder with a small disk of its own, see `harness.leave`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={12 << 20}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except OSError as error:
        pytest.skip(f"no small disk: {error}")
    if mounted.returncode:
        pytest.skip(f"no small disk: {mounted.stderr.strip() or 'mount failed'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)
