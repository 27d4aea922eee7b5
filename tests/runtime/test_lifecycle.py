"""Signals, deadlines, exit codes, logs: mostly in real processes."""

import errno
import functools
import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.harness import leave
from troupe.common import system
from troupe.common.errors import (
    AuthError,
    CheckpointError,
    ConfigError,
    PeerError,
    TroupeError,
    caught,
)
from troupe.common.runtime import Deadline, StopSignal, run_main
from troupe.common.runtime.files import (
    atomic_write,
    check_writable,
    make_directory,
    read_status,
    write_status,
)
from troupe.common.runtime.logging import Throttle, setup_logging


@pytest.fixture
def python():
    """Starts Python with this code; what is left of it at the end of the test is killed."""
    with ExitStack() as ends:

        def start(code, **options):
            words = [sys.executable, "-c", textwrap.dedent(code)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            process = ends.enter_context(subprocess.Popen(words, text=True, **pipes, **options))
            ends.callback(process.kill)
            return process

        yield start


def started(process):
    """Wait for the process to say that it is ready."""
    assert process.stdout.readline() == "ready\n"
    return process


def test_deadline(monkeypatch):
    now_s = 1000.0
    monkeypatch.setattr(system, "monotonic", lambda: now_s)
    deadline = Deadline(5.0)
    now_s += 2.0
    assert not deadline.expired
    assert deadline.remaining_s == 3.0
    assert (deadline.slice_s(1.0), deadline.slice_s(4.0)) == (1.0, 3.0)
    now_s += 4.0
    assert deadline.expired
    assert deadline.remaining_s == 0
    assert Deadline(None).remaining_s == float("inf")


STOPPABLE = """
    import sys, time
    from troupe.common.runtime import StopSignal
    stop = StopSignal(force_after_s={force}).install()
    print("ready", flush=True)
    while not stop.wait(1000): pass
    {then}
    sys.exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_wait_at_once(python, number):
    process = started(python(STOPPABLE.format(force=60, then="")))
    process.send_signal(number)
    assert process.wait(60) == 0


def test_a_second_signal_ends_a_process_that_hangs_while_it_stops(python):
    process = started(python(STOPPABLE.format(force=60, then="print('ready', flush=True); time.sleep(60)")))
    process.send_signal(signal.SIGINT)
    started(process)
    time.sleep(0.2)  # else both are taken for one
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


@pytest.mark.parametrize(("job", "code"), [({"SLURM_JOB_ID": "7"}, 0), ({}, 128 + signal.SIGTERM)])
def test_in_a_job_of_slurm_a_second_sigterm_does_not_end_what_writes_a_checkpoint(python, job, code):
    env = {name: text for name, text in os.environ.items() if name != "SLURM_JOB_ID"} | job
    writing = "print('ready', flush=True); sys.stdin.readline()"
    process = started(python(STOPPABLE.format(force=60, then=writing), stdin=subprocess.PIPE, env=env))
    process.send_signal(signal.SIGTERM)
    started(process)
    for _ in range(2):
        time.sleep(0.2)  # else they are taken for one
        process.send_signal(signal.SIGTERM)
    if job:
        process.stdin.write("written\n")
        process.stdin.flush()
    assert process.wait(60) == code


def test_signals_that_come_together_are_one(python):
    process = started(python(STOPPABLE.format(force=60, then="time.sleep(1)")))
    process.send_signal(signal.SIGSTOP)  # or it may get them a moment apart, where this process has to wait
    for number in (signal.SIGTERM, signal.SIGINT):  # two alike may arrive as one anyway
        process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0, "`timeout` signals a process and its group"


def test_a_process_that_hangs_while_it_stops_ends_itself_and_says_where(python):
    process = started(python(STOPPABLE.format(force=0.3, then="time.sleep(60)")))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Timeout" in stderr
    assert 'File "<string>", line' in stderr


def test_stop_from_inside():
    stop = StopSignal()
    assert not stop
    assert not stop.wait(0)
    stop.set()
    stop.set()
    assert stop.wait(10)
    assert stop.signals == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError, 2), (PeerError, 3), (AuthError, 4), (CheckpointError, 5), (TroupeError, 70)],
)
def test_expected_errors_are_one_line(capsys, error, code):
    def body():
        raise error("first\n  second")

    assert run_main(body) == code
    assert capsys.readouterr().err == "troupe: error: first second\n"


def test_what_a_peer_says_does_not_reach_the_terminal_raw(capsys):
    def body():
        raise ConfigError("replay refused: \x1b[2J\x07\x9b1m \u202egone")

    assert run_main(body) == 2
    assert capsys.readouterr().err == "troupe: error: replay refused: \\x1b[2J\\x07\\x9b1m \\u202egone\n"


def test_defects_keep_their_traceback(capsys):
    setup_logging("test")
    assert run_main(lambda: 1 // 0) == 70
    lines = capsys.readouterr().err.splitlines()
    assert any("Traceback" in line for line in lines)
    said = "ZeroDivisionError: integer division or modulo by zero"
    # The line is one of these tests, which is to Troupe as a user's own code is.
    assert re.fullmatch(rf"troupe: error: {said} \(test_lifecycle\.py:\d+\)", lines[-1])
    assert run_main(functools.partial(divmod, 1, 0)) == 70
    assert capsys.readouterr().err.splitlines()[-1] == f"troupe: error: internal error, {said}"
    logging.getLogger().handlers.clear()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_no_memory_is_one_line_that_says_what_to_lower(capsys, error):
    def body():
        raise error

    assert run_main(body) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert "no memory is left" in line
    assert "lower replay.capacity_items" in line


def test_a_full_disk_is_one_line(capsys):
    def body():
        with open("/dev/full", "w") as file:  # as what is printed may be
            file.write("x")

    assert run_main(body) == 70
    assert capsys.readouterr().err == "troupe: error: cannot write: No space left on device; make room\n"


def test_exit_codes_of_a_body():
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 4) == 4


def test_nothing_is_left_to_look_through_for_cycles_at_the_end(python):
    code = """
        import atexit, gc
        from troupe.common.runtime import run_main
        atexit.register(lambda: print(gc.get_freeze_count(), len(gc.get_objects())))  # called last
        run_main(lambda: 0)
        """
    frozen, others = map(int, python(code).communicate(timeout=60)[0].split())
    assert frozen > 1000 > others


def test_log_file_and_level(tmp_path):
    setup_logging("actor-3", tmp_path / "logs" / "a.log", "warning")
    logging.info("not this")
    logging.warning("but this")
    (line,) = (tmp_path / "logs" / "a.log").read_text().splitlines()
    assert line.endswith("WARNING actor-3: but this")
    with pytest.raises(ConfigError, match="unknown log level"):
        setup_logging("x", None, "loud")
    with pytest.raises(ConfigError, match="cannot write the log file"):
        setup_logging("x", tmp_path / "logs" / "a.log" / "b")
    setup_logging("test")
    logging.getLogger().handlers.clear()


def test_throttle():
    throttle = Throttle(60)
    assert [throttle("a"), throttle("a"), throttle("b")] == [True, False, True]


def test_status_file(tmp_path):
    assert read_status(tmp_path) == {}
    write_status(tmp_path, {"steps": 3, "metrics": {"x": 1.5}})
    assert read_status(tmp_path)["metrics"]["x"] == 1.5
    (tmp_path / "status.json").write_text("[1")
    assert read_status(tmp_path) == {}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_atomic_write_replaces_or_leaves(tmp_path, monkeypatch):
    file = tmp_path / "x"
    atomic_write(file, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        atomic_write(file, b"new")
    assert file.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_directories_that_cannot_be_used_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create the run directory"):
        make_directory(tmp_path / "file" / "run", "run directory")
    if os.getuid():  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot write into"):
            make_directory(tmp_path / "closed", "run directory")


def test_a_place_that_cannot_be_made_or_has_no_room_is_named(disk):
    check_writable(disk / "not" / "there" / "yet", "run directory")
    assert not (disk / "not").exists()
    with pytest.raises(ConfigError, match="cannot write into the run directory /proc/x"):
        check_writable(Path("/proc/x"), "run directory")
    leave(disk, 0)
    with pytest.raises(ConfigError, match="No space left on device; make room or choose another place"):
        check_writable(disk / "run", "run directory")
    with pytest.raises(ConfigError, match="No space left on device"):
        make_directory(disk / "run", "run directory")


def test_a_log_on_a_full_disk_does_not_change_how_a_service_ends(disk):
    leave(disk, 0)
    code = """
        import logging, sys
        from troupe.common.runtime import run_main
        from troupe.common.runtime.logging import setup_logging
        setup_logging("learner")
        def body():
            logging.info("a line")
            print("a line that is still in the buffer at the end")
            return 0
        sys.exit(run_main(body))
    """
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with (disk / "log").open("wb") as log:
        assert (
            subprocess.run(
                [sys.executable, "-c", textwrap.dedent(code)], env=environment, stdout=log, stderr=log
            ).returncode
            == 0
        )


def test_ctrl_c_ends_a_command_and_what_others_raise_does_not():
    said = []

    def body():
        for act in (lambda: int("no"), throw, lambda: signal.raise_signal(signal.SIGINT)):
            try:
                act()
            except caught() as error:
                said.append(type(error))

    def throw():
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run_main(body) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)
    assert said == [ValueError, KeyboardInterrupt]
