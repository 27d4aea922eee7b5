"""Trackers: what they are given, and that nothing which happens to them reaches training."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.harness import evaluated, games, make_reporter, until
from troupe.common.errors import ConfigError
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record import tracking
from troupe.services.learner.record.trackers import Run, flat, without_secrets
from troupe.services.learner.record.tracking import MAX_WAITING, Trackers
from troupe.services.learner.saving.counters import RunCounters

SCRIPT = Path(__file__).with_name("tracker.py")
RUN = Run("0123456789abcdef", "a run", "/runs/a", {"a": 1, "b": {"c": 2.5}})


@pytest.fixture
def make(monkeypatch, tmp_path):
    """Trackers whose one process is that of `tracker.py`."""
    monkeypatch.setattr(tracking, "check_trackers", lambda names: None)
    monkeypatch.setenv("SOME_API_KEY", "hush-hush")

    def begun(how):
        command = [sys.executable, str(SCRIPT), "notes", str(tmp_path / "notes"), how]
        monkeypatch.setattr(tracking, "_command", lambda name: command)
        return Trackers(["notes"], RUN)

    return begun


def notes(tmp_path):
    return [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]


def test_rows_arrive_in_their_order_and_the_end_last(make, tmp_path, caplog):
    trackers = make("well")
    trackers.add(10, {"train/episode_return": 1.5, "bad": float("nan")})
    trackers.add(20, {"only": float("inf")})
    trackers.add(30, {"x": 2})
    trackers.close({"final/steps": 30.0}, complete=True)
    assert notes(tmp_path) == [
        ["begin", RUN.id, 1],
        ["add", 10, {"train/episode_return": 1.5}],
        ["add", 30, {"x": 2.0}],
        ["end", {"final/steps": 30.0}, True],
    ]
    assert not caplog.records


def test_what_is_refused_is_said_in_one_line_without_secrets(make, caplog):
    trackers = make("refuses")
    until(lambda: "training continues without it" in caplog.text)
    for steps in range(2 * MAX_WAITING):
        trackers.add(steps, {"x": 1.0})
    trackers.close({}, complete=False)
    (line,) = [record.getMessage() for record in caplog.records if "cannot begin" in record.getMessage()]
    assert line == "notes cannot begin: ConnectionError: no run for *** at http://***@host/"
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    ("how", "cause"), [("fails", "ValueError: no rows today"), ("interrupts", "KeyboardInterrupt")]
)
def test_rows_that_fail_are_told_once(make, tmp_path, caplog, how, cause):
    trackers = make(how)
    for steps in range(5):
        trackers.add(steps, {"x": 1.0})
    trackers.close({"final/steps": 4.0}, complete=False)
    assert notes(tmp_path)[-1] == ["end", {"final/steps": 4.0}, False]
    assert caplog.text.count(f"notes does not take a row: {cause}") == 1


@pytest.mark.parametrize("how", ["hangs", "lingers"])
def test_one_that_hangs_is_dropped_and_ended(make, caplog, how):
    trackers = make(how)
    process = trackers._each[0]._process
    # More than the pipe and the queue hold: 64 KiB, and MAX_WAITING rows.
    for steps in range(2 * MAX_WAITING if how == "hangs" else 1):
        trackers.add(steps, {"a_name_of_some_length/episode_return" * 4: 1.0})
    trackers.close({}, complete=True, timeout_s=1.0)
    assert process.returncode == -signal.SIGKILL
    assert "notes did not stop within" in caplog.text
    assert "training continues" not in caplog.text
    assert caplog.text.count("notes does not keep up") == (how == "hangs")


def test_one_that_dies_is_said_and_rows_go_nowhere(make, caplog):
    trackers = make("dies")
    trackers.add(1, {"x": 1.0})
    until(lambda: "training continues without it" in caplog.text)
    for steps in range(10):
        trackers.add(steps, {"x": 1.0})
    trackers.close({}, complete=False)


@pytest.mark.parametrize("rest", ["", '{"steps": 2, "val'])
def test_a_tracker_ends_by_itself_when_the_learner_is_killed(make, tmp_path, rest):
    """Its input ends without a last row, and maybe within one."""
    trackers = make("well")
    trackers.add(1, {"x": 1.0})
    until(lambda: (tmp_path / "notes").exists() and len(notes(tmp_path)) == 2)
    trackers._each[0]._process.stdin.write(rest)
    trackers._each[0]._rows.put(None)
    assert trackers._each[0]._process.wait(120) == 0
    assert notes(tmp_path)[-1] == ["end", {}, False]
    trackers.close({}, complete=False)


def test_the_extra_of_one_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run.trackers has mlflow, which is not installed: .*\[mlflow\]"):
        Trackers(["mlflow"], RUN)


def test_a_run_is_summed_up_at_its_end(make, tmp_path):
    counters = RunCounters(4, StepBudget())
    trackers = make("well")
    reporter = make_reporter(tmp_path, total_steps=100, counters=counters, trackers=trackers)
    counters.budget.report(1, 100)
    reporter.collect(evaluated(5.0))
    reporter.collect(Report("actor-1", "actor", 1, {"actor/env_ms": 3.0}, games([-20, 10])))
    reporter.close()
    begin, *rows, end = notes(tmp_path)
    assert begin == ["begin", RUN.id, 1]
    (added,) = (row[2] for row in rows if "eval/episode_return" in row[2])
    assert (added["eval/episode_return"], added["eval/version"]) == (5.0, 12.0)
    assert ["add", 100, {"actor/env_ms/actor-1": 3.0}] in rows
    what, summary, complete = end
    assert (what, complete) == ("end", True)
    assert summary.pop("final/wall_s") > 0
    assert summary == {
        "final/steps": 100.0,
        "final/updates": 0.0,
        "final/evaluation_return": 5.0,
        "final/training_return": -20.0,
    }


def test_secrets_are_left_out_of_what_is_said():
    variables = {"WANDB_API_KEY": "abcd1234", "HF_TOKEN": "hf_x9", "HOME": "/root", "A_KEY": "x"}
    said = without_secrets("abcd1234 and hf_x9 in /root\nat https://u:p@host/x", variables)
    assert said == "*** and *** in /root at https://***@host/x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://u:p@ss@host/x", "http://***@host/x"),
        ("http://u:a/x@host", "http://***@host"),
        ("GET /x?token=abc&run=1", "GET /x?token=***&run=1"),
        ("Authorization: Bearer zzz.y", "Authorization: Bearer ***"),
        ("/a%2Fbcd", "/***"),
    ],
)
def test_secrets_are_found_in_other_forms(text, said):
    assert without_secrets(text, {"MLFLOW_PASS": "a/bcd"}) == said


def test_nested_values_have_names():
    assert dict(flat({"a": 1, "b": {"c": [2], "d": {"e": ""}}})) == {"a": 1, "b.c": [2], "b.d.e": ""}


# -- the libraries themselves, where they are installed --


def play(name, tmp_path, monkeypatch, resumed=False):
    """A run of two rows, as the learner has it."""
    run = Run(
        "fedcba9876543210", "tried", str(tmp_path / "tried"), {"run": {"seed": 7}, "env": {"id": "gym:X"}}
    )
    Path(run.directory).mkdir(exist_ok=True)
    trackers = Trackers([name], run)
    trackers.add(100 if not resumed else 50, {"train/episode_return": 1.5})
    trackers.add(200, {"train/episode_return": 2.5, "actor/env_ms": 0.5, "actor/env_ms/actor-1": 0.25})
    trackers.close({"final/steps": 200.0, "final/evaluation_return": 9.0}, complete=True, timeout_s=200)


@pytest.mark.slow
def test_mlflow_keeps_a_run(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for resumed in (False, True):
        play("mlflow", tmp_path, monkeypatch, resumed)
    assert not caplog.records
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("troupe").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tried"
    assert run.data.params == {"run.seed": "7", "env.id": "gym:X"}
    assert run.data.metrics["final/evaluation_return"] == 9.0
    assert run.data.metrics["actor/env_ms"] == 0.5
    assert run.data.metrics["actor/env_ms.actor-1"] == 0.25
    history = client.get_metric_history(run.info.run_id, "train/episode_return")
    assert sorted((point.step, point.value) for point in history) == [
        (50, 1.5), (100, 1.5), (200, 2.5), (200, 2.5)
    ]  # fmt: skip


@pytest.mark.slow
def test_mlflow_that_does_not_answer_keeps_nobody(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mlflow")
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:mine@127.0.0.1:{silent.getsockname()[1]}")
        trackers = Trackers(["mlflow"], Run("a" * 16, "tried", str(tmp_path), {}))
        process = trackers._each[0]._process
        for steps in range(2 * MAX_WAITING):
            trackers.add(steps, {"x" * 100: 1.0})
        trackers.close({}, complete=True, timeout_s=1.0)
    assert process.returncode == -signal.SIGKILL
    assert "mine" not in caplog.text


@pytest.mark.slow
def test_wandb_keeps_a_run_offline(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "f" * 40)
    play("wandb", tmp_path, monkeypatch)
    assert not caplog.records
    (folder,) = (tmp_path / "tried" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    stored = file.read_bytes()
    for part in (b"train/episode_return", b"actor/env_ms/actor-1", b"final/evaluation_return", b"gym:X"):
        assert part in stored
    for each in folder.rglob("*"):
        assert not each.is_file() or b"f" * 40 not in each.read_bytes()


@pytest.mark.slow
def test_trackio_keeps_a_run(tmp_path, monkeypatch, caplog):
    pytest.importorskip("trackio")
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    play("trackio", tmp_path, monkeypatch)
    assert not caplog.records
    (file,) = (tmp_path / "trackio").rglob("troupe*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    assert [(step, json.loads(values)["train/episode_return"]) for step, values in rows[:2]] == [
        (100, 1.5), (200, 2.5)
    ]  # fmt: skip
    assert os.path.getsize(file) > 0
