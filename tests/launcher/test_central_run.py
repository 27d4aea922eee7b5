"""Central inference in real processes: it learns, and kills of actor and learner mix nothing."""

import os
import signal
import time

import numpy as np
import psutil
import pytest
import zmq

from tests.harness import until
from tests.launcher.runs import OPTIONS, Troupe, metric, status
from troupe.common.wire.replay.client import ReplayClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CENTRAL = ["--inference.mode", "central"]


def replay_endpoint(troupe: Troupe) -> str:
    process = psutil.Process(troupe.children()["troupe.services.replay"])
    words = process.cmdline()
    return words[words.index("--bind") + 1]


def goes_on(troupe: Troupe, run_dir, steps: int) -> None:
    """Wait until the run has made so many more steps."""
    before = status(run_dir)["steps"]
    troupe.wait_until(lambda: status(run_dir)["steps"] > before + steps)


def kill(troupe: Troupe, service: str) -> None:
    os.kill(troupe.children()[service], signal.SIGKILL)


def test_kills_mix_nothing(start, tmp_path):
    """Every stored window is of one copy of the environment in one process, in one piece."""
    run_dir = tmp_path / "run"
    env = ["--env.id", "tests.envs.counting:Counting-v0", "--env.kwargs.signed", "true"]
    env += ["--env.kwargs.length", "40", "--env.kwargs.ends_by", "truncation"]
    sizes = [
        "--agent.learning_rate",
        "1e-9",
        "--agent.mlp_units",
        "[8]",
        "--agent.hidden_units",
        "8",
        "--agent.n_steps",
        "3",
    ]
    sizes += ["--actor.slots", "4", "--evaluator.enabled", "false", "--run.total_steps", "100_000_000"]
    limits = ["--replay.samples_per_insert", "8", "--replay.capacity_items", "50_000"]
    words = ["--run-dir", run_dir, *env, *sizes, *limits, *CENTRAL, *OPTIONS]
    troupe = start("train", "cartpole-apex", *words)
    troupe.wait_until(lambda: status(run_dir)["updates"] > 20)
    kill(troupe, "troupe.services.actor")
    goes_on(troupe, run_dir, 1000)
    kill(troupe, "troupe.services.learner")
    time.sleep(0.5)  # what was killed is not counted as alive
    goes_on(troupe, run_dir, 1000)
    kill(troupe, "troupe.services.actor")
    goes_on(troupe, run_dir, 1000)
    assert "actor-0 died (SIGKILL)" in troupe.output.read_text()
    assert "learner died (SIGKILL)" in troupe.output.read_text()

    client = ReplayClient(replay_endpoint(troupe), ctx=zmq.Context.instance(), name="test", map_files=False)
    processes = set()

    def look():
        batch = client.sample(128, timeout_s=60)
        steps = batch.fields["bootstrap_steps"][:, 0]
        for window, count in zip(batch.fields["obs"].astype(int), steps, strict=True):
            episode, t, pid, copy = window[: count + 1].T
            assert len(set(episode)) == len(set(pid)) == len(set(copy)) == 1, window
            assert (np.diff(t) == 1).all(), window
            processes.add(pid[0])

    for _ in range(20):
        look()
    # What the last one has made may come later: the steps above were partly those of the one before.
    until(lambda: len(processes) == 3, step=look, why=lambda: "the items of some actor are missing")
    client.close()
    troupe.process.send_signal(signal.SIGINT)
    troupe.wait()


def test_learns_through_kills_of_actor_and_learner(start, tmp_path):
    run_dir = tmp_path / "run"
    words = ["--run-dir", run_dir, "--total-steps", 80_000, "--learner.checkpoint_period_s", 3]
    troupe = start("train", "cartpole-impala", *words, *CENTRAL, *OPTIONS)
    troupe.wait_until(lambda: status(run_dir)["updates"] > 30)
    kill(troupe, "troupe.services.actor")
    goes_on(troupe, run_dir, 5000)
    kill(troupe, "troupe.services.learner")
    troupe.wait_until(lambda: "learner died (SIGKILL)" in troupe.output.read_text())
    goes_on(troupe, run_dir, 5000)
    kill(troupe, "troupe.services.actor")
    assert "complete at" in troupe.wait(500.0)
    returns = [float(row["value"]) for row in metric(run_dir, "train/episode_return")]
    assert np.mean(returns[-5:]) > 60, returns  # without learning it is about 20
    used = [float(row["value"]) for row in metric(run_dir, "inference/batch_slots")]
    assert used
    assert max(used) <= 16
    log = (run_dir / "logs" / "actor-0.log").read_text()
    assert "asks the learner" in log
