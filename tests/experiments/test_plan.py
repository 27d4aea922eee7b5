"""What a sweep file means, and what is refused before any run begins."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from troupe.common.config import load_layers
from troupe.common.errors import ConfigError
from troupe.services.experiments import checks, plan, space
from troupe.services.experiments.plan import SECTION

STUDIES = Path(__file__).parents[2] / "configs" / "sweeps"


def sweep(tables, overrides=None, **options):
    return plan.parse("f.toml", {SECTION: {"preset": "cartpole-ppo", **tables}, **options}, overrides or {})


def settings(tables, *names, overrides=None, **options):
    return [
        tuple(run.fields.get(name) for name in names) for run in sweep(tables, overrides, **options).runs()
    ]


GRID = {"agent": {"gamma": [0.9, 0.99], "learning_rate": [1e-3, 1e-4, 1e-5]}}


def test_a_grid_is_every_combination_with_every_seed():
    found = settings({"grid": GRID, "seeds": [4, 7]}, "agent.gamma", "agent.learning_rate", "run.seed")
    assert sorted(found) == sorted(itertools.product([0.9, 0.99], [1e-3, 1e-4, 1e-5], [4, 7]))


def test_names_are_what_differs_and_stay_when_the_sweep_grows():
    small = {run.name: run.fields for run in sweep({"grid": GRID, "seeds": 2}).runs()}
    grown = {"agent": {**GRID["agent"], "gamma": [0.5, 0.9, 0.99]}}
    large = {run.name: run.fields for run in sweep({"grid": grown, "seeds": 3}).runs()}
    assert "gamma=0.9,learning_rate=0.001,seed=1" in small
    assert small.items() <= large.items()


def test_a_list_is_its_entries_and_multiplies_with_a_grid():
    entries = [{"agent": {"gamma": 0.9}}, {"agent": {"gamma": 0.5}, "replay": {"batch_size": 8}}]
    found = settings(
        {"list": entries, "grid": {"run": {"log_every_s": [1.0, 2.0]}}},
        "agent.gamma",
        "replay.batch_size",
        "run.log_every_s",
        "run.seed",
    )
    assert found == [(0.9, None, 1, None), (0.9, None, 2, None), (0.5, 8, 1, None), (0.5, 8, 2, None)]


def test_values_that_look_alike_as_names_are_different_runs():
    grid = {"agent": {"mlp_units": [[64, 64], [64.0, 64]]}}
    names = [run.name for run in sweep({"grid": {"env": {"kwargs": {"a": ["x y", "x-y"]}}}}).runs()]
    assert (len(set(names)), names[0]) == (2, "a=x-y")
    assert sweep({"grid": grid}).runs()[0].name == "mlp_units=64-64"


def test_long_names_are_cut_and_still_differ():
    grid = {"env": {"kwargs": {"text": ["a" * 300, "a" * 301]}}}
    names = [run.name for run in sweep({"grid": grid}).runs()]
    assert len(set(names)) == 2
    assert max(map(len, names)) < 140
    wide = sweep({"grid": {"env": {"kwargs": {"text": ["\N{GREEK SMALL LETTER ALPHA}" * 100]}}}}).runs()
    assert len(wide[0].name.encode()) < 140  # a file system counts bytes


def test_the_command_line_takes_the_place_of_what_varies():
    found = settings(
        {"grid": GRID, "seeds": 2}, "agent.gamma", "run.seed", overrides={"agent.learning-rate": "0.5"}
    )
    assert found == [(0.9, 0), (0.9, 1), (0.99, 0), (0.99, 1)]
    assert len(sweep({"grid": GRID, "seeds": 9}, {"seed": "3"}).runs()) == 6
    assert len(sweep({"suite": "atari5"}, {"env.id": "atari:pong"}).runs()) == 1


def test_each_run_s_file_gives_its_values(tmp_path):
    grid = {"env": {"kwargs": {"depth": {"of_it": [1, 2]}}}, "agent": {"mlp_units": [[8]]}}
    runs = sweep({"grid": grid}, env={"kwargs": {"other": "x"}}, run={"total_steps": 7}).runs()
    (tmp_path / "v.toml").write_text(plan.values_file(runs[1].fields))
    config = load_layers("cartpole-ppo", tmp_path / "v.toml", {}, {}).config
    assert (config.run.total_steps, list(config.agent.mlp_units)) == (7, [8])
    assert config.env.kwargs == {"other": "x", "depth": {"of_it": 2}}


def test_runs_share_no_values():
    wanted = sweep({"grid": {"env": {"kwargs": {"a": [1, 2]}}}}, env={"kwargs": {"b": {"c": 3}}})
    for run in wanted.runs():
        plan.values_file(run.fields)
    assert wanted.fixed == {"env.kwargs": {"b": {"c": 3}}}


def test_a_suite_is_a_run_of_each_environment():
    found = settings({"suite": "atari5", "seeds": 2}, "env.id", "run.seed")
    assert len(found) == 10
    assert found[:3] == [("atari:battle_zone", 0), ("atari:battle_zone", 1), ("atari:double_dunk", 0)]
    assert sweep({"suite": "atari5", "seeds": 2}).runs()[0].name == "battle_zone,seed=0"


SEARCH = {
    "agent": {
        "learning_rate": {"low": 1e-5, "high": 1e-2, "log": True},
        "gamma": [0.9, 0.99],
        "epochs": {"low": 1, "high": 3},
        "minibatch_steps": {"low": 8, "high": 4096, "log": True},
    }
}


def test_draws_are_within_their_ranges_and_spread_as_said():
    names = ("agent.learning_rate", "agent.gamma", "agent.epochs", "agent.minibatch_steps")
    rates, gammas, epochs, sizes = zip(*settings({"search": SEARCH, "trials": 400}, *names), strict=True)
    assert 1e-5 <= min(rates) < 2e-5
    assert 0.5e-2 < max(rates) <= 1e-2
    # On a logarithmic scale a third of the draws is in each of the three decades.
    assert all(
        sum(10**-k <= rate < 10 ** (1 - k) for rate in rates) == pytest.approx(400 / 3, abs=40)
        for k in (3, 4, 5)
    )
    assert {gammas.count(g) > 150 for g in (0.9, 0.99)} == {True}
    assert all(epochs.count(n) == pytest.approx(400 / 3, abs=40) for n in (1, 2, 3))
    assert all(isinstance(size, int) and 8 <= size <= 4096 for size in sizes)
    assert sum(size < math.sqrt(8 * 4096) for size in sizes) == pytest.approx(200, abs=45)


def test_draws_stay_when_there_are_more_of_them():
    few, many = (sweep({"search": SEARCH, "trials": n, "seeds": 2}).runs() for n in (3, 5))
    assert many[:6] == few
    assert [run.name for run in few[:2]] == ["trial-0000,seed=0", "trial-0000,seed=1"]
    assert few[0].fields["agent.learning_rate"] == few[1].fields["agent.learning_rate"]


def test_what_the_command_line_decides_is_not_searched(tmp_path, capsys, monkeypatch):
    wanted = sweep({"search": SEARCH, "trials": 2}, {"agent.gamma": "0.5", "agent.epochs": "2"})
    assert set(wanted.space) == {"agent.learning_rate", "agent.minibatch_steps"}
    assert all("agent.gamma" not in run.fields for run in wanted.runs())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(HEAD + "trials = 3\nsearch.agent.gamma = [0.9, 0.99]\n")
    assert cli.main(["sweep", "f.toml", "--agent.gamma", "0.5", "--dry-run"]) == 0
    assert re.fullmatch(r"run  [\d,]+ steps\n", capsys.readouterr().out)


def test_the_ends_of_a_space_are_checked():
    found = space.ends(space.read_space("f", SEARCH))
    assert {setting["agent.learning_rate"] for setting in found} == {1e-5, 1e-2}
    assert {setting["agent.gamma"] for setting in found} == {0.9, 0.99}


def test_a_sweep_survives_its_record():
    began = sweep({"grid": GRID, "seeds": [1, 2], "parallel": 2}, {"seed": "3"}, run={"total_steps": 7})
    again = plan.parse("f.toml", began.tables(), began.overrides)
    assert again == began
    assert again.runs() == began.runs()


HEAD = '[sweep]\npreset = "cartpole-ppo"\n'
BAD = [
    ("[sweep]\nseeds = 2\n", ["should say what to train", 'preset = "cartpole-ppo"']),
    ("[sweep]\npreset = 'cartpol-ppo'\n", ["unknown preset", "nearest: cartpole-ppo"]),
    (HEAD + "paralel = 2\n", ["unknown key 'paralel' of [sweep]", "nearest: parallel"]),
    (HEAD + "parallel = 0\n", ["parallel of [sweep]", "greater than or equal to 1"]),
    (HEAD + "seeds = []\n", ["seeds should be"]),
    (HEAD + "seeds = -1\n", ["seeds should be"]),
    (HEAD + "seeds = 0\n", ["seeds should be"]),
    (HEAD + "seeds = [3, 1, 3]\n", ["seeds should be", "different"]),
    (HEAD + "seeds = 1_000_000_000_000\n", ["seeds should be"]),
    (
        HEAD + "seeds = 100\n" + "".join(f"grid.env.kwargs.{x} = [1, 2, 3, 4]\n" for x in "abcdefghijklmno"),
        ["more than 10,000 runs"],
    ),
    (HEAD + "seeds = 'x'\n", ["seeds of [sweep]"]),
    (HEAD + "suite = 'atari6'\n", ["unknown suite 'atari6'"]),
    (HEAD + "grid.agent.gamma = 0.9\n", ["agent.gamma of [sweep.grid]", "a list of values"]),
    (HEAD + "grid.gamma = [0.9]\n", ["gamma of [sweep.grid]"]),
    (HEAD + "grid.agent.gama = [0.9]\n", ["agent.gama", "file f.toml", "nearest: agent.gamma"]),
    (HEAD + "grid.agent.gamma = [0.9, 9]\n", ["agent.gamma = 9", "file f.toml", "less than or equal to 1"]),
    (
        HEAD + "grid.agent.gamma = [0.9]\n[agent]\ngamma = 0.5\n",
        ["agent.gamma is in [sweep.grid] and in its own"],
    ),
    (HEAD + "seeds = 2\ngrid.run.seed = [1]\n", ["run.seed is in [sweep.grid] and in seeds"]),
    (HEAD + "[[sweep.list]]\ngamma = 1\n", ["'gamma' is outside any section", "agent.gamma"]),
    (HEAD + "trials = 3\n", ["a search needs fields"]),
    (HEAD + "search.agent.gamma = [0.9]\n", ["a search needs trials"]),
    (HEAD + "trials = 3\nsearch.agent.gamma = 1\n", ["agent.gamma of [sweep.search]"]),
    (
        HEAD + "trials = 3\nsearch.agent.gamma = {low = 1, high = 0}\n",
        ["low (1) should be less than high (0)"],
    ),
    (HEAD + "trials = 3\nsearch.agent.gamma = {low = 0, high = 1, log = true}\n", ["above 0"]),
    (HEAD + "trials = 3\nsearch.agent.gamma = {low = 0.0, high = nan}\n", ["should be finite"]),
    (HEAD + "trials = 3\nsearch.agent.gamma = {low = -1.7e308, high = 1.7e308}\n", ["should be finite"]),
    (HEAD + f"trials = 3\nsearch.run.total_steps = {{low = 1, high = {10**30}}}\n", ["should be finite"]),
    (HEAD + "trials = 3\nsearch.agent.gamma = {low = 0, hihg = 1}\n", ["two numbers, low and high"]),
    ("sweep = 3\n", ["[sweep]"]),
    ("[[[", ["not valid TOML"]),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=[repr(text.removeprefix(HEAD)) for text, _ in BAD])
def test_a_file_that_cannot_be_is_one_line_and_leaves_nothing(text, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(text)
    assert cli.main(["sweep", "f.toml"]) == 2
    stdout, stderr = capsys.readouterr()
    assert (stdout, stderr.count("\n")) == ("", 1)
    for word in words:
        assert word in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["f.toml"]


def test_values_of_the_command_line_are_told_apart_from_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "cartpole-ppo", "--grid", "agent.gamma=0.9,x", "--dry-run"]) == 2
    assert 'agent.gamma = "x" (command line): should be a number' in capsys.readouterr().err
    assert cli.main(["sweep", "cartpole-ppo", "--grid", "seed=5,6", "--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["seed=5", "seed=6"]


def test_a_file_of_several_runs_is_refused_for_one(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.toml").write_text(HEAD)
    for line in ("train cartpole-ppo --sweep f.toml", "train f.toml", "config validate f.toml"):
        assert cli.main(line.split()) == 2
        assert "several runs: `troupe sweep f.toml`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["sweep", "sweep a.toml --resume b", "sweep cartpole-ppo --seeds x", "sweep --resume ."]
)
def test_bad_words_are_one_line(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_preset_beside_nothing_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("[run]\ntotal_steps = 5\n")
    found = plan.read("mine.toml", {"seeds": 2}, {})
    assert found.preset == str(tmp_path / "mine.toml")
    assert [run.name for run in found.runs()] == ["seed=0", "seed=1"]
    with pytest.raises(ConfigError, match="unknown preset"):
        plan.read("cartpole", {}, {})


def test_an_entry_that_names_itself_names_its_runs():
    small = {"run": {"name": "small one"}, "agent": {"gamma": 0.5, "learning_rate": 1e-3}}
    entries = [small, {"run": {"name": "large"}, "agent": {"gamma": 0.9}}]

    def names(**tables):
        return [run.name for run in sweep({"list": entries, **tables}).runs()]

    assert names(seeds=2) == ["small-one,seed=0", "small-one,seed=1", "large,seed=0", "large,seed=1"]
    assert sweep({"list": entries}).runs()[0].fields["agent.learning_rate"] == 1e-3
    grid = {"agent": {"lambda_": [0.1, 0.2]}}
    assert names(grid=grid)[:2] == ["small-one,lambda_=0.1", "small-one,lambda_=0.2"]
    odd = [{"run": {"name": name}, "agent": {"gamma": 0.5}} for name in (".", "..", "../x", "!!!")]
    assert not {".", "..", ""} & {run.name for run in sweep({"list": odd}).runs()}  # each is a directory
    assert {".", ".."}.isdisjoint(
        run.name for run in sweep({"grid": {"env": {"id": ["gym:..", "."]}}}).runs()
    )
    search = {"agent": {"epochs": [1, 2]}}
    assert names(search=search, trials=1) == ["small-one,trial-0000", "large,trial-0000"]


@pytest.mark.parametrize("study", sorted(STUDIES.glob("elite-*.toml")), ids=lambda study: study.stem)
def test_the_studies_that_come_along_can_be_run(study):
    found = plan.read(str(study), {}, {})
    names = {run.fields["run.name"] for run in found.runs()}
    exact = {"uniform", "nearest", "least-sampled"}
    every = {"fresh", "uniform", "elite-1", "elite-2", "elite-3", "elite-4", "attentive"}
    assert names == (exact if "exact" in study.stem else every)
    assert {run.name for run in found.runs()} >= {f"{name},seed=1" for name in names}
    assert len(checks.check(found)) == len(names) * len({run.fields["run.seed"] for run in found.runs()})
