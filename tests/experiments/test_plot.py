"""Pictures of runs: what is drawn, checked by the table of its numbers."""

from __future__ import annotations

import csv

import numpy as np
import pytest

import troupe.services.__main__ as cli
from tests.experiments.folders import make_run
from troupe.common.stats.intervals import bootstrap, iqm
from troupe.services.experiments import groups
from troupe.services.experiments.runs import read_episodes, read_run


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def plotted(*words):
    """The rows of the table of a picture."""
    assert cli.main(["plot", *words, "--csv", "p.csv"]) == 0
    with open("p.csv") as file:
        return list(csv.DictReader(file))


def lines(rows, **fields):
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def column(rows, name):
    return [float(row[name]) for row in rows]


def trained(run, *values):
    """Give a run returns in training, every ten steps."""
    with (run / "metrics.csv").open("a") as file:
        for i, value in enumerate(values, 1):
            file.write(f"{i},{10 * i},{10 * i},1,actors,train/episode_return,{value}\n")
    return run


def played(run, games):
    """Give a run games in training: `(steps, return)`."""
    rows = [f"{steps / 10},{steps},actor-0,0,1,{value},5" for steps, value in games]
    text = "\n".join(["wall_s,steps,actor,slot,version,return,length", *rows, "1.0,half a li"])
    (run / "episodes.csv").write_text(text)
    return run


def test_the_table_has_runs_and_means_over_both_axes(tmp_path):
    for seed in (1, 2):
        make_run(tmp_path / "r" / str(seed), returns=[(10, seed), (20, 3 * seed)], run__seed=str(seed))
    rows = plotted("r", "--out", "p.svg")
    assert column(lines(rows, axis="steps", run="2"), "value") == [2, 6]
    mean = lines(rows, axis="steps", run="")
    np.testing.assert_allclose(column(mean, "value")[::99], [1.5, 4.5])
    assert column(mean, "low")[0] == 1
    assert column(mean, "high")[0] == 2
    assert column(lines(rows, axis="minutes", run="1"), "x") == pytest.approx([1 / 60, 2 / 60], rel=1e-6)


def test_smoothing_is_the_mean_over_a_share_of_the_axis_before(tmp_path):
    make_run(tmp_path / "r", returns=[(0, 0), (50, 10), (90, 20), (100, 60)])
    rows = plotted("r", "--x", "steps", "--smooth", "0.1")
    assert column(rows, "value") == [0, 10, 20, 40]
    assert column(plotted("r", "--x", "steps", "--smooth", "1"), "value") == [0, 5, 10, 22.5]


