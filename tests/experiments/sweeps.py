"""Sweeps as commands, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "troupe", "sweep", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process, code):
    try:
        stdout, stderr = process.communicate(timeout=150)
    finally:
        process.kill()
    assert process.returncode == code, stdout + stderr
    return stdout, stderr


def states(folder):
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    return {name: run["state"] for name, run in runs.items()}
