"""Sweeps as commands, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import end_tree

ROOT = Path(__file__).parents[2]
RUN_S = 400.0
"""Patience with a sweep of real runs: each starts four processes that import torch."""


@pytest.fixture
def command():
    """Starts `troupe sweep`, which ends with the test, and its runs with it."""
    started = []

    def command(folder, *words):
        process = subprocess.Popen(
            [sys.executable, "-m", "troupe", "sweep", *map(str, words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield command
    with contextlib.ExitStack() as ending:
        for process in started:
            ending.callback(process.stdout.close)
            ending.callback(process.stderr.close)
            ending.callback(end_tree, process)


def finished(process, code):
    stdout, stderr = process.communicate(timeout=RUN_S)
    assert process.returncode == code, stdout + stderr
    return stdout, stderr


def states(folder):
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    return {name: run["state"] for name, run in runs.items()}
