"""Connections are open files: the limit of those, and waits in a process that has more than 1,024."""

import os
import resource
import subprocess
import sys
import textwrap
import threading

import pytest

from troupe.common.polling import readable
from troupe.common.runtime import StopSignal, open_files
from troupe.common.wire.sockets import Waker

MANY = 1100
"""Above what `select` takes."""


@pytest.fixture
def many_files():
    """A process with so many open files that the next has a number above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * MANY:
        pytest.skip(f"needs a hard limit of {2 * MANY} open files")
    open_files.raise_limit()
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY)]
    assert max(held) > 1023
    yield
    for each in held:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_a_process(code: str) -> list[str]:
    return subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True).splitlines()


def test_a_service_raises_the_soft_limit_to_the_hard_one(tmp_path):
    raised, started = in_a_process(f"""
        import argparse, resource
        from troupe.common.runtime import open_files, startup
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = open_files.MAX_OPEN_FILES if hard < 0 else min(hard, open_files.MAX_OPEN_FILES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        print(open_files.raise_limit() == wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
        arguments = {{"log_file": {str(tmp_path / "log")!r}, "log_level": "info", "metrics_port": 0}}
        startup.begin("learner", argparse.Namespace(**arguments))
        print(open_files.limit() == wanted)
    """)
    assert (raised, started) == ("True", "True")


def test_a_limit_that_is_too_low_for_the_members_is_one_line():
    enough, few = in_a_process("""
        import resource
        from troupe.common.runtime import open_files
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        print(repr(open_files.too_few_for(256)))
        print(open_files.too_few_for(512))
    """)
    assert enough == "''"
    assert few.startswith("this process may have 1,024 files open, and 512 members take up to 1,792: raise")
    assert "ulimit -Hn 1792" in few


def test_waits_go_by_any_number_of_a_file(many_files):
    reader, writer = os.pipe()
    stop, waker = StopSignal(), Waker()
    assert min(reader, stop.fileno(), waker.fd) > 1023
    try:
        assert not readable(reader, 0.001)
        os.write(writer, b"x")
        assert readable(reader, 60)
        waker.wait(0.001)
        threading.Timer(0.01, waker.wake).start()
        waker.wait(60)
        assert not stop.wait(0.001)
        stop.set()
        assert stop.wait(60)
    finally:
        waker.close()
        for each in (reader, writer, stop._reader, stop._writer):
            os.close(each)
