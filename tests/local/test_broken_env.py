"""Environments that break in the middle of a training: the terminal says which, where and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
BROKEN = "tests.envs.broken:Broken-v0"
# Later in an episode than the check before a training plays.
AT = "150"


class Training:
    """A real training of an environment that breaks."""

    def __init__(self, folder: Path, how: str, *options: str) -> None:
        self._output = folder / "output"
        words = ["train", "cartpole-apex", "--run-dir", str(folder / "run"), "--no-progress"]
        words += ["--net.tensorboard-port", "0", "--run.log-every-s", "0.5", "--evaluator.enabled", "false"]
        words += ["--env.id", BROKEN, "--env.kwargs.how", how, "--env.kwargs.at", AT]
        words += ["--env.kwargs.length", "1000", *options]
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def until(self, words: str, timeout_s: float = 240.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in self.output:
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(how: str, *options: str) -> Training:
        started.append(Training(tmp_path, how, *options))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.process.send_signal(signal.SIGINT)
            try:
                training.process.wait(60)
            except subprocess.TimeoutExpired:
                training.process.kill()
                training.process.wait()


def test_failures_are_in_every_line_and_in_the_summary(start: Callable[..., Training]) -> None:
    training = start("raise", "--total-steps", "6000")
    assert training.process.wait(300) == 0, training.output
    told = [line for line in training.output.splitlines() if "environments: " in line]
    assert len(told) > 1
    summary = told[-1]
    assert summary.startswith("environments: ")
    assert "failures, the last: actor-0: " in summary
    assert f"{BROKEN} raised RuntimeError: the physics exploded at step {AT}, slot " in summary


def test_an_environment_that_ends_the_process_is_not_taken_for_a_peer_out_of_reach(
    start: Callable[..., Training],
) -> None:
    training = start("_exit")
    training.until("; restarting in 2 s")
    why = f"{BROKEN} ended the process at step {AT}, slot 0 (os._exit(3)); restarting"
    assert f"actor-0 died (exit code 3): {why}" in training.output


def test_a_hang_is_told_and_then_ended(start: Callable[..., Training]) -> None:
    training = start("hang", "--actor.env-stall-s", "2")
    training.until(f"environments: 1 hang, the last: actor-0: {BROKEN} hangs at step {AT}, slot 0, for ")
    training.until("actor-0 died (exit code 70)")
    assert "the actor ends, to be started again; restarting in" in training.output
