"""Runs `python -m tests.simulation` as a test does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def simulate(*words: object) -> tuple[int, str]:
    """The exit code and what was said. A process of its own, for its hashes are seeded."""
    command = [sys.executable, "-m", "tests.simulation", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
    return done.returncode, done.stdout + done.stderr[-3000:]
