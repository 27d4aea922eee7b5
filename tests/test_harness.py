"""What tests rely on where another one fails."""

import subprocess
import sys

import psutil
import pytest

from tests.harness import end_tree, until


def test_until_does_its_step_until_the_condition_holds_and_tells_why_it_does_not():
    steps = []
    assert until(lambda: len(steps) == 3 and "value", step=lambda: steps.append(None)) == "value"
    with pytest.raises(AssertionError, match="only 3 steps"):
        until(lambda: False, 0.0, why=lambda: f"only {len(steps)} steps")


def test_the_end_of_a_process_is_that_of_all_that_it_started():
    sleeps = "import time; time.sleep(600)"
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "{sleeps}"], start_new_session=True)
print(child.pid, flush=True)
{sleeps}
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            child = psutil.Process(int(process.stdout.readline()))
        finally:
            end_tree(process)
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    end_tree(process)  # does no harm to one that has ended
