"""Studies: what Optuna is asked and told, with runs made by hand, and one study of real runs."""

from __future__ import annotations

import json
import resource
import sys

import pytest

from tests.experiments.folders import make_run
from tests.experiments.sweeps import RUN_S, finished, states
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import write_status
from troupe.services.experiments import plan, space

optuna = pytest.importorskip("optuna")
from troupe.services.experiments import search  # noqa: E402

SPACE = {
    "agent": {
        "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "epochs": {"low": 1, "high": 9},
        "mlp_units": [[32], [64, 64]],
    }
}


def sweep(**keys):
    section = {"preset": "cartpole-ppo", "study": "tpe", "trials": 30, "search": SPACE, **keys}
    return plan.parse("f.toml", {"sweep": section, "run": {"total_steps": 1000}}, {})


def progress(job, steps, value):
    """Make its run directory say so."""
    if not job.run_dir.exists():
        make_run(job.run_dir, returns=[(1, value)], run__total_steps="1000")
    metrics = {} if value is None else {"eval/episode_return": value}
    write_status(job.run_dir, {"steps": steps, "wall_s": 1.0, "metrics": metrics})


def end(study, job, value, state="done"):
    progress(job, 1000, value)
    job.state = state
    study.tell(job)


def test_a_study_finds_what_is_good(tmp_path):
    study = search.Study(sweep(), tmp_path)
    for _ in range(30):
        job = study.ask()
        fields = job.planned.fields
        assert 1e-4 <= fields["agent.learning_rate"] <= 1e-1
        assert fields["agent.mlp_units"] in ([32], [64, 64])
        assert fields["run.total_steps"] == 1000
        assert fields["agent.learning_rate"] == float(f"{fields['agent.learning_rate']:.4g}")
        # Best at nine epochs with two layers.
        end(study, job, fields["agent.epochs"] + 5 * (len(fields["agent.mlp_units"]) == 2))
    name, value, setting = study.best()
    assert value >= 13
    assert setting["agent.mlp_units"] == [64, 64]
    assert search.Study(sweep(), tmp_path).jobs()[int(name[-4:])].planned.fields.items() >= setting.items()
    late = [job.planned.fields["agent.epochs"] for job in study.jobs()[15:]]
    assert sum(late) / len(late) > 6  # drawn at random it would be 5


def test_trials_that_lag_end_early_but_not_the_first_ones(tmp_path):
    study = search.Study(sweep(), tmp_path)
    for number in range(search._STARTUP_TRIALS):
        job = study.ask()
        for steps in (100, 300, 500, 900):
            progress(job, steps, 100.0)
            assert not study.look(job), number
        end(study, job, 100.0)
    bad, good = study.ask(), study.ask()
    progress(bad, 200, 1.0)  # within the first quarter
    assert not study.look(bad)
    progress(bad, 1000, 1.0)  # it has all its steps: its last evaluation is about to come
    assert not study.look(bad)
    progress(bad, 420, 1.0)
    progress(good, 420, 101.0)
    assert study.look(bad)
    assert not study.look(good)
    bad.state = "pruned"
    study.tell(bad)
    assert [job.state for job in study.jobs()] == ["done"] * 4 + ["pruned", "waiting"]


def test_without_a_pruner_nothing_ends_early(tmp_path):
    study = search.Study(sweep(pruner="none"), tmp_path)
    for value in (9.0, 9.0, 9.0, 9.0, 9.0, 1.0):
        job = study.ask()
        progress(job, 700, value)
        assert not study.look(job)
        end(study, job, value)


def test_a_study_goes_on_with_other_draws(tmp_path):
    study = search.Study(sweep(), tmp_path)
    first = [study.ask() for _ in range(3)]
    end(study, first[0], 5.0)
    again = search.Study(sweep(), tmp_path)
    assert [(job.name, job.state) for job in again.jobs()] == [
        *(("trial-0000", "done"), ("trial-0001", "waiting"), ("trial-0002", "waiting"))
    ]
    assert [job.planned for job in again.jobs()] == [job.planned for job in first]
    assert again.ask().planned.fields != first[0].planned.fields


def test_a_trial_without_an_evaluation_has_failed(tmp_path):
    study = search.Study(sweep(), tmp_path)
    job = study.ask()
    end(study, job, None)
    assert (job.state, job.error) == ("failed", "no evaluation of it arrived: see the logs of its run")
    assert [job.state for job in study.jobs()] == ["failed"]
    assert study.best() is None


