"""A whole run of several learners, of which one after the other is killed."""

import json
import os
import re
import signal

import psutil
import pytest

from tests.launcher.runs import OPTIONS, start, status  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def told(run_dir, name, pattern):
    """What the pattern finds in the log of a learner."""
    file = run_dir / "logs" / f"{name}.log"
    return re.findall(pattern, file.read_text()) if file.exists() else []


def epochs(run_dir, name):
    """How many learners each epoch had, as this one tells."""
    return [int(count) for count in told(run_dir, name, r"epoch \d+: (\d+) learners share")]


def pid_of(run_dir, name):
    peers = json.loads((run_dir / "status.json").read_text())["peers"]
    return next(peer["pid"] for peer in peers if peer["name"] == name)


def owner_of(troupe):
    """The process of the learner that has the run."""
    for child in psutil.Process(troupe.process.pid).children(recursive=True):
        words = child.cmdline()
        if "troupe.services.learner" in words and "--join" not in words:
            return child.pid
    raise AssertionError("no learner has the run")


def restarts(run_dir):
    """How often each learner was started again: the owner, and those that it sees."""
    found = status(run_dir)
    return [found["restarts"], *(peer["restarts"] for peer in found["peers"] if peer["role"] == "learner")]


def test_a_run_goes_on_when_any_of_its_learners_is_killed(tmp_path, start):  # noqa: F811
    run_dir = tmp_path / "run"
    fields = ["--learner.processes", 2, "--run.total_steps", 10_000_000, "--evaluator.enabled", "false"]
    fields += ["--learner.checkpoint_period_s", 3600]
    troupe = start("train", "cartpole-apex", "--run-dir", run_dir, *fields, *OPTIONS)
    troupe.wait_until(lambda: epochs(run_dir, "learner") == [2] and status(run_dir)["updates"] >= 3)
    os.kill(pid_of(run_dir, "learner-1"), signal.SIGKILL)
    # The launcher starts it again.
    troupe.wait_until(lambda: epochs(run_dir, "learner")[1:] == [2])
    before = status(run_dir)["updates"]
    troupe.wait_until(lambda: status(run_dir)["updates"] >= before + 3)
    assert epochs(run_dir, "learner-1")[-1] == 2

    # The only checkpoint is that of the beginning: what comes later is from the other learner.
    before = status(run_dir)["updates"]
    os.kill(owner_of(troupe), signal.SIGKILL)
    taken = r"at update (\d+); took over the state of another learner"
    troupe.wait_until(lambda: told(run_dir, "learner", taken))
    reached = int(told(run_dir, "learner", taken)[0])
    assert reached >= before
    # Both were killed once, and the second learner before the status that the first has read again.
    troupe.wait_until(lambda: restarts(run_dir) == [1, 1])
    troupe.wait_until(lambda: status(run_dir)["updates"] >= reached + 3)
    lost = len(told(run_dir, "learner", "continuing without"))
    os.kill(pid_of(run_dir, "learner-1"), signal.SIGTERM)
    troupe.wait_until(lambda: told(run_dir, "learner", "learner 1 of the previous epoch has left"))
    assert len(told(run_dir, "learner", "continuing without")) == lost
    troupe.wait_until(lambda: told(run_dir, "learner-1", r"learner-1 stops after update \d+: stopped"))
    troupe.process.send_signal(signal.SIGINT)
    troupe.wait()
