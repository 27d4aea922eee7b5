"""Runs of a sweep without processes: gradient descent on a bowl, with files as real runs leave them."""

from __future__ import annotations

import shutil
import tomllib
from typing import ClassVar

import numpy as np

from tests.experiments.folders import make_run
from troupe.common.errors import CheckpointError
from troupe.common.runtime.checkpoint import load_newest, save_checkpoint
from troupe.common.runtime.files import write_status
from troupe.services.experiments.jobs import Job
from troupe.services.experiments.runs import is_run
from troupe.services.launcher.workspace import has_checkpoint

CURVATURE = np.array([1.0, 0.5, 0.25, 0.1])
STEPS = 25
"""Of a poll."""


def worth(weights):
    """100 at the bottom of the bowl."""
    return 100.0 * float(np.exp(-0.5 * np.sum(CURVATURE * weights**2)))


class Trainer(Job):
    """A run that makes some steps at each look. It learns by the rate of its file, from its checkpoint."""

    total_steps: ClassVar[int] = 1000
    killed: ClassVar[bool] = False  # with the sweep, at once: no checkpoint is written
    begun: ClassVar[list[tuple[str, int, float]]] = []  # name, steps, rate of each start
    crash: ClassVar[set[tuple[str, int]]] = set()  # name and steps at which it ends badly, once

    def start(self, preset, overrides):
        self._rate = tomllib.loads(self.write_values().read_text())["agent"]["learning_rate"]
        if is_run(self.run_dir) and not has_checkpoint(self.run_dir):
            shutil.rmtree(self.run_dir)
        if not is_run(self.run_dir):
            make_run(self.run_dir, returns=(), steps=0, run__total_steps=str(self.total_steps))
            (self.run_dir / ".lock").touch()  # of a launcher: none holds it
        try:
            self._weights, meta, _ = load_newest(self.run_dir / "checkpoints")
            self._weights = self._weights["w"]
        except CheckpointError:
            self._weights, meta = np.ones(4), {"steps": 0, "run": self.name}
        self._steps, self._run = meta["steps"], meta["run"]
        self.begun.append((self.name, self._steps, self._rate))
        self._process, self._stopping = self, False
        self.state, self.error, self.anew = "running", "", False

    def poll(self):
        if self._process is None:
            return False
        if self.killed:
            self._process, self.state = None, "stopped"
            return True
        if self._stopping or self._steps >= self.total_steps:
            meta = {"steps": self._steps, "run": self._run}
            save_checkpoint(self.run_dir / "checkpoints", {"w": self._weights}, meta)
            self._process = None
            if self.state == "running":
                self.state = "done" if self._steps >= self.total_steps else "stopped"
            return True
        for _ in range(STEPS):
            self._weights = self._weights - self._rate * CURVATURE * self._weights
        self._steps += STEPS
        if (self.name, self._steps) in self.crash or np.abs(self._weights).max() > 1e3:
            self.crash.discard((self.name, self._steps))
            self._process, self.state, self.error = None, "failed", "the weights are not finite"
            return True
        value = worth(self._weights)
        with (self.run_dir / "metrics.csv").open("a") as file:
            file.write(f"1,{self._steps},1,1,evaluator,eval/episode_return,{value!r}\n")
        write_status(
            self.run_dir, {"steps": self._steps, "wall_s": 1.0, "metrics": {"eval/episode_return": value}}
        )
        return False

    def stop(self):
        self._stopping = True

    def kill(self):
        self._process = None
