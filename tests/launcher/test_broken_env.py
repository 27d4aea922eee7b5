"""Environments that break in the middle of a training: the terminal says which, where and why."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness import end_tree, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
BROKEN = "tests.envs.broken:Broken-v0"
# Later in an episode than the check before a training plays.
AT = "150"


SLOTS = 4
ROUNDS = 2
"""Episodes of every slot before the hang."""
HOW = " ".join(["raise"] * SLOTS * ROUNDS + ["hang", "_exit", "raise"])


class Training:
    """A real training of an environment that breaks."""

    def __init__(self, folder: Path, how: str, *options: str) -> None:
        self.logs, self._output = folder / "run" / "logs", folder / "output"
        words = ["train", "cartpole-apex", "--run-dir", str(folder / "run"), "--no-progress"]
        words += ["--net.tensorboard-port", "0", "--run.log-every-s", "0.5", "--evaluator.enabled", "false"]
        words += ["--env.id", BROKEN, "--env.kwargs.how", how, "--env.kwargs.record", str(folder / "record")]
        words += ["--env.kwargs.at", AT, "--env.kwargs.length", "1000", "--actor.slots", str(SLOTS)]
        words += ["--replay.samples-per-insert", "8", "--total-steps", "4000", *options]
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troupe", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, words: str, timeout_s: float = 240.0) -> None:
        def look() -> None:
            assert self.process.poll() is None, self.output
            time.sleep(0.1)

        until(lambda: words in self.output, timeout_s, step=look, why=lambda: self.output)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def train(*words: str) -> Training:
        started.append(Training(tmp_path, *words))
        return started[-1]

    yield train
    with contextlib.ExitStack() as ending:
        for training in started:
            ending.callback(end_tree, training.process)


def test_failures_a_hang_and_an_end_of_the_process_are_told_and_the_run_goes_on(
    train: Callable[..., Training],
) -> None:
    training = train(HOW, "--actor.env-stall-s", "1")
    where = f"at step {AT}, slot 0"
    failed = f"environments: {SLOTS * ROUNDS} failures"
    training.until(f"{failed} and 1 hang, the last: actor-0: {BROKEN} hangs {where}, for ")
    training.until("actor-0 died (exit code 70)")
    assert "the actor exits so that it can be restarted; restarting in 1 s" in training.output
    # Exit code 3 of a service's own would be a peer out of reach.
    training.until(
        f"actor-0 died (exit code 3): {BROKEN} ended the process {where} (os._exit(3)); restarting"
    )
    assert training.process.wait(300) == 0, training.output
    told = [line for line in training.output.splitlines() if "environments: " in line]
    assert len(told) > 1
    summary = told[-1]
    assert summary.startswith("environments: ")
    assert "failures and 1 hang, the last: actor-0: " in summary
    assert f"{BROKEN} raised RuntimeError: the physics exploded (broken.py:68) at step {AT}, slot " in summary


def test_a_run_whose_episodes_all_fail_does_not_wait_for_an_evaluation(
    train: Callable[..., Training],
) -> None:
    training = train("raise", "--evaluator.enabled", "true", "--evaluator.period_s", "5")
    assert training.process.wait(300) == 0, training.output
    assert f"last evaluation: none (no episode of {BROKEN} can be finished: " in training.output
    assert "the last evaluation did not arrive" not in (training.logs / "learner.log").read_text()


def test_with_central_inference_a_hanging_environment_is_replaced_as_well(
    train: Callable[..., Training],
) -> None:
    training = train("hang nothing", "--actor.env-stall-s", "1", "--inference.mode", "central")
    training.until("the actor exits so that it can be restarted; restarting in 1 s")
    assert training.process.wait(300) == 0, training.output


def test_with_processes_the_actor_lives_through_all_of_it(train: Callable[..., Training]) -> None:
    """Two ways to crash, a hang and a NaN, once each: the run ends as if nothing had been."""
    training = train("_exit segfault hang nan nothing", "--env.processes", "2", "--env.step-timeout-s", "2")
    assert training.process.wait(300) == 0, training.output
    assert "died" not in training.output
    summary = [line for line in training.output.splitlines() if "environments: " in line][-1]
    assert summary.startswith("environments: 4 failures, the last: actor-0: ")
    log = (training.logs / "actor-0.log").read_text()
    for cause in (r"os\._exit\(3\)", "SIGSEGV", "did not return within 2 s", "observation with nan"):
        assert len(re.findall(rf"{cause}.* at step {AT}, slot \d, seed \d+; its", log)) == 1, log