def test_a_trial_that_is_not_evaluated_has_failed_without_an_episode(tmp_path):
    study = search.Study(sweep(), tmp_path)
    job = study.ask()
    make_run(job.run_dir, returns=[], run__total_steps="1000", evaluator__enabled="false")
    job.state = "done"
    study.tell(job)
    assert (job.state, job.error) == ("failed", "no episode of it was counted")


def test_without_evaluators_a_trial_is_worth_its_returns_in_training(tmp_path):
    study = search.Study(sweep(), tmp_path)
    job = study.ask()
    make_run(job.run_dir, returns=[], run__total_steps="1000", evaluator__enabled="false")
    write_status(job.run_dir, {"steps": 1000, "wall_s": 1.0, "metrics": {"train/episode_return": 7.0}})
    job.state = "done"
    study.tell(job)
    assert study.best()[:2] == (job.name, 7.0)


def test_a_trial_that_was_stopped_before_its_evaluation_begins_again(tmp_path):
    study = search.Study(sweep(), tmp_path)
    job, other = study.ask(), study.ask()
    make_run(job.run_dir, returns=[], run__total_steps="1000")
    make_run(other.run_dir, returns=[], run__total_steps="1000", steps=500)
    again = {each.name: each for each in search.Study(sweep(), tmp_path).jobs()}
    assert (again[job.name].state, again[job.name].anew) == ("waiting", True)
    assert (again[other.name].state, again[other.name].anew) == ("waiting", False)


def test_a_study_is_of_one_run_for_each_trial():
    for keys in ({"seeds": 2}, {"suite": "atari5"}, {"grid": {"agent": {"gamma": [0.9]}}}):
        with pytest.raises(ConfigError, match="one run for each trial"):
            sweep(**keys)
    assert sweep(seeds=[7]).with_fields("x", {}).fields["run.seed"] == 7


def test_choices_that_are_no_plain_values_are_known_again():
    place = space.Choice([[1], "a", 2, True])
    assert search._labels(place) == ["[1]", "a", 2, True]


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"a study needs optuna: pip install .*\[search\]"):
        search.Study(sweep(), tmp_path)


def test_a_file_that_cannot_grow_is_told_by_its_cause(tmp_path):
    study = search.Study(sweep(), tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / search.STORAGE).stat().st_size, limits[1]))
    try:
        with pytest.raises(OSError, match=r"study\.sqlite3: (disk I/O error|database or disk is full)"):
            [study.ask() for _ in range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_damaged_file_is_one_line(tmp_path):
    (tmp_path / search.STORAGE).write_text("nonsense" * 100)
    with pytest.raises(ConfigError, match="cannot open the study") as caught:
        search.Study(sweep(), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_a_study_of_real_runs_without_evaluators(tmp_path, command):
    (tmp_path / "f.toml").write_text(
        '[sweep]\npreset = "cartpole-ppo"\nstudy = "tpe"\ntrials = 1\n'
        "[sweep.search]\nagent.learning_rate = {low = 1e-4, high = 1e-2, log = true}\n"
        "[run]\ntotal_steps = 2_000\n[evaluator]\nenabled = false\n"
    )
    stdout, _ = finished(command(tmp_path, "f.toml"), 0)
    assert "best: trial-0000, return in training (without evaluators) " in stdout


@pytest.mark.slow
@pytest.mark.timeout(3 * RUN_S)
def test_a_study_of_real_runs(tmp_path, command):
    (tmp_path / "f.toml").write_text(
        '[sweep]\npreset = "cartpole-ppo"\nstudy = "tpe"\ntrials = 2\nparallel = 2\n'
        "[sweep.search]\nagent.learning_rate = {low = 1e-4, high = 1e-2, log = true}\n"
        "[run]\ntotal_steps = 2_000\n[evaluator]\nepisodes = 2\nslots = 2\nvideo = false\n"
    )
    stdout, _ = finished(command(tmp_path, "f.toml"), 0)
    folder = tmp_path / "runs" / "sweep-f"
    assert states(folder) == {"trial-0000": "done", "trial-0001": "done"}
    values = {}
    for name in states(folder):
        status = json.loads((folder / "runs" / name / "status.json").read_text())
        values[name] = status["metrics"]["eval/episode_return"]
    best = max(values, key=values.get)
    assert f"best: {best}, return {values[best]:.2f}: agent.learning_rate = " in stdout
    again, _ = finished(command(tmp_path, "f.toml"), 0)
    assert "trains" not in again
