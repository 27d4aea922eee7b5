"""Services of a real training that hang are ended, started again, and training goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.harness import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PATIENCE_S = 240.0


class Training:
    """A training whose services are given ten seconds to turn."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self._output = folder / "run", folder / "output"
        self.wedge = folder / "wedge"
        self.wedge.mkdir()
        words = ["train", "cartpole-apex", "--run-dir", str(self.run_dir), "--no-progress"]
        words += ["--net.tensorboard-port", "0", "--run.hang-s", "10", "--total-steps", "100000000"]
        words += ["--agent.algorithm", "tests.launcher.wedging", "--actor.slots", "4"]
        words += ["--replay.samples-per-insert", "8", "--evaluator.episodes", "1"]
        words += ["--learner.checkpoint-period-s", "2", "--run.log-every-s", "1"]
        variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "TROUPE_TEST_WEDGE": str(self.wedge)}
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "troupe", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def updates(self) -> int:
        try:
            return int(json.loads((self.run_dir / "status.json").read_text())["updates_since_start"])
        except (OSError, ValueError, KeyError):
            return 0

    def wait_for_training(self) -> None:
        before = self.updates()
        until(lambda: not before <= self.updates() <= before + 20, PATIENCE_S)

    def stop(self, service: str) -> None:
        for child in psutil.Process(self.process.pid).children():
            if f"troupe.services.{service}" in child.cmdline():
                child.send_signal(signal.SIGSTOP)

    def wait_for(self, words: str) -> None:
        until(lambda: re.search(words, self.output) or self.process.poll() is not None, PATIENCE_S)
        assert re.search(words, self.output), self.output

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    training = Training(tmp_path)
    yield training
    training.process.send_signal(signal.SIGTERM)
    try:
        training.process.wait(90)
    finally:
        training.process.kill()
        training.process.wait()


def test_what_hangs_is_started_again_and_training_goes_on(training: Training) -> None:
    until(lambda: training.updates() > 20, PATIENCE_S)
    hung = r"{} died \(exit code 70\): {} hangs: no progress for \d+ s"
    for name in ("actor", "evaluator"):
        (training.wedge / name).touch()
    training.wait_for(hung.format("actor-0", "actor-0"))
    training.wait_for(hung.format("evaluator", "the evaluator"))
    assert "in wedge" in training.log("actor-0")
    (training.wedge / "learner").touch()
    training.wait_for(hung.format("learner", "the learner's main loop"))
    assert "in wedge" in training.log("learner")
    training.wait_for_training()
    killed = r"{} died \(SIGKILL\): it did not respond for \d+ s \(run.hang_s\) and was killed; restarting"
    for service in ("replay", "actor", "evaluator"):
        training.stop(service)
    for name in ("replay", "actor-0", "evaluator"):
        training.wait_for(killed.format(name))
    training.stop("learner")
    training.wait_for(killed.format("learner"))
    training.wait_for_training()
