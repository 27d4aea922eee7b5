"""The programs in examples/ run, against a server as their first lines start it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn.py"


@pytest.mark.slow
def test_the_dqn_stores_learns_and_updates_priorities(server, client):
    line = re.search(r"^    (troupe replay .*)$", EXAMPLE.read_text(), re.MULTILINE)[1]
    _, _, serve, data, _, *options = shlex.split(line)
    assert (serve, data) == ("serve", "--data-dir")
    endpoint = server(*options)
    words = [sys.executable, str(EXAMPLE), "--replay", endpoint, "--steps", "1200"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"1000 steps, mean return of 20 episodes [\d.]+\nstored: True\n", done.stdout)
    status = client(endpoint).status(60)
    table = status["tables"]["default"]
    assert 1100 <= table["items"] <= 1200
    assert table["sampled_total"] >= 200 * 64
    assert table["total_priority"] != pytest.approx(table["items"])  # errors instead of the first priority
