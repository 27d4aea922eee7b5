"""A whole run of several learners, one of which is killed."""

import json
import os
import re
import signal

import pytest

from tests.launcher.runs import OPTIONS, start, status  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def epochs(run_dir, name):
    """How many learners each epoch had, as this one tells."""
    file = run_dir / "logs" / f"{name}.log"
    text = file.read_text() if file.exists() else ""
    return [int(count) for count in re.findall(r"epoch \d+: (\d+) learners share", text)]


def pid_of(run_dir, name):
    peers = json.loads((run_dir / "status.json").read_text())["peers"]
    return next(peer["pid"] for peer in peers if peer["name"] == name)


def test_a_run_goes_on_when_one_of_its_learners_is_killed_and_takes_in_the_next(tmp_path, start):  # noqa: F811
    run_dir = tmp_path / "run"
    fields = ["--learner.processes", 2, "--run.total_steps", 10_000_000, "--evaluator.enabled", "false"]
    troupe = start("train", "cartpole-ppo", "--run-dir", run_dir, *fields, *OPTIONS)
    troupe.wait_until(lambda: epochs(run_dir, "learner") == [2] and status(run_dir)["updates"] >= 3)
    os.kill(pid_of(run_dir, "learner-1"), signal.SIGKILL)
    # The launcher starts it again.
    troupe.wait_until(lambda: epochs(run_dir, "learner")[1:] == [2])
    before = status(run_dir)["updates"]
    troupe.wait_until(lambda: status(run_dir)["updates"] >= before + 3)
    assert epochs(run_dir, "learner-1")[-1] == 2
    troupe.process.send_signal(signal.SIGINT)
    troupe.wait()
