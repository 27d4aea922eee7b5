"""Sweeps as the page has them: trials, what they differ in, and what that decides."""

import json
import math
import shutil
import sys

import pytest

from tests.board.test_hostile import device, folder, huge, nested, noise, pipe
from tests.experiments.folders import make_run, make_sweep
from tests.harness import until
from troupe.services.board import sweeps
from troupe.services.board.library import Library

RATE = {"low": 1e-5, "high": 1e-2, "log": True}
SEARCH = {"agent": {"learning_rate": RATE, "gamma": [0.95, 0.99]}}


def by_rate(fields):
    """Worth more the nearer the learning rate is to 1e-3; nothing else counts."""
    return 100 - 30 * abs(math.log10(fields["agent.learning_rate"]) + 3)


def found(board, name):
    """The sweep of this name, as its page gets it, once every run has been read."""
    rows = until(lambda: (told := board.json("runs"))["complete"] and told["sweeps"])
    return board.json(f"sweeps/{next(row['id'] for row in rows if row['name'] == name)}")


def test_a_search_has_trials_on_axes_and_the_field_that_decides(serve, tmp_path):
    states = ["pruned", "failed", "waiting"]
    make_sweep(tmp_path / "runs/sweep-lr", {"search": SEARCH, "trials": 23}, by_rate, states)
    board = serve(tmp_path)
    sweep = found(board, "runs/sweep-lr")
    assert (sweep["kind"], sweep["preset"]) == ("random search", "cartpole-ppo")
    assert sweep["counts"] == {"pruned": 1, "failed": 1, "waiting": 1, "done": 20}
    assert sweep["axes"] == [
        {"field": "agent.learning_rate", "label": "learning_rate", **RATE},
        {"field": "agent.gamma", "label": "gamma", "values": ["0.95", "0.99"]},
    ]
    first, failed, waiting, *done = sweep["trials"]
    assert (first["state"], waiting["score"], failed["error"]) == ("pruned", None, "out of memory")
    fields = json.loads((tmp_path / "runs/sweep-lr/sweep.json").read_text())["runs"]["trial-0003"]["fields"]
    assert done[0]["at"] == pytest.approx(
        [fields["agent.learning_rate"], float(fields["agent.gamma"] == 0.99)]
    )
    assert done[0]["score"] == pytest.approx(by_rate(fields), rel=1e-5)
    assert board.ask(f"/api/runs/{done[0]['runs'][0][0]}")[0] == 200
    told = sweep["importances"][""]
    assert (told["trials"], told["why"]) == (20, "")  # completed ones: pruned trials were cut short
    assert told["shares"][0] > 0.8
    assert sum(told["shares"]) == pytest.approx(1.0, abs=0.01)
    # Only what is new is sent again.
    assert board.json(f"sweeps/{sweep['id']}", after=sweep["state"]) == {"state": sweep["state"]}
    row = board.json("runs")["sweeps"][0]
    assert (row["runs"], row["over"]) == (23, 22)
    assert row["best"] == max(trial["score"] for trial in done)


def test_the_best_score_of_a_sweep_is_that_of_a_trial_that_was_completed(serve, tmp_path):
    scores = iter([30.0, 20.0, 10.0, 5.0])
    section = {"search": SEARCH, "trials": 4}
    make_sweep(tmp_path / "runs/sweep-lr", section, lambda fields: next(scores), ["pruned", "paused"])
    assert serve(tmp_path).json("runs")["sweeps"][0]["best"] == 10.0


def test_seeds_are_one_trial_and_environments_are_apart(serve, tmp_path):
    grid = {"agent": {"learning_rate": [0.001, 0.01]}, "env": {"id": ["gym:CartPole-v1", "gym:Acrobot-v1"]}}
    make_sweep(
        tmp_path / "grid", {"grid": grid, "seeds": 2}, lambda fields: by_rate(fields) + fields["run.seed"]
    )
    make_sweep(tmp_path / "seeds", {"seeds": 3}, lambda fields: 1.0 + fields["run.seed"])
    board = serve(tmp_path)
    sweep = found(board, "grid")
    trials = [
        (trial["number"], trial["task"], trial["score"], len(trial["runs"])) for trial in sweep["trials"]
    ]
    assert trials == [
        *[(0, "gym:CartPole-v1", 100.5, 2), (0, "gym:Acrobot-v1", 100.5, 2)],
        *[(1, "gym:CartPole-v1", 70.5, 2), (1, "gym:Acrobot-v1", 70.5, 2)],
    ]
    assert "two fields" in sweep["importances"]["gym:Acrobot-v1"]["why"]
    sweep = found(board, "seeds")
    assert (sweep["axes"], [trial["score"] for trial in sweep["trials"]]) == ([], [1.0, 2.0, 3.0])


def test_it_says_why_there_are_no_importances(serve, tmp_path, monkeypatch):
    values = {"learning_rate": [0.1, 0.2, 0.3, 0.4], "gamma": [0.9, 0.95, 0.99]}
    make_sweep(tmp_path / "few", {"grid": {"agent": values}}, by_rate, ["waiting"] * 3)
    make_sweep(tmp_path / "same", {"grid": {"agent": values}}, lambda fields: 7.0)
    make_sweep(tmp_path / "many", {"grid": {"agent": values}}, by_rate)
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it is not installed
    board = serve(tmp_path)
    whys = {name: found(board, name)["importances"][""]["why"] for name in ("few", "same", "many")}
    assert whys["few"] == "Importances need at least 10 completed trials; there are 9."
    assert whys["same"] == "All completed trials have the same score."
    assert "Optuna, which is not installed: " in whys["many"]
    assert "search" in whys["many"]


