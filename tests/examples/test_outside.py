"""`examples/outside` in a folder that is not the repository. test_installed.py trains there by commands."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.contract import OPTIONS, PIXELS, agent_of
from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.users_project import EXAMPLE, build_project
from troupe.common.config import load_config
from troupe.common.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUIET = ["--no-progress", "--net.tensorboard_port", "0", "--evaluator.period_s", "0"]


@pytest.fixture
def folder(tmp_path):
    # Programs of the user are run here too: there Python itself would read a `signal.py` of his.
    return build_project(tmp_path / "work", shadows=False)


@pytest.fixture
def troupe(folder):
    """Runs a program in the folder; returns what it prints."""

    def run(*words, program=("-m", "troupe"), fails=0):
        # The folder that it is run in; the other is for a clone whose package has not been installed anew.
        paths = {"PYTHONPATH": os.pathsep.join([".", str(ROOT)])}
        result = subprocess.run(
            [sys.executable, "-P", *program, *map(str, words)],
            **{
                "cwd": folder,
                "env": os.environ | paths,
                "capture_output": True,
                "text": True,
                "timeout": 280,
            },
        )
        assert result.returncode == fails, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def steps_of(folder):
    with (folder / "run" / "metrics.csv").open() as file:
        return max(int(row["steps"]) for row in csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cartpole_trains_from_python(folder, troupe):
    code = (
        "import troupe; "
        # More steps than the limiter lets actors make ahead of the learner.
        "fields = {'run.total_steps': 2400, 'net.tensorboard_port': 0, 'replay.min_items': 400}; "
        "run = troupe.train('munchausen-cartpole.toml', 'run', fields, progress=False); "
        "print(troupe.evaluate(run, episodes=2, modules=['my_package'])['updates'] > 0)"
    )
    assert troupe(program=("-c", code)).splitlines()[-1] == "True"
    assert steps_of(folder) == 2400


@pytest.mark.timeout(300)
def test_the_one_that_learns_on_policy_learns_cartpole(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    config = load_config(str(EXAMPLE / "a2c-cartpole.toml"))
    slots, batch = config.actor.slots, config.replay.batch_size
    agent, _ = learn_through_a_queue(config.agent, config.env, slots=slots, batch=batch, steps=16_000, seed=0)
    assert evaluate(agent, config.env) > 80  # a policy at random: 20; one that always does the same: 9


@pytest.mark.slow
def test_the_contract_of_algorithms_holds_for_both(folder, troupe):
    words = ["-P", "-m", "pytest", "-p", "no:cacheprovider", ROOT / "tests/agents/test_contract.py"]
    code = "import os, sys; os.environ['PYTHONPATH'] = os.getcwd(); os.chdir(sys.argv[1]); "
    code += "os.environ['TROUPE_CONTRACT'] = 'my_package.munchausen,my_package.a2c'; "
    code += "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
    out = troupe(ROOT, *words, "-rs", "-k", "my_package", program=("-c", code))
    assert "passed, 5 skipped" in out
    assert "my_package.a2c takes vectors, which observations of tests.envs.catch:Catch-v0 are not" in out


def test_an_algorithm_of_this_tree_is_not_skipped_for_what_it_refuses(monkeypatch):
    monkeypatch.setitem(OPTIONS, "apex, of vectors", {"torso": "mlp"})
    with pytest.raises(
        BaseException, match="does not suit"
    ) as raised:  # pytest's own for a skip is no Exception
        agent_of("apex, of vectors", env=PIXELS)
    assert raised.type is ConfigError
