"""`troupe cloud train` as far as it goes without AWS: what is planned, refused and written down."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

import troupe.services.__main__ as cli
from tests.harness import until
from troupe.common.config import load_config
from troupe.common.errors import ConfigError
from troupe.common.runtime import StopSignal
from troupe.services.cloud.keeping import _Seen, count_absence
from troupe.services.cloud.layout import Layout
from troupe.services.cloud.plan import aws_name
from troupe.services.cloud.record import Record, read_record
from troupe.services.cloud.run import CloudRun
from troupe.services.cloud.run_file import run_file
from troupe.services.cloud.tools import GivenUpError, ToolError, Tools, cause

IMAGE = ("--var", "cpu_image_id=ami-0aaaaaaaaaaaaaaaa")
RECORD = Record(
    run="pong-1126090000",
    preset="pong-apex",
    region="us-east-1",
    budget_usd=5.0,
    evaluated=True,
    total_steps=1000,
    layout=Layout(nat_gateway=False),
    max_actors=48,
    bucket_gb=1.0,
    prices="2026-11",
)


def make_record(folder: Path, **changes: Any) -> Record:
    record = RECORD.model_copy(update=changes)
    (folder / "cloud").mkdir(exist_ok=True)
    record.write(folder)
    return record


def test_a_dry_run_tells_dollars_and_hours_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["cloud", "train", "cartpole-apex", "--budget", "5", "--until", "return>=475", *IMAGE]
    assert cli.main([*words, "--run-dir", str(run), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "budget: 5.00 dollars, or until eval/episode_return >= 475" in said
    assert "the budget lasts 8.99 hours" in said
    assert "NAT gateway, " not in said
    assert not run.exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--budget", "0.1"], "lasts only 0 minutes"),
        (["--budget", "5", "--until", "score>3"], "score is not a goal"),
        (["--budget", "5", "--var", "stop_at=never"], "sets it itself"),
        (["--budget", "5", "--run.total_step", "3"], "run.total_steps"),
        (["--until", "return>=3"], "--budget"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], match: str
) -> None:
    run = tmp_path / "run"
    assert cli.main(["cloud", "train", "cartpole-apex", *IMAGE, *words, "--run-dir", str(run)]) == 2
    assert match in capsys.readouterr().err
    assert not run.exists()


def test_without_images_or_programs_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cloud", "train", "cartpole-apex", "--budget", "5", "--run-dir", str(tmp_path / "run")]
    missing = ["--var", f"packer_manifest={tmp_path}/none.json"]
    assert cli.main([*words, *missing]) == 2
    assert "no images" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main([*words, *IMAGE]) == 2
    assert "is not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["cartpole-apex"], "is a run of pong-apex"),
        (["pong-apex", "--run.seed", "3"], "leave out --run.seed"),
        (["pong-apex", *IMAGE], "leave out --var"),
    ],
)
def test_a_run_that_goes_on_keeps_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], match: str
) -> None:
    make_record(tmp_path)
    assert cli.main(["cloud", "train", *words, "--budget", "5", "--run-dir", str(tmp_path)]) == 2
    assert match in capsys.readouterr().err


def test_a_run_that_has_ended_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_record(tmp_path, ended="the budget is used up")
    assert cli.main(["cloud", "train", "pong-apex", "--budget", "5", "--run-dir", str(tmp_path)]) == 2
    assert "has ended (the budget is used up)" in capsys.readouterr().err
    assert cli.main(["cloud", "stop", str(tmp_path)]) == 0
    assert "nothing of it is left" in capsys.readouterr().out
    assert cli.main(["cloud", "stop", str(tmp_path / "none")]) == 2
    assert "is not a run of `troupe cloud train`" in capsys.readouterr().err


def test_a_damaged_record_says_what_to_do(tmp_path: Path) -> None:
    make_record(tmp_path)
    file = tmp_path / "cloud" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "usd": "much"}))
    with pytest.raises(ConfigError, match=r"damaged \(usd: .* destroy"):
        read_record(tmp_path)


def test_what_it_cost_while_nobody_looked_is_counted(tmp_path: Path) -> None:
    now_s = time.time()
    stop = StopSignal(force_after_s=None)
    hour_ago = {"usd": 1.0, "counted_s": now_s - 3600, "hourly_usd": 0.6, "began_s": now_s - 7200}
    running = CloudRun(tmp_path, make_record(tmp_path, **hour_ago, stop_s=now_s + 3600), stop)
    count_absence(running)
    assert running.record.usd == pytest.approx(1.6, abs=0.01)
    # AWS ended the machines after a quarter of an hour; what stays costs next to nothing.
    ended = CloudRun(tmp_path, make_record(tmp_path, **hour_ago, stop_s=now_s - 2700), stop)
    count_absence(ended)
    assert ended.record.usd == pytest.approx(1.15, abs=0.01)


def test_who_cannot_look_does_not_take_a_run_for_stuck() -> None:
    seen = _Seen(moved_s=0.0, looked_s=0.0)
    seen.take({"steps": 100, "wall_s": 1.0}, 10.0)
    assert seen.moved_s == 10.0
    seen.take(None, 5000.0)
    assert seen.moved_s == 5000.0
    assert seen.status["steps"] == 100, "the last that is known"
    seen.take({"steps": 100, "wall_s": 2.0}, 5060.0)
    assert seen.moved_s == 5000.0


def test_a_status_counts_once_and_only_of_a_learner_that_learns() -> None:
    seen = _Seen(moved_s=0.0, looked_s=0.0)
    status = {
        "wall_s": 1.0,
        "updates_since_start": 0,
        "metrics": {"learner/wait_share": 0.9, "actor/insert_blocked_share": 0.1},
        "peers": [{"role": "actor", "name": "a"}, {"role": "replay", "name": "b"}],
    }
    seen.take(status, 1.0)
    assert not seen.looks, "replay fills"
    seen.take({**status, "updates_since_start": 5, "wall_s": 2.0}, 2.0)
    seen.take({**status, "updates_since_start": 5, "wall_s": 2.0}, 3.0)
    [look] = seen.looks
    assert (look.wait_share, look.blocked_share, look.joined) == (0.9, 0.1, 1)


@pytest.mark.parametrize("preset", ["cartpole-apex", "pong-impala", "minatar-seaquest-elite"])
def test_machines_get_the_configuration_of_this_computer(tmp_path: Path, preset: str) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(f'preset = "{preset}"\n[run]\ntotal_steps = 777\n[learner]\narchive_period_s = 5\n')
    overrides = {"run.seed": "9", "env.kwargs": "{a = {b = 1}}", "evaluator.enabled": "false"}
    config = load_config(str(mine), overrides=overrides)
    text = run_file(config, str(mine))
    assert text.startswith(f'preset = "{preset}"\n'), "the machines do not have the file"
    (tmp_path / "run.toml").write_text(text)
    there = load_config(str(tmp_path / "run.toml"))
    for section in ("agent", "env", "replay", "actor", "learner", "evaluator", "inference"):
        assert getattr(there, section) == getattr(config, section)
    assert (there.run.total_steps, there.run.seed) == (777, 9)


def test_the_text_of_a_run_file_is_as_it_was_read_and_approved() -> None:
    """Where a change is meant: `TROUPE_WRITE_GOLDEN=1 pytest` writes the file, to be read again."""
    mine = Path(__file__).parents[2] / "deploy" / "terraform" / "tests" / "my.toml"
    overrides = {
        "env.kwargs": "{a = {b = 1}}",
        "agent.learning_rate": "1e-3",
        "replay.priority_exponent": "0",
    }
    text = run_file(load_config(str(mine), overrides=overrides), str(mine))
    golden = Path(__file__).parent / "golden" / "run.toml"
    if os.environ.get("TROUPE_WRITE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()


def test_a_run_file_that_no_machine_could_read_is_refused() -> None:
    config = load_config("cartpole-apex", overrides={"env.kwargs": f"{{a = '{'x' * 5000}'}}"})
    with pytest.raises(ConfigError, match=r"has 5,0\d\d letters"):
        run_file(config, "cartpole-apex")


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("pong-apex", "pong-apex-1126090000"),
        ("runs/My Own_file.toml", "my-own-file-1126090000"),
        ("2048.toml", "run-2048-1126090000"),
        ("minatar-seaquest-elite", "minatar-seaqu-1126090000"),
    ],
)
def test_names_in_aws(preset: str, name: str) -> None:
    assert aws_name(preset, "1126090000") == name
    assert len(name) <= 24


BOX = """
Warning: something else

