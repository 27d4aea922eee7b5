"""What lies in the folder from which a run is started: of no effect, unless the user says so."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WORDS = [
    "--no-progress",
    "--net.tensorboard_port",
    "0",
    "--evaluator.enabled",
    "false",
    "--total-steps",
    "200",
]
OWN = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
gym.register("Own-v0", entry_point=CartPoleEnv, max_episode_steps=100)
"""


def train(folder, *words, **environment):
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "services",
            "train",
            "cartpole-apex",
            "--run-dir",
            "run",
            *WORDS,
            *words,
        ],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "complete at" in run.stdout


def test_files_named_like_modules_harm_nobody(tmp_path):
    (tmp_path / "signal.py").write_text("# a user's own\n")
    for package in ("common", "services"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('not this one')\n")
    train(tmp_path)


def test_an_environment_of_the_folder_is_found_where_the_user_says_so(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    train(tmp_path, "--env.id", "own:Own-v0", PYTHONPATH=".")
