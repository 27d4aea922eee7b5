"""Fixtures of every test."""

import gc
import signal
import subprocess

import pytest

from tests.harness import Context
from tests.replay.storage import replays


def pytest_configure():
    # In the background of a script, or under nohup, both are ignored, which every service would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without a look for garbage among what all modules leave, now or later: a quarter of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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
