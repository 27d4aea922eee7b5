"""The one place for clocks, random numbers and threads, and the rule that keeps it so."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from troupe.common import system

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("common/wire", "common/data", "services/replay", "services/replay/storage"),
    *("services/learner/control", "services/learner/batches", "services/actor"),
)


def refused(folder, code):
    """What ruff has against these lines in a file of this folder."""
    command = [sys.executable, "-m", "ruff", "check", "--select", "TID251", "--output-format", "concise"]
    command += ["--stdin-filename", f"{folder}/new.py", "-"]
    return subprocess.run(command, input=code, cwd=ROOT, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_that_are_simulated_take_nothing_from_the_machine_itself(folder):
    uses = ("time", "random", "secrets", "uuid", "datetime")
    found = refused(folder, "".join(f"import {name}\n" for name in uses))
    assert [f"`{name}` is banned" in found for name in uses] == [True] * len(uses)
    code = "import os, threading\nimport numpy as np\n"
    code += "os.urandom(1); threading.Event(); np.random.default_rng()\n"
    assert refused(folder, code).count("is banned") == 3


def test_other_folders_may():
    assert "is banned" not in refused("common/envs", "import time\n")


def test_a_generator_without_a_seed_follows_the_random_numbers_of_the_process(monkeypatch):
    monkeypatch.setattr(system.random, "getrandbits", lambda bits: 7)
    drawn = system.generator().random(4)
    assert np.array_equal(drawn, system.generator(7).random(4))
    assert not np.array_equal(drawn, system.generator(8).random(4))
