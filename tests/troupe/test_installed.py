"""The built wheel in an environment without a checkout, beside a project with folders of common names."""

import csv
import json
import os
import subprocess
import zipfile

import pytest

from tests.bare import build_wheel, install
from tests.users_project import build_project

QUIET = ["--no-progress", "--net.tensorboard_port", "0", "--evaluator.period_s", "0"]
UNSEEN = ["--evaluator.enabled", "false"]
SHORT = ["--total-steps", "800", "--replay.min_items", "200"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Programs of an environment with the wheel."""
    return install(wheel, tmp_path_factory.mktemp("environment"))


@pytest.fixture
def project(tmp_path):
    return build_project(tmp_path / "project")


@pytest.fixture
def run(installed, project):
    def run(*words, paths=".", fails=0):
        result = subprocess.run(
            [installed / words[0], *map(str, words[1:])],
            cwd=project,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == fails, result.stdout + result.stderr
        return result.stdout + result.stderr

    return run


def steps_of(directory):
    with (directory / "metrics.csv").open() as file:
        return max(int(row["steps"]) for row in csv.DictReader(file))


def test_the_wheel_holds_one_package(wheel):
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"troupe"}


def test_no_other_name_is_there_to_import(installed, tmp_path):
    for name in ("common", "services", "configs", "benchmarks"):
        told = subprocess.run(
            [installed / "python", "-c", f"import {name}"], cwd=tmp_path, capture_output=True
        )
        assert told.returncode == 1
        assert f"No module named '{name}'" in told.stderr.decode()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_project_with_folders_of_the_same_names_trains_resumes_sweeps_evaluates_and_exports(run, project):
    assert "The environment works" in run("troupe", "env", "check", "my_package.corridor:Corridor-v0")
    run("troupe", "train", "corridor.toml", "--run-dir", "run", *SHORT, *QUIET)
    assert steps_of(project / "run") == 800
    resumed = run("troupe", "resume", "run", "--total-steps", 1000, "--agent.tau", "0.05", *QUIET, *UNSEEN)
    assert "resuming with agent.tau: 0.03 -> 0.05" in resumed
    assert steps_of(project / "run") == 1000
    assert 'algorithm = "my_package.munchausen"' in (project / "run" / "config.toml").read_text()
    permitted = "--modules my_package.corridor,my_package.munchausen"
    assert permitted in run("troupe", "eval", "run", fails=2)
    report = json.loads(run("troupe", "eval", "run", "--episodes", 2, "--json", "--modules", "my_package"))
    assert report["env"] == "my_package.corridor:Corridor-v0"
    assert report["updates"] > 0
    export = ["--format", "safetensors", "--out", "policy.safetensors", "--modules", "my_package"]
    run("troupe", "export", "run", *export)
    assert (project / "policy.safetensors").stat().st_size > 0
    run("troupe", "sweep", "corridor.toml", "--seeds", 1, "--dir", "sweep", *SHORT, *QUIET[1:], *UNSEEN)
    sweep = json.loads((project / "sweep" / "sweep.json").read_text())
    assert [entry["state"] for entry in sweep["runs"].values()] == ["done"]
    # A program that puts the project first in its path gets the project's `signal.py`: that is Python's rule.
    program = "import sys, troupe; sys.path.append('.'); "
    program += "policy = troupe.load('run', modules=['my_package.munchausen']); "
    program += "print(policy.act([1, 0, 0, 0, 0, 0]) in (0, 1), 'gymnasium' in sys.modules)"
    assert run("python", "-P", "-c", program, paths="").split() == ["True", "False"]
