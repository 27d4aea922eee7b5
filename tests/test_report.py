"""docs/scores.md is what the kept files of recorded runs say, and nothing else."""

import csv
import gzip
import shutil
import tomllib

import pytest

from docs import report
from troupe.common.config import load_config
from troupe.services.launcher import by_kind

SCORES = report.RESULTS.parent / "scores.md"
SWEEPS = SCORES.parents[1] / "configs" / "sweeps"


def test_the_page_is_made_of_the_files():
    assert SCORES.read_text() == report.page(), "`make report` writes it anew"


def test_every_recorded_training_can_be_started():
    for entry in tomllib.loads((report.RESULTS / report.INDEX).read_text()).values():
        if "sweep" in entry:
            sweep = tomllib.loads((SWEEPS / f"{entry['sweep']}.toml").read_text())["sweep"]
            assert entry["run"] in [each["run"]["name"] for each in sweep["list"]]
            continue
        words = entry.get("options", "").replace("--deterministic", "").split()  # which takes no value
        names = [word.removeprefix("--") for word in words[::2]]
        fields = dict(zip(names, words[1::2], strict=True))
        if "algo" in entry:
            by_kind.load(entry["algo"], None, fields, {})
        else:
            load_config(entry["preset"], None, fields)


def test_scores_are_those_in_the_files():
    """Read by other means: the last evaluation of each run, and when it was over."""
    for name, runs in report.recorded(report.RESULTS).items():
        for run in runs:
            with gzip.open(report.RESULTS / f"{name}-{run.seed}.csv.gz", "rt") as file:
                rows = list(csv.DictReader(file))
            metric = "eval/episode_return" if run.evaluated else "train/episode_return"
            returns = [float(row["value"]) for row in rows if row["name"] == metric]
            assert run.evaluated or not any(row["name"] == "eval/episode_return" for row in rows)
            if run.evaluated:
                assert (run.last, run.best) == (returns[-1], sorted(returns)[-1])
            else:
                last = returns[-max(3, len(returns) // 20) :]
                assert run.last == pytest.approx(sum(last) / len(last))
                assert run.last <= run.best < max(returns)
            assert run.steps == max(int(row["steps"]) for row in rows)
            assert run.minutes * 60 == pytest.approx(max(float(row["wall_s"]) for row in rows))


def test_a_run_changes_its_row_and_a_stray_file_is_refused(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / report.INDEX).write_text(
        '[own]\npreset = "cartpole-ppo"\noptions = "--seed 3"\ncommit = "abc1234"\n'
    )
    for seed, last in ((1, 10.0), (2, 20.0)):
        with gzip.open(folder / f"own-{seed}.csv.gz", "wt") as file:
            file.write("wall_s,steps,frames,updates,source,name,value\n")
            file.write(f"60,1000,1000,1,evaluator,eval/episode_return,{5 * last}\n")
            file.write(f"{60 * seed},2000,2000,1,evaluator,eval/episode_return,{last}\n")
    row = report.page(folder).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    files = "[1](results/own-1.csv.gz), [2](results/own-2.csv.gz)"
    assert cells[:3] == ["`cartpole-ppo --seed 3`", files, "15.0"]
    assert cells[3:] == ["10.0 to 20.0", "75.0", "2,000", "1.0 to 2.0", "abc1234"]
    with gzip.open(folder / "own-2.csv.gz", "wt") as file:
        file.write("wall_s,steps,frames,updates,source,name,value\n")
        file.write("60,2000,2000,1,actor-0,train/episode_return,30\n")
    cells = [cell.strip() for cell in report.page(folder).splitlines()[-1].strip("|").split("|")]
    assert cells[2:4] == ["20.0, in training", "10.0 to 30.0"]
    shutil.copy(folder / "own-1.csv.gz", folder / "other-1.csv.gz")
    with pytest.raises(SystemExit, match=r"differ in other"):
        report.page(folder)
