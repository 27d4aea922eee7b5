"""One run of a sweep as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from tests.harness import until
from troupe.services.experiments.jobs import Job
from troupe.services.experiments.plan import Planned
from troupe.services.launcher import guard

# A launcher, whose learner has a process group of its own, and gets SIGTERM when the launcher dies.
LAUNCHER = """
import os, subprocess, sys

guard = ["-I", "-S", sys.argv[1], str(os.getpid()), "15", "0"]
subprocess.Popen([sys.executable, *guard, sys.executable, "-c", sys.argv[2]], process_group=0).wait()
"""
LEARNER = """
import pathlib, signal, time

signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("checkpoint").touch())
pathlib.Path("began").touch()
while True:
    time.sleep(60)
"""


def test_nothing_of_a_run_that_another_has_now_writes_on(tmp_path):
    job = Job(Planned("a", {}), tmp_path)
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, guard.__file__, LEARNER], cwd=tmp_path)
    job._process, job.state = launcher, "running"
    until((tmp_path / "began").exists, 60)
    [learner] = psutil.Process(launcher.pid).children(recursive=True)
    try:
        job.abandon()
        assert (job.alive, job.state) == (False, "running")
        assert launcher.returncode == -signal.SIGKILL
        until(lambda: not learner.is_running() or learner.status() == psutil.STATUS_ZOMBIE, 10)
        assert not (tmp_path / "checkpoint").exists()
    finally:
        for process in (launcher.pid, learner.pid):
            if psutil.pid_exists(process):
                os.kill(process, signal.SIGKILL)
    job.abandon()  # its process has ended, nothing is left to do
