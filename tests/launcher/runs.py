"""Whole runs of `troupe train`."""

import contextlib
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.harness import end_tree, until

ROOT = Path(__file__).parents[2]


OPTIONS = ["--no-progress", "--net.tensorboard-port", "0", "--run.log-every-s", "1"]


class Troupe:
    """A `troupe` command under test."""

    def __init__(self, output, *words):
        self.output = output
        with output.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "troupe", *map(str, words)],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=output.parent,
                env={**os.environ, "PYTHONPATH": str(ROOT)},  # for environments of the tests
            )
        self.seen = set()

    def children(self):
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen.add(child)
            with contextlib.suppress(psutil.Error, ValueError):  # just dead, or not a service
                words = child.cmdline()
                found[words[words.index("-m") + 1]] = child.pid
        return found

    def wait_until(self, condition, timeout_s=180.0):
        def look():
            assert self.process.poll() is None, self.output.read_text()
            self.children()
            time.sleep(0.1)

        until(condition, timeout_s, step=look, why=self.output.read_text)

    def wait(self, timeout_s=300.0):
        code = self.process.wait(timeout_s)
        assert code == 0, self.output.read_text()
        _, alive = psutil.wait_procs(self.seen, timeout=60)
        assert not alive, alive
        return self.output.read_text()


def status(run_dir):
    try:
        return json.loads((run_dir / "status.json").read_text())
    except FileNotFoundError:
        return {"steps": 0, "updates": 0, "metrics": {}}


def metric(run_dir, name):
    with (run_dir / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["name"] == name]


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*words):
        started.append(Troupe(tmp_path / f"out-{len(started)}", *words))
        return started[-1]

    yield start
    with contextlib.ExitStack() as ending:
        for one in started:
            ending.callback(end_tree, one.process)
