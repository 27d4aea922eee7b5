"""A run ends at its total, give or take a round of its slots, whatever the algorithm, whoever is killed."""

import os
import signal

import pytest

from tests.launcher.runs import OPTIONS, status
from troupe.common.config import read_config
from troupe.common.runtime.checkpoint import load_newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
FAST = [*OPTIONS, "--evaluator.enabled", "false"]


def check_total(run_dir, total):
    slots = read_config(run_dir / "config.toml").total_slots
    steps = status(run_dir)["steps"]
    assert total <= steps < total + slots
    assert load_newest(run_dir / "checkpoints").meta["steps"] == steps


@pytest.mark.parametrize(
    ("preset", "more"),
    [
        ("cartpole-impala", ["--inference.mode", "central", "--actor.processes", "2"]),
        ("memory-r2d2", []),
    ],
)
def test_a_total_is_kept(start, tmp_path, preset, more):
    run_dir = tmp_path / "run"
    start("train", preset, "--run-dir", run_dir, "--total-steps", 2000, *more, *FAST).wait()
    check_total(run_dir, 2000)


def test_unrolls_that_wait_at_the_end_are_learned_from(start, tmp_path):
    """The actor is faster than the learner: at the end the queue is full."""
    run_dir = tmp_path / "run"
    slow = ["--agent.mlp_units", "[512, 512]", "--replay.batch_size", "1", "--learner.prefetch", "1"]
    start("train", "cartpole-impala", "--run-dir", run_dir, "--total-steps", 6000, *slow, *FAST).wait()
    check_total(run_dir, 6000)
    config = read_config(run_dir / "config.toml")
    unrolls = 6000 // config.total_slots // config.agent.unroll_steps * config.total_slots
    assert status(run_dir)["updates"] >= unrolls - config.total_slots


def test_kills_and_a_resume_keep_it(start, tmp_path):
    run_dir = tmp_path / "run"
    words = ["--actor.processes", "2", "--learner.checkpoint_period_s", "1", *FAST]
    words += ["--run.log-every-s", "0.2"]  # a fast machine would be at the end when the steps are told
    troupe = start("train", "cartpole-apex", "--run-dir", run_dir, "--total-steps", 5000, *words)
    for service in ("troupe.services.actor", "troupe.services.learner"):
        before = status(run_dir)["steps"]
        troupe.wait_until(lambda before=before: status(run_dir)["steps"] > before + 500)
        os.kill(troupe.children()[service], signal.SIGKILL)
        troupe.wait_until(lambda: "(SIGKILL)" in troupe.output.read_text())
    troupe.wait()
    check_total(run_dir, 5000)
    start("resume", run_dir, "--total-steps", 5500, *words).wait()
    check_total(run_dir, 5500)
