"""A child of the launcher cannot outlive it, however it dies."""

import os
import subprocess
import sys

import psutil

from tests.harness import until
from troupe.services.launcher import guard

PARENT = f"""
import os, subprocess, sys, time
code = "import os, time; print(os.nice(0), flush=True); time.sleep(600)"
guarded = [sys.executable, "-I", "-S", {guard.__file__!r}, str(os.getpid()), "9", "5"]
child = subprocess.Popen([*guarded, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
time.sleep(60)
"""


def test_a_guarded_process_dies_with_its_parent():
    """Kill -9 the parent: the guarded child, and what it became by exec, is gone too."""
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        try:
            nice, pid = map(int, parent.stdout.readline().split())
        finally:
            parent.kill()
    assert nice == min(19, os.nice(0) + 5)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_guarded_process_does_not_start_without_its_parent(tmp_path):
    command = [sys.executable, "-I", "-S", guard.__file__, "1", "9", "0", "touch", str(tmp_path / "x")]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0
    assert not (tmp_path / "x").exists()
