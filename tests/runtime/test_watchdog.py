"""A service that hangs ends itself and says where; one that only works for long does not. Real processes."""

import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack

import pytest

BEGIN = """
import ctypes, sys, threading, time
from troupe.common.runtime import watchdog
watchdog.start()
watchdog.arm(float(sys.argv[1]))
loop = watchdog.Loop("the test")
def stuck_here(): threading.Event().wait()
def holds_the_interpreter(): ctypes.PyDLL(None).sleep(1000)
"""


@pytest.fixture
def python(monkeypatch):
    """Starts Python with this code, watched with this limit; ends it at the end of the test."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    with ExitStack() as ends:

        def start(code, limit_s, **options):
            words = [sys.executable, "-c", BEGIN + textwrap.dedent(code), str(limit_s)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = ends.enter_context(subprocess.Popen(words, text=True, **pipes, **options))
            ends.callback(process.kill)
            return process

        yield start


def test_a_loop_that_hangs_ends_with_a_line_and_all_stacks(python):
    process = python("threading.Thread(target=stuck_here).start(); loop.turn(); stuck_here()", 1)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 70
    *stacks, line = errors.strip().splitlines()
    assert line.startswith("troupe: error: the test hangs: no progress for ")
    assert "run.hang_s" in line
    assert sum("stuck_here" in each for each in stacks) == 2


def test_a_log_file_has_the_stacks_as_well(python, tmp_path):
    log = tmp_path / "log"
    setup = f"from troupe.common.runtime.logging import setup_logging; setup_logging('x', {str(log)!r})"
    process = python(f"{setup}; stuck_here()", 1)
    process.communicate(timeout=120)
    assert process.returncode == 70
    assert "stuck_here" in log.read_text()
    assert " ERROR   x: the test hangs" in log.read_text()


def test_each_loop_is_watched(python):
    process = python(
        """
        second = watchdog.Loop("the second loop")
        while True:
            loop.turn()
            time.sleep(0.01)
        """,
        1,
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 70
    assert "the second loop hangs" in errors


def test_long_work_may_take_longer_but_not_for_ever(python):
    process = python("with loop.long('a checkpoint'): stuck_here()", 0.25)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 70
    line = errors.strip().splitlines()[-1]
    # To the letter: the launcher knows a hang at the same place by it.
    assert line.startswith("troupe: error: the test hangs during a checkpoint: no progress for 1.5 s, so")


@pytest.mark.parametrize("limit_s", [0, 300])
def test_a_loop_that_is_closed_or_has_no_limit_is_not_watched(python, limit_s):
    process = python("loop.close(); watchdog.arm(0.1)\nif sys.argv[1] == '0': time.sleep(2)", limit_s)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


def test_a_library_that_holds_the_interpreter_ends_as_well(python):
    process = python("loop.turn(); holds_the_interpreter()", 1)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "holds_the_interpreter" in errors


def test_a_process_that_was_stopped_does_not_hang(python, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "signs"))
    process = python(
        """
        print("ready", flush=True)
        sys.stdin.readline()
        loop.turn()
        print("goes on")
        """,
        10,
        stdin=subprocess.PIPE,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(11)
    process.send_signal(signal.SIGCONT)
    output, errors = process.communicate("\n", timeout=120)
    assert (process.returncode, output, errors) == (0, "goes on\n", "")


def test_signs_of_life_go_where_systemd_wants_them(python, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "signs"))
        supervisor.settimeout(120)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "signs"))
        python("while True: loop.turn(); time.sleep(0.01)", 300)
        assert [supervisor.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
