"""`troupe eval`: from a run, a directory of checkpoints or one checkpoint."""

import csv
import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import troupe
import troupe.services.__main__ as cli
from tests.envs.broken import BrokenEnv
from tests.harness import leave
from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.runtime.checkpoint import load_newest, save_checkpoint
from troupe.services.evaluator import evaluate
from troupe.services.evaluator.report import markdown, table

RELEASE = Path(__file__).parents[2] / "release"


def checkpoints(folder, fields):
    config = load_config("cartpole-apex", None, fields, {})
    for steps in (100, 200):
        spec = make_spec(config.env)
        arrays, meta = make_agent(config.agent, spec, seed=steps).state()
        whole = {"steps": steps, "updates": steps // 4, "config": config.to_dict(), "agent": meta}
        whole["spec"] = dataclasses.asdict(spec)
        save_checkpoint(folder / "checkpoints", arrays, whole)


@pytest.fixture
def run_dir(tmp_path):
    checkpoints(tmp_path, {})
    return tmp_path


def json_of(capsys, *words):
    assert evaluate.main([*map(str, words), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_what_an_environment_prints_is_not_among_the_json(run_dir, capfd, monkeypatch):
    restore = evaluate.restore

    def loud(*arguments):
        print("loading")
        os.write(1, b"by C\n")
        return restore(*arguments)

    monkeypatch.setattr(evaluate, "restore", loud)
    report = json_of(capfd, run_dir, "--episodes", 1)
    assert report["episodes"] == 1


def test_json_line(run_dir, capsys):
    report = json_of(capsys, run_dir, "--episodes", 3, "--seed", 5)
    assert report["episodes"] == len(report["returns"]) == 3
    assert report["mean_return"] == pytest.approx(sum(report["returns"]) / 3)
    assert report["ci95"][0] <= report["mean_return"] <= report["ci95"][1]
    assert report["human_normalized"] is None
    assert report["steps"] == 200
    assert report["epsilon"] == 0.001
    assert report["slots"] == 8
    assert report["env_fields"] == {}
    assert json_of(capsys, run_dir, "--episodes", 3, "--seed", 5) == report
    other = json_of(capsys, run_dir / "checkpoints" / "step-000000000100", "--episodes", 3, "--seed", 5)
    assert other["steps"] == 100
    assert json_of(capsys, run_dir / "checkpoints", "--episodes", 1)["steps"] == 200


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "cause"),
    [("raise", "RuntimeError: the physics exploded"), ("interrupt", "KeyboardInterrupt")],
)
def test_an_environment_whose_episodes_all_fail_ends_it_with_the_line_that_fails(
    tmp_path, capsys, how, cause
):
    broken = "tests.envs.broken:Broken-v0"
    checkpoints(tmp_path, {"env.id": broken, "env.kwargs": f"{{how = '{how}', at = 50, length = 100}}"})
    assert cli.main(["eval", str(tmp_path), "--modules", "tests"]) == 70
    said = capsys.readouterr().err
    assert said.startswith(
        f"troupe: error: no episode of {broken} can be finished: 24 failures, the last: {broken} raised "
    )
    assert f"{cause} (broken.py:" in said


def test_episodes_that_fail_among_others_are_counted_with_the_first_reason(tmp_path, capsys, caplog):
    def broken(record):
        return f"{{how = 'raise raise fine', at = 3, record = '{tmp_path / record}'}}"

    checkpoints(tmp_path, {"env.id": "tests.envs.broken:Broken-v0", "env.kwargs": broken("first")})
    words = [str(tmp_path), "--modules", "tests", "--episodes", "4", "--slots", "4"]
    report = json_of(capsys, *words)
    assert (report["returns"], report["failed_episodes"]) == ([20.0] * 4, 2)
    assert "RuntimeError: the physics exploded (broken.py:" in report["first_failure"]
    assert report["first_failure"] in caplog.messages[0]  # of two slots that failed in the same step
    # The file tells the environment that it has failed: from here on it plays well.
    assert json_of(capsys, *words)["failed_episodes"] == 0
    files = [tmp_path / "report.csv", tmp_path / "report.md"]
    outputs = [word for file in files for word in ("--output", str(file))]
    assert evaluate.main([*words, "--env.kwargs", broken("second"), *outputs]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
    assert line.startswith("  2 more episodes failed and do not count; the first: tests.envs.broken:Broken-")
    assert "the physics exploded (broken.py:" in line
    (row,) = csv.DictReader(files[0].read_text().splitlines())
    assert row["failed_episodes"] == "2"
    assert line.endswith(row["first_failure"])
    assert files[1].read_text().endswith("| 4 (2 more failed) |\n")


def test_from_python_the_class_of_an_environment_stands_for_the_permission(tmp_path):
    checkpoints(tmp_path, {"env.id": "tests.envs.broken:Broken-v0"})
    with pytest.raises(
        ConfigError, match=r"--modules tests.*, or give the class of the environment: evaluate\(run, C"
    ):
        troupe.evaluate(tmp_path, episodes=1)
    assert troupe.evaluate(tmp_path, BrokenEnv, episodes=1)["returns"] == [20.0]


def test_table(run_dir, capsys):
    assert evaluate.main([str(run_dir), "--episodes", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "step-000000000200",
        "gym:CartPole-v1",
        "episode   2 of 2",
        "200 steps, 50 updates",
        "95 % interval",
    ):
        assert part in text


def test_what_one_game_cannot_say_is_left_out(run_dir, tmp_path, capsys):
    page = tmp_path / "page.md"
    assert evaluate.main([str(run_dir), "--episodes", "1", "--output", str(page)]) == 0
    for text in (capsys.readouterr().out, page.read_text().splitlines()[-1]):
        assert "95 %" not in text
        assert " to " not in text
        assert "human" not in text  # nobody knows how people play it


def test_a_damaged_newest_checkpoint_falls_back(run_dir, capsys):
    (run_dir / "checkpoints" / "step-000000000200" / "arrays.safetensors").write_bytes(b"short")
    assert evaluate.main([str(run_dir), "--episodes", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 100
    assert printed.err.startswith("troupe: checkpoint ")
    assert "is damaged" in printed.err
    with pytest.raises(CheckpointError, match="damaged"):
        evaluate.main([str(run_dir / "checkpoints" / "step-000000000200")])


def test_wrong_paths_and_words_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="is not a directory"):
        evaluate.main([str(tmp_path / "absent")])
    with pytest.raises(ConfigError, match="neither a run directory nor a checkpoint"):
        evaluate.main([str(tmp_path)])
    with pytest.raises(ConfigError, match="should be at least 1"):
        evaluate.main([str(tmp_path), "--episodes", "0"])
    (tmp_path / "config.toml").touch()  # a run that has just begun, or died before it learned
    with pytest.raises(CheckpointError, match=r"no checkpoint to load in .*: there is no checkpoint"):
        evaluate.main([str(tmp_path)])
    save_checkpoint(tmp_path / "checkpoints", {}, {"steps": 1})
    with pytest.raises(CheckpointError, match="has no 'config'"):
        evaluate.main([str(tmp_path)])


@pytest.mark.parametrize("name", ["no/a.gif", "a.avi", "a"])
def test_a_film_that_cannot_be_written_is_found_before_the_games(run_dir, tmp_path, capsys, name):
    with pytest.raises(ConfigError, match="cannot write the video"):
        evaluate.main([str(run_dir), "--episodes", "1", "--json", "--video", str(tmp_path / name)])
    assert not capsys.readouterr().out


@pytest.mark.parametrize(("name", "head"), [("a.gif", b"GIF89a"), ("b.MP4", b"\0\0\0")])
def test_the_end_of_its_name_says_what_a_film_is(run_dir, tmp_path, name, head, capsys):
    assert evaluate.main([str(run_dir), "--episodes", "1", "--video", str(tmp_path / name)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / name)
    film = (tmp_path / name).read_bytes()
    assert film.startswith(head)
    assert (b"avc1" in film) is name.endswith("MP4")


def test_without_pygame_the_cause_is_told(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert evaluate.main([str(run_dir), "--episodes", "1", "--video", str(tmp_path / "a.gif")]) == 0
    said = capsys.readouterr()
    assert "pygame is not installed" in said.err
    assert "a.gif" not in said.out
    assert not (tmp_path / "a.gif").exists()


def test_a_checkpoint_does_not_choose_what_is_imported(tmp_path):
    sys.modules.pop("this", None)
    config = load_config("cartpole-apex", None, {}, {}).to_dict()
    config["env"]["id"] = "this:X"
    save_checkpoint(tmp_path / "checkpoints", {}, {"steps": 1, "config": config, "agent": {}})
    with pytest.raises(ConfigError, match=r"would run this.*--modules this"):
        evaluate.main([str(tmp_path)])
    assert "this" not in sys.modules


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_that_is_not_finite_does_not_play(run_dir, capsys, value):
    good = load_newest(run_dir / "checkpoints")
    arrays = {name: array.copy() for name, array in good.arrays.items()}
    name = next(name for name in arrays if name.startswith("net/") and arrays[name].dtype == np.float32)
    arrays[name].flat[-1] = value
    save_checkpoint(run_dir / "checkpoints", arrays, {**good.meta, "steps": 300})
    with pytest.raises(CheckpointError, match=f"array {name.removeprefix('net/')} is not finite"):
        evaluate.main([str(run_dir)])
    assert CheckpointError.exit_code == 5
    assert "game" not in capsys.readouterr().out


def test_all_checkpoints_are_a_curve(run_dir, tmp_path, capsys):
    files = [tmp_path / f"report.{kind}" for kind in ("json", "csv", "md")]
    outputs = [word for file in files for word in ("--output", str(file))]
    options = ["--episodes", "2", "--all", *outputs]
    assert evaluate.main([str(run_dir), *options]) == 0
    printed = capsys.readouterr().out
    reports = json.loads(files[0].read_text())
    assert [report["steps"] for report in reports] == [100, 200]
    assert len(reports[1]["returns"]) == 2
    lines = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [line["steps"] for line in lines] == ["100", "200"]
    for line, report in zip(lines, reports, strict=True):
        assert float(line["mean_return"]) == pytest.approx(report["mean_return"], rel=1e-5)
        assert float(line["ci95_low"]) == pytest.approx(report["ci95"][0], rel=1e-5)
    table = files[2].read_text()
    assert printed.endswith(table + "".join(f"{file}\n" for file in files))
    assert [row.split(" | ")[0] for row in table.splitlines()[2:]] == ["| 100", "| 200"]
    # A damaged one is left out, and said.
    (run_dir / "checkpoints" / "step-000000000100" / "arrays.safetensors").write_bytes(b"short")
    assert evaluate.main([str(run_dir), *options, "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["steps"] for line in printed.out.splitlines()] == [200]
    assert printed.err.startswith("troupe: left out: ")
    assert "step-000000000100 is damaged" in printed.err


@pytest.mark.filterwarnings("ignore:.*is out of date:DeprecationWarning")  # the same game, 200 steps long
def test_fields_of_the_environment_may_be_others(run_dir, capsys):
    short = json_of(capsys, run_dir, "--episodes", 2, "--env", "gym:CartPole-v0")
    assert short["env"] == "gym:CartPole-v0"
    with pytest.raises(ConfigError, match=r"does not fit gym:Acrobot-v1"):
        evaluate.main([str(run_dir), "--env.id", "gym:Acrobot-v1"])
    with pytest.raises(ConfigError, match=r"env.sticky_actions would have no effect: gym:CartPole-v1"):
        evaluate.main([str(run_dir), "--env.sticky-actions", "0.25"])
    with pytest.raises(
        ConfigError, match=r"unknown argument --run.seed: only fields of \[env\] may be other"
    ):
        evaluate.main([str(run_dir), "--run.seed", "3"])


def test_a_report_says_where_and_how_it_was_played(run_dir, tmp_path, capsys):
    words = [str(run_dir), "--episodes", "1", "--env.max_episode_frames", "5", "--seed", "3", "--slots", "2"]
    report = json_of(capsys, *words)
    assert report["env_fields"] == {"max_episode_frames": 5}
    assert report["slots"] == 2
    assert report["returns"] == [5]  # the pole takes longer to fall
    assert evaluate.main([*words, "--output", str(tmp_path / "report.csv")]) == 0
    said = capsys.readouterr().out
    assert "max_episode_frames 5, full episodes, epsilon 0.001, seed 3, 2 at a time" in said
    assert said.splitlines()[-1] == str(tmp_path / "report.csv")
    (line,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert json.loads(line["env_fields"]) == report["env_fields"]
    assert (line["seed"], line["epsilon"], line["slots"]) == ("3", "0.001", "2")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--greedy"], "best actions of the policy"),
        (["--sampled"], "actions drawn from the policy,"),
        (["--epsilon", "0.5"], "actions drawn from the policy with chance 0.5, else the best"),
    ],
)
def test_the_epsilon_of_a_policy_is_told_in_words(capsys, words, says):
    # "epsilon 1" read as actions at random; it is the policy as it learned.
    assert evaluate.main([str(RELEASE / "pendulum-sac"), "--episodes", "1", *words]) == 0
    assert says in capsys.readouterr().out


def test_of_several_runs_each_row_names_its_checkpoint(run_dir, capsys):
    assert evaluate.main([str(run_dir), str(RELEASE / "pendulum-sac"), "--episodes", "1"]) == 0
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert rows[0].startswith("| checkpoint | steps |")
    assert rows[1].startswith("|:--|--:|")
    assert "step-000000000200 | 200 |" in rows[2]
    assert "pendulum-sac/step-000000012000 | 12,000 |" in rows[3]


def test_how_it_plays(run_dir, capsys):
    assert json_of(capsys, run_dir, "--episodes", 1, "--greedy")["epsilon"] == 0.0
    with pytest.raises(ConfigError, match="apex has no policy to sample from"):
        evaluate.main([str(run_dir), "--sampled"])
    with pytest.raises(ConfigError, match="not allowed with"):
        evaluate.main([str(run_dir), "--greedy", "--epsilon", "0.1"])
    few = json_of(capsys, run_dir, "--episodes", 2, "--slots", 3, "--epsilon", 0.5)["returns"]
    many = json_of(capsys, run_dir, "--episodes", 5, "--slots", 3, "--epsilon", 0.5)["returns"]
    assert many[:2] == few


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "tpu"], "--device should be cpu, cuda or cuda:N, not 'tpu'"),
        (["--output", "report.xml"], "its name should end in .json, .csv, .md"),
        (["--output", "no/report.md"], "cannot write the report no/report.md: No such file"),
        (["--output", "/proc/report.md"], "cannot write the report /proc/report.md: No such file"),
        (["--all", "--video", "a.gif"], "one checkpoint: there are 2"),
        (["--slots", "0"], "should be from 1 to"),
    ],
)
def test_what_cannot_be_is_said_before_the_games(run_dir, capsys, words, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        evaluate.main([str(run_dir), *words])
    assert not capsys.readouterr().out


def test_an_evaluation_that_is_ended_keeps_what_whole_checkpoints_have_shown(
    run_dir, tmp_path, capsys, monkeypatch
):
    def ended_at(steps, error):
        def play(checkpoint, *args, on_game, **options):
            if checkpoint.meta["steps"] != steps:
                return evaluate_whole(checkpoint, *args, on_game=on_game, **options)
            on_game(SimpleNamespace(return_raw=9.0, steps=9))
            raise error

        return play

    evaluate_whole, report = evaluate.evaluate, tmp_path / "report.json"
    words = [str(run_dir), "--all", "--episodes", "2", "--output", str(report)]
    for error in (KeyboardInterrupt(), CheckpointError("not finite")):
        monkeypatch.setattr(evaluate, "evaluate", ended_at(200, error))
        with pytest.raises(type(error)):
            evaluate.main(words)
        assert [each["steps"] for each in json.loads(report.read_text())] == [100]
        printed = capsys.readouterr()
        stopped = "step-000000000200: stopped after 1 of 2 episodes: no result"
        assert (stopped in printed.err) == isinstance(error, KeyboardInterrupt)
        assert "| 100" in printed.out
        report.unlink()
        monkeypatch.setattr(evaluate, "evaluate", ended_at(100, error))
        with pytest.raises(type(error)):
            evaluate.main(words)
        assert not report.exists()


def test_a_disk_that_fills_leaves_no_half_file_and_what_is_elsewhere_is_written(
    run_dir, disk, datasets, capsys, monkeypatch
):
    def play(*args, **options):
        report = evaluate_whole(*args, **options)
        leave(disk, 0)
        return report

    evaluate_whole, report = evaluate.evaluate, disk / "report.json"
    report.write_text("of yesterday")
    monkeypatch.setattr(evaluate, "evaluate", play)
    words = [
        "--episodes",
        "1",
        "--output",
        str(report),
        "--video",
        str(disk / "a.gif"),
        "--minari",
        "my/cart-v0",
    ]
    with pytest.raises(ConfigError, match=r"cannot write .*report\.json: No space left on device"):
        evaluate.main([str(run_dir), *words])
    assert sorted(path.name for path in disk.iterdir()) == ["ballast", "report.json"]
    assert report.read_text() == "of yesterday"
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"troupe: error: cannot write {disk / 'a.gif'}: No space left on device"
    ]
    assert printed.out.splitlines()[-1].startswith("data set my/cart-v0: 1 episodes, ")
    assert (datasets / "my/cart-v0").is_dir()


def test_what_an_environment_told_is_reported_and_no_score_that_is_unknown():
    report = {
        **{"ci95": [1.0, 2.0], "human_normalized": None, "episodes": 2, "steps": 10, "updates": 3},
        "failed_episodes": 0,
        **{"mean_return": 1.5, "returns": [1.0, 2.0], "mean_length": 4.0, "info": {"is_success": 0.25}},
        **{"env": "gym:X", "checkpoint": "runs/x/checkpoints/step-10"},
    }
    assert "is_success        0.25" in table(report).splitlines()
    assert "10 steps, 3 updates\n" in table(report)
    assert "10 steps, 1 update\n" in table({**report, "updates": 1})
    assert markdown([report]).splitlines()[0] == "| steps | mean return | 95 % interval | episodes |"
    scored = markdown([report, {**report, "human_normalized": 0.5}]).splitlines()
    assert scored[0] == "| steps | mean return | 95 % interval | human-normalised | episodes |"
    assert [line.count("|") for line in scored] == [6, 6, 6, 6]
