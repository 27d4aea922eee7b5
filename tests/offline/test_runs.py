"""A whole run from a data set: no actor, updates as steps, resumed, and taken up by a run with actors."""

import contextlib
import csv

import psutil
import pytest

import troupe.services.__main__ as cli
from tests.harness import until
from tests.launcher.runs import OPTIONS, metric, status
from tests.offline.test_import import played
from troupe.common.config import EnvConfig
from troupe.common.datasets import Dataset
from troupe.common.envs import make_spec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = ("--agent.mlp_units", "[16]", "--replay.batch_size", 32, *OPTIONS)


def test_a_run_learns_from_a_data_set_and_one_with_actors_goes_on(start, tmp_path, datasets):
    played("my/pendulum-v0", "pendulum-sac", "--sampled")
    run_dir = tmp_path / "run"
    words = ("train", "pendulum-iql", "--offline", "my/pendulum-v0", "--run-dir", run_dir, *SMALL)
    output = start(*words, "--total-steps", 150).wait()
    assert "600 items" in output
    assert "last evaluation: return" in output
    now = status(run_dir)
    assert (now["steps"], now["updates"]) == (150, 150)
    assert now["metrics"]["replay/items"] == 600
    assert not list((run_dir / "logs").glob("actor*"))
    with (run_dir / "metrics.csv").open() as file:
        assert {row["source"].partition("-")[0] for row in csv.DictReader(file)} <= {
            "learner",
            "replay",
            "evaluator",
        }
    assert metric(run_dir, "eval/episode_return")

    output = start("resume", run_dir, "--total-steps", 200, *OPTIONS).wait()
    assert status(run_dir)["updates"] == 200
    assert "600 items restored" in output
    assert "reading the data set" not in output

    # Replay holds the whole data set, and gives it back.
    output = start("replay", "export", run_dir, "--minari", "my/again-v0").wait()
    assert "3 episodes, 600 steps" in output
    assert "left out: 0 pieces" in output
    spec = make_spec(EnvConfig(id="gym:Pendulum-v1"))
    both = zip(*(Dataset(name).trajectories(spec) for name in ("my/pendulum-v0", "my/again-v0")), strict=True)
    for one, two in both:
        assert one.obs.tobytes() == two.obs.tobytes()
        assert one.actions.tobytes() == two.actions.tobytes()
        assert one.rewards.astype("f4").tobytes() == two.rewards.astype("f4").tobytes()

    fields = ("--init-from", run_dir, "--run-dir", tmp_path / "online", "--total-steps", 1000)
    fields = (*fields, "--evaluator.enabled", "false", "--replay.min_items", 100)
    output = start("train", "pendulum-iql", *fields, *SMALL).wait()
    assert "complete at" in output
    assert status(tmp_path / "online")["updates"] > 0


def test_who_reads_a_data_set_ends_with_the_launcher(start, tmp_path, datasets):
    played("my/pendulum-v0", "pendulum-sac", "--sampled")
    run_dir = tmp_path / "run"
    run = start("train", "pendulum-iql", "--offline", "my/pendulum-v0", "--run-dir", run_dir, *SMALL)
    readers = []

    def reading():
        for child in psutil.Process(run.process.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "import" in words and not any(word.endswith("guard.py") for word in words):
                    child.suspend()  # it would soon be done
                    readers.append(child)
        return readers

    run.wait_until(reading)
    run.process.kill()
    (reader,) = readers
    until(lambda: not reader.is_running() or reader.status() == psutil.STATUS_ZOMBIE)


def test_a_data_set_that_is_absent_or_does_not_fit_begins_no_run(tmp_path, datasets, capsys):
    run_dir = tmp_path / "run"

    def refusal(*words):
        words = ("train", "pendulum-td3-bc", "--run-dir", run_dir, *SMALL, *words)
        assert cli.main([*map(str, words)]) == 2
        return capsys.readouterr().err

    played("my/cartpole-v0")
    unfit = refusal("--offline", "my/cartpole-v0")
    assert "error: the data set my/cartpole-v0 does not fit gym:Pendulum-v1" in unfit
    assert not list(run_dir.glob("*/*/*"))
    small = refusal("--offline", "my/cartpole-v0", "--replay.batch_size", "10000")
    assert "fewer than replay.batch_size (10000): lower that" in small
    absent = refusal("--offline", "my/absent-v0")
    assert absent.startswith("troupe: error: there is no data set my/absent-v0")
    assert absent.count("\n") == 1
    assert not (run_dir / "config.toml").exists()
