"""The whole system: four real processes learn, are killed and interrupted, and resume."""

import json
import os
import signal

import pytest

import troupe.services.__main__ as cli
from tests.launcher.runs import OPTIONS, metric, status
from tests.learner.runs import make_config, report, run_learner
from troupe.common.config import to_toml
from troupe.common.runtime.files import make_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENDS_AT = 7_000
RANDOM_RETURN = 22.0  # what random actions earn in CartPole-v1


def test_learns_through_kills_an_interrupt_and_a_resume(start, tmp_path, capsys):
    """Wherever it is started: files there that are named like modules harm nobody."""
    (tmp_path / "signal.py").write_text("# a user's own\n")
    for package in ("common", "services"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    run_dir = tmp_path / "run"
    troupe = start("train", "cartpole-apex", "--run-dir", run_dir, "--total-steps", ENDS_AT, *OPTIONS)
    troupe.wait_until(lambda: status(run_dir)["updates"] > 100)
    services = troupe.children()
    assert {
        "troupe.services.learner",
        "troupe.services.replay",
        "troupe.services.actor",
        "troupe.services.evaluator",
    } <= set(services)

    os.kill(services["troupe.services.actor"], signal.SIGKILL)
    os.kill(services["troupe.services.evaluator"], signal.SIGKILL)
    before = status(run_dir)["steps"]
    troupe.wait_until(lambda: status(run_dir)["steps"] > before + 1000)
    assert "actor-0 died (SIGKILL)" in troupe.output.read_text()

    troupe.process.send_signal(signal.SIGINT)
    output = troupe.wait()
    assert "troupe resume run\n" in output
    stopped_at = status(run_dir)["steps"]
    assert 1000 < stopped_at < ENDS_AT

    again = start("resume", run_dir, *OPTIONS)
    again.wait_until(lambda: status(run_dir)["updates"] > 0)
    assert status(run_dir)["steps"] >= stopped_at
    output = again.wait()
    assert "complete at" in output
    assert "last evaluation: return" in output
    assert " items restored\n" in output
    assert "restored" in (run_dir / "logs" / "replay.log").read_text()

    returns = [float(row["value"]) for row in metric(run_dir, "eval/episode_return")]
    assert max(returns[-3:]) > 3 * RANDOM_RETURN, returns
    steps = [int(row["steps"]) for row in metric(run_dir, "speed/steps_per_s")]
    assert steps == sorted(steps), "the counters went back"
    for name in ("learner", "replay", "actor-0", "evaluator", "launcher"):
        assert (run_dir / "logs" / f"{name}.log").exists()

    assert cli.main(["eval", str(run_dir), "--episodes", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_return"] > 2 * RANDOM_RETURN


def test_a_run_that_does_not_keep_its_replay_says_that_it_fills_it_again(start, tmp_path):
    run_dir = tmp_path / "run"
    # So many that a line is written while they are made, however fast.
    fields = {"replay.durable": "none", "replay.min_items": "40000", "evaluator.enabled": "false"}
    config = make_config(tmp_path, **fields)
    make_directory(run_dir, "run directory")
    (run_dir / "config.toml").write_text(to_toml(config))
    learner = run_learner(config, run_dir)
    report(config, {}, steps=5000)
    learner.end()
    again = start("resume", run_dir, "--actor.slots", 1, *OPTIONS)
    again.wait_until(lambda: "filling replay before learning starts" in again.output.read_text())
    line = "replay starts empty, refills 40,000 items before learning goes on"
    again.wait_until(lambda: line in again.output.read_text())
    again.process.send_signal(signal.SIGINT)
    assert "to continue" in again.wait()