╷
│ Error: creating EC2 VPC: operation error
│ EC2: CreateVpc, VpcLimitExceeded
│
│   with module.network.aws_vpc.this,
╵
╷
│ Error: another one
╵
"""


def test_the_cause_of_a_failure_is_one_line() -> None:
    said = cause(BOX)
    assert said.startswith("creating EC2 VPC: operation error EC2: CreateVpc, VpcLimitExceeded")
    assert "another" not in said
    assert cause("a\n\nfatal error: no credentials\n") == "fatal error: no credentials"
    assert cause("") == "no word of why"


def test_programs_fail_take_too_long_or_are_given_up(tmp_path: Path) -> None:
    stop = StopSignal(force_after_s=None)
    tools = Tools(tmp_path, "us-east-1", stop)
    assert tools.run("sh", "-c", "echo $AWS_REGION $AWS_DEFAULT_REGION") == "us-east-1 us-east-1\n"
    with pytest.raises(ToolError, match=r"it broke .*tools\.log"):
        tools.run("sh", "-c", "echo it broke >&2; exit 3")
    with pytest.raises(ToolError, match="not done in 0 minutes"):
        tools.run("sleep", "600", timeout_s=0.3)
    stop._signals = 2
    with pytest.raises(GivenUpError, match="is left to finish"):
        tools.run("sh", "-c", "sleep 1; touch ended", cwd=tmp_path)
    until((tmp_path / "ended").exists)
    assert "sleep 600" in tools.log.read_text()


def test_keys_and_state_are_the_owners_alone(tmp_path: Path) -> None:
    CloudRun(tmp_path, RECORD.model_copy(), StopSignal(force_after_s=None))
    assert stat.S_IMODE((tmp_path / "cloud").stat().st_mode) == 0o700