def test_labels_size_and_pictures_without_single_runs(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    for seed in (1, 2):
        for gamma in ("0.9", "0.8"):
            make_run(tmp_path / "r" / f"{gamma}-{seed}", run__seed=str(seed), agent__gamma=gamma)
    assert {row["group"] for row in plotted("r", "--labels", "near,far")} == {"near", "far"}
    plotted("r", "--no-runs", "--x", "steps", "--size", "6x4")
    with_runs, without = drawn
    assert len(with_runs.axes[0].lines) == 6
    assert len(without.axes[0].lines) == 2
    assert tuple(without.get_size_inches()) == (6, 4)


def test_a_task_that_was_not_evaluated_has_returns_in_training(tmp_path, capsys):
    """And not an empty panel, because another task was evaluated."""
    make_run(tmp_path / "r" / "a")
    trained(make_run(tmp_path / "r" / "b", returns=[], env__id="gym:Acrobot-v1"), *range(12))
    rows = plotted("r")
    assert column(lines(rows, task="gym:Acrobot-v1"), "value") == list(range(12))
    assert column(lines(rows, task="gym:CartPole-v1"), "value") == [1, 2]
    told = capsys.readouterr().out
    assert "gym:Acrobot-v1: not every run was evaluated, so its values are of train/episode_return" in told
    assert cli.main(["compare", "r"]) == 0
    assert "gym:Acrobot-v1: not every run was evaluated" in capsys.readouterr().out


def test_runs_of_a_task_are_compared_by_what_all_of_them_have(tmp_path, capsys):
    trained(make_run(tmp_path / "r" / "a", returns=[(1, 9.0)]), 5, 6)
    trained(make_run(tmp_path / "r" / "b", returns=[], run__seed="2"), 7, 8)
    found = groups.compare([read_run(tmp_path / "r" / name) for name in "ab"])
    assert (found.metric, found.groups[0].finals) == ("train/episode_return", [6, 8])
    make_run(tmp_path / "r" / "c", returns=[], run__seed="3")
    assert cli.main(["compare", "r"]) == 0
    assert "no values yet: b, c" in capsys.readouterr().out


def test_a_short_run_has_a_curve_of_its_games(tmp_path):
    run = trained(make_run(tmp_path / "r", returns=[]), 50)
    played(run, [(20, 1.0), (10, 0.0), *((30 + i, float(i)) for i in range(38))])
    rows = plotted("r", "--x", "steps")
    assert column(rows, "x") == [37, 47, 57, 67]
    assert column(rows, "value") == [(0 + 1 + sum(range(8))) / 10, 12.5, 22.5, 32.5]
    assert read_episodes(played(make_run(tmp_path / "s"), [(1, 2.0)]) / "episodes.csv").values == [2.0]
    assert not read_episodes(tmp_path / "none.csv")


def test_short_runs_and_long_ones_are_compared_by_the_same_means(tmp_path):
    short = played(trained(make_run(tmp_path / "a", returns=[]), 50), [(i, 1.0) for i in range(40)])
    long = trained(make_run(tmp_path / "b", returns=[], run__seed="2"), *range(20))
    runs = [read_run(short), read_run(long)]
    assert groups.compare(runs).groups[0].finals == [50, 19]  # of one the games are not known
    played(long, [(i, 2.0) for i in range(400)])
    assert groups.compare(runs).groups[0].finals == [1, 2]
    assert groups.compare(runs[1:]).groups[0].finals == [19]


def test_a_profile_is_the_share_of_runs_above_each_score(tmp_path):
    for seed, value in enumerate((1.0, 2.0, 4.0)):
        make_run(tmp_path / "r" / str(seed), returns=[(10, value)], run__seed=str(seed))
    rows = plotted("r", "--kind", "profile")
    for row in rows:
        assert float(row["value"]) == pytest.approx(sum(v > float(row["x"]) for v in (1, 2, 4)) / 3, rel=1e-6)
    assert any(float(row["low"]) < float(row["value"]) < float(row["high"]) for row in rows)


def test_aggregates_are_those_of_the_table_of_a_suite(tmp_path, capsys):
    suite = '[tasks."gym:CartPole-v1"]\nlow = 0\nhigh = 10\n[tasks."gym:Acrobot-v1"]\nlow = -10\nhigh = 0\n'
    (tmp_path / "s.toml").write_text(suite)
    for seed in range(3):
        make_run(tmp_path / "r" / f"c{seed}", returns=[(10, 5 + seed)], run__seed=str(seed))
        fields = {"run__seed": str(seed), "env__id": "gym:Acrobot-v1"}
        make_run(tmp_path / "r" / f"a{seed}", returns=[(10, -5 + seed)], **fields)
    rows = plotted("r", "--kind", "aggregates", "--suite", "./s.toml")
    assert [row["axis"] for row in rows] == ["median", "IQM", "mean", "optimality gap"]
    found = bootstrap([[0.5, 0.6, 0.7], [0.5, 0.6, 0.7]], iqm)
    row = lines(rows, axis="IQM")[0]
    assert column([row], "value") + column([row], "low") + column([row], "high") == pytest.approx(
        [found.value, found.low, found.high], rel=1e-6
    )
    assert cli.main(["plot", "r", "--kind", "profile"]) == 2
    assert "no scores to normalise by: name them in a file, --suite FILE" in capsys.readouterr().err