def test_a_trial_that_ends_is_told(serve, tmp_path):
    make_sweep(tmp_path / "lr", {"seeds": 2}, lambda fields: 1.0, ["waiting"])
    board = serve(tmp_path)
    sweep = found(board, "lr")
    assert [trial["state"] for trial in sweep["trials"]] == ["waiting", "done"]
    make_run(tmp_path / "lr/runs/seed=0", returns=[(1000, 5.0)])
    board.look_again()
    again = board.json(f"sweeps/{sweep['id']}", after=sweep["state"])
    assert [(trial["state"], trial["score"]) for trial in again["trials"]] == [("done", 5.0), ("done", 1.0)]


@pytest.mark.parametrize("damage", [pipe, device, folder, noise, huge, nested])
def test_a_damaged_record_is_that_sweeps_matter(serve, tmp_path, damage):
    make_sweep(tmp_path / "sound", {"seeds": 2}, lambda fields: 1.0)
    damage(make_sweep(tmp_path / "damaged", {"seeds": 2}, lambda fields: 1.0), "sweep.json")
    board = serve(tmp_path)
    assert len(board.runs(4)) == 4
    rows = {row["name"]: row for row in board.json("runs")["sweeps"]}
    assert rows["sound"]["over"] == 2
    if "damaged" in rows:  # what is no regular file is no record
        assert "cannot be read" in rows["damaged"]["problem"]
        assert board.ask(f"/api/sweeps/{rows['damaged']['id']}")[0] == 400
    assert board.ask("/api/sweeps/none")[0] == 404


@pytest.mark.parametrize(
    "change",
    [
        {"tables": {"sweep": {"search": [[]], "grid": 7}}},
        {"preset": {"a": []}},
        {"runs": {"../../etc": {"fields": {}}}},
        {"runs": {"x": {"fields": {"a.b": 1e400, "c.d": 10**400}, "state": []}, "y": {"fields": {}}}},
        {"runs": {"<b>": {"fields": {"<i>": {"deep": [None]}}}, "y": {"fields": {}}, "z": 3}},
        {"runs": {"\ud800": {"fields": {}}, "y": {"fields": {}}}},
        {"runs": []},
        {"population": []},
        {"population": {"generations": [{"steps": 1, "scores": {}, "errors": {}, "copies": [1]}]}},
        {"population": {"generations": [{"steps": [], "scores": 1, "errors": 1, "copies": {"x": {}}}]}},
    ],
    ids=str,
)  # fmt: skip
def test_a_strange_record_is_that_sweeps_matter(serve, tmp_path, change):
    file = make_sweep(tmp_path / "lr", {"seeds": 2}, lambda fields: 1.0) / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    board = serve(tmp_path)
    board.runs(2)
    (row,) = board.json("runs")["sweeps"]
    assert board.ask(f"/api/sweeps/{row['id']}")[0] in (200, 400)


def test_scores_beyond_all_measure_are_not_added_up(serve, tmp_path):
    make_sweep(tmp_path / "lr", {"grid": {"agent": {"gamma": [0.9]}}, "seeds": 2}, lambda fields: 1.7e308)
    board = serve(tmp_path)
    board.runs(2)
    assert board.json("runs")["sweeps"][0]["best"] is None


def test_no_record_is_read_again_where_there_are_many(tmp_path, monkeypatch):
    make_sweep(tmp_path / "0", {"seeds": 1}, lambda fields: 1.0, ["waiting"])
    for number in range(1, 70):
        shutil.copytree(tmp_path / "0", tmp_path / str(number))
    library, read = Library([tmp_path]), []
    monkeypatch.setattr(sweeps, "_read", lambda folder, of=sweeps._read: read.append(folder) or of(folder))
    library.refresh()
    known = sweeps.Sweeps(library)
    assert [row["runs"] for row in (*known.rows(), *known.rows())] == [1] * 140
    assert len(read) == 70


def test_a_population_says_which_runs_went_on_as_others(serve, tmp_path):
    section = {"search": SEARCH, "trials": 3, "population": {"interval_steps": 100}}
    folder = make_sweep(tmp_path / "runs/sweep-p", section, by_rate)
    record = json.loads((folder / "sweep.json").read_text())
    copy = {"source": "trial-0002", "values": {}, "checkpoint": "step-000000000100"}
    generation = {"scores": {}, "errors": {}, "copies": {"trial-0000": copy}}
    record["population"]["generations"] = [{**generation, "steps": steps} for steps in (100, 200)]
    (folder / "sweep.json").write_text(json.dumps(record))
    sweep = found(serve(tmp_path), "runs/sweep-p")
    assert sweep["kind"] == "population"
    assert [trial["copies"] for trial in sweep["trials"]] == [
        "goes on as trial-0002 at 100 steps, trial-0002 at 200 steps",
        "",
        "",
    ]
    assert sweep["importances"][""]["why"].startswith("The runs of a population change")
