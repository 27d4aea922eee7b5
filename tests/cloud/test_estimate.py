"""What a run costs, by figures worked out by hand from the prices as they stand here."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

import troupe.services.__main__ as cli
from troupe.common.config import load_config, preset_names
from troupe.common.errors import ConfigError
from troupe.services.cloud.estimate import estimate, hourly_usd, million_steps_usd, total_usd
from troupe.services.cloud.layout import Layout, layout_of, parse_variables
from troupe.services.cloud.prices import TERRAFORM, Prices, read_prices

PRICES = Prices(
    date="2020-01",
    region="here",
    source="made up",
    hourly={"big": 1.0, "middle": 0.5, "small": 0.1, "smaller": 0.08, "nat_gateway": 0.05, "public_ip": 0.01},
    monthly={"encryption_key": 4.0, "dns_zone": 2.0, "alarms": 1.3, "gp3_gb": 0.073, "s3_gb": 0.0219},
    gb={"between_zones": 0.02, "out_of_aws": 0.09},
)
LAYOUT = Layout(
    learner_instance_type="big",
    replay_instance_type="middle",
    replay_shards=2,
    replay_volume_gb=50,
    actors=10,
    actors_per_machine=4,
    actor_instance_types=["smaller", "small"],
    evaluator_instance_types=["smaller"],
    spot_price_share=0.25,
)


def test_every_line_is_what_a_pencil_says() -> None:
    lines = {line.part: line for line in estimate(LAYOUT, PRICES, bucket_gb=10.0)}
    assert lines["learner"].hourly_usd == pytest.approx(1.0)
    assert lines["replay"].hourly_usd == pytest.approx(1.0)  # two at 0.5
    # Ten actors are three machines; AWS may choose the dearer type.
    assert lines["actors"].what == "3 x small, spot at 25%"
    assert lines["actors"].hourly_usd == pytest.approx(0.075)
    assert lines["actors"].on_demand_usd == pytest.approx(0.3)
    assert lines["evaluator"].hourly_usd == pytest.approx(0.02)
    # 100 + 2 x (40 + 50) + 3 x 16 + 16 = 344 GB at 0.0001 an hour
    assert (lines["disks"].what, lines["disks"].hourly_usd) == ("344 GB", pytest.approx(0.0344))
    assert lines["network"].hourly_usd == pytest.approx(0.06)
    assert lines["bucket"].hourly_usd == pytest.approx(0.0003)  # 10 GB at 0.00003
    assert (lines["traffic"].hourly_usd, lines["traffic"].once_usd) == (0.0, pytest.approx(0.9))
    assert lines["fixed"].hourly_usd == pytest.approx(0.01)  # 7.3 a month
    sum_usd = 1.0 + 1.0 + 0.075 + 0.02 + 0.0344 + 0.06 + 0.0003 + 0.01
    assert hourly_usd(list(lines.values())) == pytest.approx(sum_usd)
    assert total_usd(list(lines.values()), 2.0) == pytest.approx(2 * sum_usd + 0.9)
    on_demand_usd = sum_usd + 0.225 + 0.06
    assert total_usd(list(lines.values()), 2.0, on_demand=True) == pytest.approx(2 * on_demand_usd + 0.9)
    # 1,000 steps a second are 3.6 million an hour.
    assert million_steps_usd(list(lines.values()), 1000.0) == pytest.approx(sum_usd / 3.6)


def test_learners_that_join_are_a_line_of_their_own() -> None:
    layout = LAYOUT.model_copy(update={"learners": 3})
    lines = {line.part: line for line in estimate(layout, PRICES, bucket_gb=0.0)}
    assert lines["learner"].hourly_usd == pytest.approx(1.0)
    assert lines["learner-peer"].what == "2 x big, spot at 25%"
    assert lines["learner-peer"].hourly_usd == pytest.approx(0.5)
    assert lines["learner-peer"].on_demand_usd == pytest.approx(2.0)
    assert lines["disks"].what == "544 GB"  # two more of 100
    layout = layout.model_copy(update={"learner_peer_spot": False})
    lines = {line.part: line for line in estimate(layout, PRICES, bucket_gb=0.0)}
    assert lines["learner-peer"].hourly_usd == pytest.approx(2.0)


def test_without_gateway_every_machine_has_an_address() -> None:
    layout = LAYOUT.model_copy(update={"nat_gateway": False, "tensorboard_cidrs": ["203.0.113.7/32"]})
    [line] = [each for each in estimate(layout, PRICES, bucket_gb=0.0) if each.part == "network"]
    assert line.hourly_usd == pytest.approx(0.08)  # learner, two shards, three of actors, evaluator; one more


def test_zones_pay_for_what_they_send_each_other() -> None:
    layout = LAYOUT.model_copy(update={"availability_zones": ["a", "b"]})
    lines = estimate(layout, PRICES, bucket_gb=1.0, zone_gb_per_hour=30.0)
    [line] = [each for each in lines if each.part == "traffic"]
    assert line.hourly_usd == pytest.approx(0.6)


def test_without_machines_there_is_no_line_of_them() -> None:
    layout = LAYOUT.model_copy(update={"actors": 0, "evaluator": False})
    parts = {line.part for line in estimate(layout, PRICES, bucket_gb=0.0)}
    assert not parts & {"actors", "evaluator"}


def test_an_unknown_price_is_no_sum() -> None:
    layout = LAYOUT.model_copy(update={"learner_instance_type": "p9.unheard"})
    with pytest.raises(ConfigError, match=r"p9\.unheard.*hourly_prices_usd"):
        estimate(layout, PRICES, bucket_gb=0.0)


def test_every_preset_has_machines_whose_prices_are_known() -> None:
    prices = read_prices({})
    for name in preset_names():
        layout = layout_of(load_config(name), {})
        assert hourly_usd(estimate(layout, prices, bucket_gb=1.0)) > 0.2, name


def test_machines_follow_from_the_configuration() -> None:
    paper = layout_of(load_config("pong-apex-paper"), {})
    assert (paper.actors, paper.actors_per_machine, paper.slots_per_actor) == (12, 4, 30)
    assert (paper.learner_device, paper.replay_instance_type) == ("cuda", "r6i.xlarge")
    assert layout_of(load_config("cartpole-ppo", None, {"learner.processes": "2"}, {}), {}).learners == 2
    small = layout_of(load_config("cartpole-ppo"), {"actors": 3})
    assert (small.learner_device, small.replay_instance_type, small.actors) == ("cpu", "t3.medium", 3)


def test_the_defaults_are_those_of_terraform() -> None:
    spec = importlib.util.spec_from_file_location("document", TERRAFORM / "document.py")
    assert spec is not None
    assert spec.loader is not None
    document = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(document)
    said = dict(document.blocks(TERRAFORM, "variable"))
    for name, value in Layout().model_dump().items():
        assert value == json.loads(said[name]["default"]), name


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("actor=3", "did you mean actors"),
        ("actors", "NAME=VALUE"),
        ("keys_dir=x", "sets it itself"),
    ],
)
def test_wrong_variables_are_refused(word: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_variables([word])


def test_a_wrong_value_names_its_variable() -> None:
    with pytest.raises(ConfigError, match="--var actors: Input should be"):
        layout_of(load_config("cartpole-ppo"), parse_variables(["actors=many"]))


@pytest.fixture
def out(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    return capsys


def test_the_command_prints_the_list_with_its_date(out: pytest.CaptureFixture[str]) -> None:
    prices = json.loads((TERRAFORM / "prices.json").read_text())
    assert cli.main(["cloud", "estimate", "pong-apex-paper", "--hours", "2"]) == 0
    text = out.readouterr().out
    assert f"prices of {prices['date']}, {prices['region']}" in text
    parts = ["learner", "replay", "actors", "evaluator", "disks", "network", "bucket", "traffic", "fixed"]
    assert re.findall(r"^(\w+) .* [\d.]+ +[\d.]+ +[\d.]+$", text, re.MULTILINE) == [*parts, "total"]
    assert "per million steps" not in text
    words = ["--hours", "2000", "--steps-per-second", "600_000", "--replay.shards", "14"]
    assert cli.main(["cloud", "estimate", "pong-apex-paper", *words]) == 0
    text = out.readouterr().out
    assert " 2,000 h " in text
    assert ": 4,320,000 million at 600,000 a second" in text
    assert "e+0" not in text


def test_a_rate_gives_dollars_per_million_steps_and_the_hours(out: pytest.CaptureFixture[str]) -> None:
    words = ["--var", 'hourly_prices_usd={"c6i.xlarge": 1.0}', "--run.total_steps", "7_200_000", "--json"]
    assert cli.main(["cloud", "estimate", "cartpole-ppo", "--steps-per-second", "1000", *words]) == 0
    values = json.loads(out.readouterr().out)
    assert values["hours"] == pytest.approx(2.0)
    assert values["parts"]["learner"]["usd"] == pytest.approx(2.0)
    assert values["million_steps_usd"] == pytest.approx(values["hourly_usd"] / 3.6)


def test_the_rate_of_an_earlier_run_counts(out: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"metrics": {"speed/steps_per_s": 500.0}}))
    words = ["cloud", "estimate", "cartpole-ppo", "--hours", "1", "--json", "--like"]
    assert cli.main([*words, str(tmp_path)]) == 0
    values = json.loads(out.readouterr().out)
    assert values["million_steps_usd"] == pytest.approx(values["hourly_usd"] / 1.8)
    (tmp_path / "status.json").write_text("{}")
    assert cli.main([*words, str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "give the duration"),
        (["--hours", "1", "--var", 'availability_zones=["a","b"]'], "--zone-gb-per-hour"),
    ],
)
def test_what_is_missing_is_asked_for(words: list[str], match: str, out: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cloud", "estimate", "cartpole-ppo", *words]) == 2
    assert match in out.readouterr().err
