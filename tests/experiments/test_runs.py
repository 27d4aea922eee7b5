"""What run directories say: state, curves, tables, pictures."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.experiments.folders import make_run, told
from troupe.common.errors import ConfigError
from troupe.common.runtime.metrics import CSV_HEADER
from troupe.services.experiments import groups, report, suites
from troupe.services.experiments.runs import find_runs, read_run, read_series

SUITE_FILES = Path(__file__).parents[2] / "configs" / "suites"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["metrics.csv", "episodes.csv", "status.json"])
def test_a_pipe_or_a_device_in_place_of_a_file_is_not_waited_for(name, tmp_path):
    run = make_run(tmp_path / "a")
    for make in (os.mkfifo, lambda file: os.symlink("/dev/zero", file)):
        (run / name).unlink(missing_ok=True)
        make(run / name)
        read_run(run)


def test_a_run_is_done_or_stopped_or_running(tmp_path):
    assert read_run(make_run(tmp_path / "a")).state == "done"
    run = make_run(tmp_path / "b", steps=5)
    (run / ".lock").touch()
    assert (read_run(run).state, read_run(run).steps) == ("stopped", 5)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(run).state == "running"
    assert read_run(run).state == "stopped"


def test_a_run_without_a_launcher_is_running_while_its_learner_writes(tmp_path):
    run = make_run(tmp_path / "a", steps=5)
    assert read_run(run).state == "running"
    before_s = time.time() - 3600
    os.utime(run / "status.json", (before_s, before_s))
    assert read_run(run).state == "stopped"


def test_what_a_resumed_run_made_twice_counts_once(tmp_path):
    rows = [CSV_HEADER]
    for steps, wall_s, value in ((10, 1, 1), (20, 2, 2), (30, 3, 3), (20, 4, 5), (40, 5, 6)):
        rows.append(f"{wall_s},{steps},0,0,evaluator,eval/episode_return,{value}")
    rows += ["6,40,0,0,evaluator,eval/episode_return,nan", "6,50,0,0,evaluator,eval/epis"]
    rows.insert(3, "2,\u00b2,0,0,evaluator,eval/episode_return,9")  # a digit that is no number
    (tmp_path / "metrics.csv").write_text("\n".join(rows), "utf-8")
    series = read_series(tmp_path / "metrics.csv", ["eval/episode_return"])["eval/episode_return"]
    assert (series.steps, series.wall_s, series.values) == ([10, 20, 40], [1, 4, 5], [1, 5, 6])


def test_rows_of_other_metrics_tell_where_a_resumed_run_began(tmp_path):
    rows = [
        CSV_HEADER,
        "1,100,0,0,evaluator,eval/episode_return,1",
        "2,300,0,0,evaluator,eval/episode_return,2",
    ]
    rows += ["3,200,0,0,learner,speed/steps_per_s,5", "4,400,0,0,evaluator,eval/episode_return,3"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    series = read_series(tmp_path / "metrics.csv", ["eval/episode_return"])["eval/episode_return"]
    assert series.steps == [100, 400]


def test_evaluations_go_back_among_the_other_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    at = [(1, "learner", "y"), (9, "learner", "y"), (0, "evaluator", "eval/r"), (12, "learner", "y")]
    at += [(8, "evaluator", "eval/r"), (11, "evaluator", "eval/r")]
    at += [(10, "evaluator", "eval/r"), (10, "learner", "y")]  # resumed from 10 steps
    rows = [f"{steps / 10},{steps},{steps},1,{source},{name},{steps}" for steps, source, name in at]
    path.write_text("\n".join([CSV_HEADER, *rows]) + "\n")
    found = read_series(path, ["eval/r", "y"])
    assert found["eval/r"].steps == [0, 8, 10]
    assert found["y"].steps == [1, 9, 10]


def test_evaluations_that_are_dated_late_are_told_of(tmp_path, capsys):
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", run__seed=2)
    with (new / "metrics.csv").open("a") as file:
        file.write("10,100,100,1,evaluator,eval/age_s,3\n20,200,200,1,evaluator,eval/age_s,3\n")
    assert cli.main(["compare", str(old), str(new)]) == 0
    assert "1 run of an older version of Troupe: evaluations are dated there" in capsys.readouterr().out
    assert cli.main(["compare", str(new)]) == 0
    assert "older version" not in capsys.readouterr().out


def test_runs_are_found_below_directories_but_not_within_runs(tmp_path):
    for name in ("x/a", "x/deep/er/b", "c"):
        make_run(tmp_path / name)
    make_run(tmp_path / "c" / "replay" / "inner")
    found = find_runs([tmp_path / "x", tmp_path / "c", tmp_path / "x" / "a"])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["x/a", "x/deep/er/b", "c"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no run in"):
        find_runs([tmp_path / "x", tmp_path / "empty"])


def test_groups_are_what_differs_but_seeds_and_addresses(tmp_path):
    for seed in ("1", "2"):
        for rate in ("0.001", "0.1"):
            make_run(
                tmp_path / f"{rate}-{seed}",
                run__seed=seed,
                agent__learning_rate=rate,
                net__control=f"tcp://127.0.0.1:70{seed}",
            )
    found = groups.compare([read_run(path) for path in find_runs([tmp_path])])
    assert (found.by, found.labels) == (["agent.learning_rate"], ["learning_rate=0.001", "learning_rate=0.1"])
    assert [[run.fields["run.seed"] for run in group.runs] for group in found.groups] == [[1, 2], [1, 2]]


def test_runs_of_several_presets_are_told_apart_by_them(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", agent__gamma="0.9")
    make_run(tmp_path / "c", "cartpole-pqn")
    found = groups.compare([read_run(path) for path in find_runs([tmp_path])])
    assert found.by == ["run.preset", "agent.gamma"]
    assert found.labels == [f"cartpole-ppo gamma={g}" for g in ("0.99", "0.9")] + ["cartpole-pqn gamma=0.99"]


def test_runs_without_a_preset_are_told_apart_by_their_algorithms(tmp_path):
    """`troupe train --algo` writes no preset, and its values differ in all that the environments do."""
    own = {"run__preset": ""}
    make_run(tmp_path / "a", env__id="gym:CartPole-v1", **own)
    make_run(tmp_path / "b", env__id="gym:Acrobot-v1", agent__learning_rate="0.1", **own)
    make_run(tmp_path / "c", "cartpole-pqn", **own)
    runs = [read_run(path) for path in find_runs([tmp_path])]
    assert groups.compare(runs[:2]).labels == [""]
    found = groups.compare(runs)
    assert found.by == ["agent.algorithm"]
    assert found.labels == ["algorithm=policy_gradient", "algorithm=pqn"]
    make_run(tmp_path / "d", "cartpole-pqn")
    mixed = groups.compare([*runs, read_run(tmp_path / "d")])
    assert mixed.labels == ["algorithm=policy_gradient", "algorithm=pqn", "cartpole-pqn algorithm=pqn"]


def test_compare_by_a_field_and_in_json(tmp_path, capsys):
    for seed, value in ((1, 3.0), (2, 5.0), (3, 10.0)):
        make_run(tmp_path / "r" / str(seed), returns=[(10, 20.0), (50, value)], run__seed=str(seed))
    assert cli.main(["compare", "r", "--json"]) == 0
    [group] = told(capsys)["groups"]
    assert (group["finals"], group["bests"]) == ([3, 5, 10], [20, 20, 20])
    assert group["mean"]["value"] == 6
    assert 3 <= group["mean"]["low"] < 6 < group["mean"]["high"] <= 10
    assert cli.main(["compare", "r", "--json", "--by", "seed"]) == 0
    by_seed = told(capsys)["groups"]
    assert [group["label"] for group in by_seed] == ["seed=1", "seed=2", "seed=3"]
    # One run says nothing of how runs differ.
    assert by_seed[0]["mean"] == {"value": 3, "low": None, "high": None}


def test_steps_of_a_group_are_those_of_the_runs_that_count(tmp_path, capsys):
    make_run(tmp_path / "r" / "1", returns=[(500, 3.0)], steps=500, run__seed="1")
    make_run(tmp_path / "r" / "2", returns=(), steps=0, run__seed="2")
    assert cli.main(["compare", "r"]) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("all runs")]
    assert (row[2], row[-2]) == ("1", "500")


def test_runs_that_have_not_made_all_their_steps_are_named(tmp_path, capsys):
    make_run(tmp_path / "r" / "whole", returns=[(500, 3.0)], run__seed="1")
    make_run(tmp_path / "r" / "none", returns=(), steps=0, run__seed="2")
    assert cli.main(["compare", "r"]) == 0
    assert "incomplete" not in capsys.readouterr().out
    for seed in range(3, 8):
        path = make_run(tmp_path / "r" / f"part-{seed}", returns=[(500, 5.0)], steps=500, run__seed=seed)
        (path / ".lock").touch()  # a launcher's, which has ended
    assert cli.main(["compare", "r"]) == 0
    out = capsys.readouterr().out
    parts = [f"part-{seed} (stopped at 500 of 100,000 steps)" for seed in (3, 4, 5)]
    assert f"incomplete: {', '.join(parts)} and 2 more\n" in out
    assert "all runs  6 (5 incomplete)  4.67 [" in out
    assert cli.main(["compare", "r", "--json"]) == 0
    [group] = told(capsys)["groups"]
    steps = dict(zip([Path(run).name for run in group["runs"]], group["steps"], strict=True))
    assert (steps["part-3"], set(group["total_steps"])) == (500, {100_000})
    assert sorted(group["states"]) == ["done", "running", *["stopped"] * 5]
    assert cli.main(["compare", "r", "--steps", "400-500"]) == 0  # all have come as far
    assert "incomplete" not in capsys.readouterr().out


def test_compare_over_steps_is_a_mean_over_these_steps(tmp_path, capsys):
    curve = [(10, 90.0), (20, 1.0), (50, 3.0), (60, 70.0)]
    for seed in ("1", "2"):
        make_run(tmp_path / "r" / seed, returns=curve, run__seed=seed)
    make_run(tmp_path / "r" / "none", returns=[(10, 7.0)])
    assert cli.main(["compare", "r", "--json", "--steps", "10-5_0"]) == 0
    said = told(capsys)
    # 10 steps tell of 1, 30 of 3; of a run without any value there is none.
    assert (said["span"], said["groups"][0]["finals"]) == ([10, 50], [2.5, 2.5])
    assert cli.main(["compare", "r", "--steps", "15-20"]) == 0
    assert "the mean of each run from 15 to 20 steps" in capsys.readouterr().out
    assert cli.main(["compare", "r", "--steps", "1000-2000"]) == 2
    assert "no run has values of eval/episode_return from 1,000 to 2,000" in capsys.readouterr().err


def test_groups_are_called_what_their_runs_call_themselves(tmp_path):
    def labels():
        return groups.compare([read_run(path) for path in find_runs([tmp_path])]).labels

    for name, gamma in (("short", "0.9"), ("long", "0.999")):
        for seed in ("1", "2"):
            make_run(tmp_path / f"{name}{seed}", run__name=name, agent__gamma=gamma, run__seed=seed)
    assert labels() == ["long", "short"]
    make_run(tmp_path / "other", run__name="short", agent__gamma="0.5")
    assert labels() == ["gamma=0.999", "gamma=0.5", "gamma=0.9"]  # a name for two settings says too little


def test_scores_over_several_tasks_are_normalised(tmp_path, capsys):
    # Pong: random -20.7, human 14.6; Breakout: 1.7 and 30.5. Breakout beyond human makes up for nothing.
    halves = {"pong": (-20.7 + 14.6) / 2, "breakout": 1.7 + 2 * (30.5 - 1.7)}
    for game, value in halves.items():
        for seed in ("1", "2"):
            make_run(
                tmp_path / game / seed, "pong-ppo", [(10, value)], env__id=f"atari:{game}", run__seed=seed
            )
    assert cli.main(["compare", ".", "--json"]) == 0
    [scores] = told(capsys)["normalized"]
    assert (scores["tasks"], scores["tasks_without_reference"]) == (2, 0)
    found = {name: scores[name]["value"] for name in ("mean", "median", "iqm", "optimality_gap")}
    assert found == pytest.approx({"mean": 1.25, "median": 1.25, "iqm": 1.25, "optimality_gap": 0.25})
    assert cli.main(["compare", ".", "--suite", "atari5"]) == 0
    assert "0 of 5" not in capsys.readouterr().out  # none of its games: no line
    assert cli.main(["compare", "."]) == 0
    assert "1.25 [1.25, 1.25]" in capsys.readouterr().out


def test_training_returns_stand_in_where_nothing_was_evaluated(tmp_path):
    run = make_run(tmp_path / "a", returns=[])
    with (run / "metrics.csv").open("a") as file:
        file.write("1,10,10,1,actors,train/episode_return,7\n")
    found = groups.compare([read_run(run)])
    assert (found.metric, found.groups[0].finals) == ("train/episode_return", [7])


def test_the_overview_lists_runs_and_what_cannot_be_read(tmp_path, capsys):
    make_run(tmp_path / "runs" / "new", returns=[(100, 12.5)])
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "config.toml").write_text("[[[")
    assert cli.main(["runs"]) == 0
    header, bad, new = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run",
        "preset",
        "environment",
        "state",
        "steps",
        "done",
        "evaluation",
        "changed",
    ]
    assert "unreadable" in bad
    assert len(new) < 100 < len(bad)  # the words of the error widen no column
    assert new.split()[:7] == [
        *("runs/new", "cartpole-ppo", "gym:CartPole-v1", "done", "100,000", "100%", "12.50")
    ]


def test_runs_that_cannot_be_read_are_named_and_left_out(tmp_path, capsys):
    make_run(tmp_path / "runs" / "good")
    make_run(tmp_path / "runs" / "cut").joinpath("config.toml").write_text("[run]\ntotal_st")
    for line in ("compare runs --json", "plot runs --out p.png"):
        assert cli.main(line.split()) == 0
        stdout, stderr = capsys.readouterr()
        assert stderr.startswith("troupe: left out: runs/cut/config.toml is not valid TOML")
        assert stderr.count("\n") == 1
        assert "cut" not in stdout
    assert cli.main(["compare", "runs/cut"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_pictures_have_the_curves(tmp_path):
    from matplotlib.figure import Figure

    for seed in (1, 2):
        make_run(tmp_path / "r" / str(seed), returns=[(10, seed), (20, 3 * seed)], run__seed=str(seed))
    drawn = []
    original = Figure.savefig

    def savefig(figure, *args, **kwargs):
        drawn.append(figure)
        original(figure, *args, **kwargs)

    Figure.savefig = savefig
    try:
        assert cli.main(["plot", "r", "--out", "out/p.png", "--title", "Two"]) == 0
    finally:
        Figure.savefig = original
    assert (tmp_path / "out" / "p.png").read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    steps, minutes = figure.axes
    runs, mean = steps.lines[:2], steps.lines[2]
    assert [list(line.get_ydata()) for line in runs] == [[1, 3], [2, 6]]
    np.testing.assert_allclose(mean.get_ydata()[[0, -1]], [1.5, 4.5])
    np.testing.assert_allclose(minutes.lines[0].get_xdata(), [1 / 60, 2 / 60])


def test_there_is_no_picture_of_runs_without_values(tmp_path, capsys):
    make_run(tmp_path / "r", returns=[])
    assert cli.main(["plot", "r"]) == 2
    assert "no values of eval/episode_return" in capsys.readouterr().err
    assert not (tmp_path / "curves.png").exists()


def test_every_suite_is_of_known_environments():
    from troupe.common.envs import dmlab, minatar

    assert [
        name for name, games in suites.SUITES.items() if len(games) != int("".join(filter(str.isdigit, name)))
    ] == []
    assert list(suites.load("minatar5")) == [f"minatar:{game}" for game in minatar.GAMES]
    assert list(suites.load("dmlab30")) == [f"dmlab:{level}" for level in dmlab.DMLAB30]
    assert all(
        reference for name in ("atari57", "atari5", "dmlab30") for reference in suites.load(name).values()
    )
    roms = pytest.importorskip("ale_py.roms").get_all_rom_ids()
    assert {env_id.removeprefix("atari:") for env_id in suites.load("atari57")} <= set(roms)


@pytest.mark.parametrize("path", sorted(SUITE_FILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_is_of_known_environments_with_scores(path):
    known = {env_id for name in suites.SUITES for env_id in suites.load(name)}
    suite = suites.load(str(path))
    assert set(suite) <= known
    assert all(suite.values())


def test_a_suite_of_ones_own(tmp_path):
    (tmp_path / "s.toml").write_text(
        '[tasks."gym:CartPole-v1"]\nlow = 22\nhigh = 500\n[tasks."atari:pong"]\n[tasks."gym:Acrobot-v1"]\n'
    )
    assert suites.load("s.toml") == {
        "gym:CartPole-v1": (22, 500),
        "atari:pong": (-20.7, 14.6),
        "gym:Acrobot-v1": None,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tasks]", r"should have a table \[tasks"),
        ("[other]\nx = 1", "and nothing else"),
        ("[tasks.a]\nlow = 1", "two numbers, low and high"),
        ("[tasks.a]\nlow = 1\nhigh = true", "two numbers"),
        ("[tasks.a]\nlow = 2\nhigh = 1", "low .2. should be less than high .1."),
        ("[tasks]\na = 1", "should be a table"),
    ],
)
def test_a_suite_that_is_none(tmp_path, text, words):
    (tmp_path / "s.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        suites.load("s.toml")


def test_a_table_is_as_wide_as_it_takes():
    assert report.table(["a", "bb"], [["long name", "1"]]) == ["a          bb", "long name   1"]


def test_labels_are_short_where_that_is_clear():
    fields = {"a.x": 1, "b.x": 2, "c.y": [1], "run.preset": "/some/where/mine.toml"}
    assert groups.labelled([fields], list(fields)) == ["a.x=1 b.x=2 y=[1] mine"]


BAD = [
    ("runs", ["runs does not exist"]),
    ("runs FILE", ["FILE is not a directory"]),
    ("runs EMPTY", ["there is no run in EMPTY"]),
    ("compare", ["RUN"]),
    ("compare R --by agent.gama", ["'agent.gama'", "nearest: agent.gamma"]),
    ("compare R --metric nothing", ["no run has values of 'nothing'"]),
    ("compare R --steps 5-3", ["--steps", "such as 20_000-40_000", "'5-3'"]),
    ("compare R --suite attari5", ["unknown suite 'attari5'", "nearest: atari5"]),
    ("plot R --out p.bmp", ["p.bmp", ".png"]),
    ("plot R --out FILE/p.png", ["cannot create"]),
    ("plot R --labels a,b", ["--labels should name 1 groups, in this order: all runs"]),
    ("plot R --size 6", ["--size", "6x4", "'6'"]),
    ("plot R --smooth 2", ["--smooth", "from 0 to 1"]),
    ("plot R --csv FILE/p.csv", ["cannot create"]),
    ("plot R --agent.gamma 1", ["unknown argument --agent.gamma"]),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line(line, words, tmp_path, capsys):
    make_run(tmp_path / "R")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    assert cli.main(line.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    for word in words:
        assert word in stderr
