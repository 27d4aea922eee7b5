"""Planted bottlenecks: what real runs reported of themselves, and what is said to limit them."""

import json
import re
import tempfile
from pathlib import Path

import pytest

from tests.harness import until
from tests.launcher.plants import FOLDER, PLANTS, running
from troupe.common.config.loading import config_from_dict, load_config, read_config
from troupe.common.config.text import load_toml
from troupe.common.runtime.files import read_status
from troupe.services.launcher.findings import LIMITS, findings, verdict
from troupe.services.launcher.progress import run_view, settings_of
from troupe.services.launcher.troubleshooting import page

NAMED = {
    "slow-environment": ("environment", "--actor.env_threads"),
    "one-torch-thread": ("torch-threads", "--learner.torch_threads 2"),
    "tiny-queue": ("queue", "capacity"),
    "lagging-parameters": ("old-parameters", "--actor.params_period_steps"),
    "full-disk": ("full-disk", "--replay.capacity_items"),
    "noisy-neighbour": ("neighbours", "stop some of them"),
    "small-batches": ("small-batches", "--inference.max_batch"),
    "slow-link": ("link", "--learner.prefetch"),
    "limiter": ("samples-per-insert", "--replay.samples_per_insert"),
    "evaluator": ("evaluator", "--evaluator.period_s"),
    "slow-actor": ("one-actor", "troupe actor --slots"),
    "compression": ("compression", "--replay.compression none"),
}

RECORDED = sorted(PLANTS.keys() - {"compression"})
"""Of compression the next test says more: it is found, and is not the loudest."""


def recorded(name):
    """The view of a recorded run."""
    found = json.loads((FOLDER / f"{name}.json").read_text())
    config = config_from_dict(load_toml(found["config"]))
    total = config.run.total_steps
    return run_view(
        found["status"], total_steps=total, elapsed_s=60.0, cores=found["cores"], **settings_of(config)
    )


@pytest.mark.parametrize("name", RECORDED)
def test_a_planted_bottleneck_is_named_with_the_flag_that_helps(name):
    row, flag = NAMED[name]
    view = recorded(name)
    # Other programs had most of the machine while these were recorded: that is found too, and no plant.
    found = [each for each in findings(view) if each.name != "neighbours" or row == "neighbours"]
    assert found[0].name == row, [(each.name, round(each.loudness, 2)) for each in findings(view)]
    assert flag in found[0].advice
    assert verdict(view) == (findings(view)[0].what, findings(view)[0].advice)


def test_compression_that_saves_nothing_is_found_though_it_costs_little():
    """Packing gives up on what does not shrink, so that a real run loses next to nothing by it."""
    row, flag = NAMED["compression"]
    (found,) = [each for each in findings(recorded("compression")) if each.name == row]
    assert found.loudness < 0.1
    assert "1.02 times smaller" in found.what
    assert flag in found.advice


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slow_environment_is_named_while_the_services_run():
    with (
        tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder,  # paths of sockets are short
        running(PLANTS["slow-environment"], Path(folder)) as (run, learner),
    ):
        until(lambda: (run / "config.toml").exists() or learner.poll() is not None)
        assert learner.poll() is None

        def named():
            config = read_config(run / "config.toml")
            settings = settings_of(config) | {"elapsed_s": 60.0, "cores": 2}
            view = run_view(read_status(run), total_steps=config.run.total_steps, **settings)
            found = findings(view) if view.metrics.get("speed/updates_per_s") else []
            return [each for each in found if each.name != "neighbours"][:1]

        until(lambda: [each.name for each in named()] == ["environment"], 240.0)


def quiet(preset, fields, metrics, **services):
    """A run on a machine of four cores that does nothing else; services are given as cores, or metrics."""
    config = load_config(preset, None, {"actor.processes": "1", **fields}, {})
    by_service = {}
    for name, values in services.items():
        values = {"cpu_cores": values} if isinstance(values, float) else values
        kind = {"evaluator": "eval"}.get(name.split("_")[0], name.split("_")[0])
        named = {key if "/" in key else f"{kind}/{key}": value for key, value in values.items()}
        by_service[name.replace("_", "-")] = named
    rates = {"speed/updates_per_s": 20.0, "speed/steps_per_s": 500.0, "replay/items": 9000}
    status = {"metrics": {**rates, **metrics}, "services": by_service, "steps": 10_000}
    return run_view(status, total_steps=1_000_000, elapsed_s=60.0, cores=4, **settings_of(config))


LEARNS = {"learner/wait_share": 0.02}
WAITS = {"learner/wait_share": 0.8}
MADE = {
    "torch-threads": (
        "cartpole-apex",
        {},
        LEARNS,
        {"learner": 1.0, "actor_0": 0.3},
        "--learner.torch_threads 3",
    ),
    "evaluator": (
        *("cartpole-apex", {}, LEARNS),
        {"learner": 0.9, "actor_0": 0.9, "evaluator": 2.0},
        "--evaluator.period_s",
    ),
    "cpu": ("cartpole-apex", {}, LEARNS, {"learner": 1.0, "actor_0": 1.5, "actor_1": 1.3}, "more cores"),
    "queue": (
        *("cartpole-impala", {}, {"learner/wait_share": 0.4, "actor/insert_blocked_share": 0.4}),
        {"learner": 0.5, "actor_0": 0.5},
        "such as 32",
    ),
    "outstanding": (
        *("cartpole-apex", {"actor.max_outstanding_inserts": "1"}),
        {"learner/wait_share": 0.5, "actor/insert_blocked_share": 0.4},
        {"learner": 0.5, "actor_0": 0.5},
        "--actor.max_outstanding_inserts 4",
    ),
    "turns": ("cartpole-ppo", {}, WAITS, {"learner": 0.5, "actor_0": 0.5}, "agent.max_staleness = 1"),
    "unpacking": (
        *("cartpole-apex", {}, {**WAITS, "learner/unpack_share": 0.75}),
        {"learner": 0.9, "actor_0": 0.5, "replay_0": {"cpu_cores": 0.1, "learner/batch_ms": 80.0}},
        "--replay.compression none",
    ),
    "actors": (
        *("cartpole-apex", {}, WAITS),
        {
            "actor_0": 1.0,
            "replay_0": {"cpu_cores": 0.1, "waits_for_items_share": 0.8, "learner/batch_ms": 90.0},
        },
        "actor.processes",
    ),
    "serving": (
        *("pendulum-iql", {"run.offline": "my/pendulum-v0", "actor.processes": "0"}, WAITS),
        {"learner": 0.3, "replay_0": 0.1},
        "learner.prefetch",
    ),
    "learner": ("cartpole-apex", {"learner.device": "cuda"}, LEARNS, {"learner": 1.0}, "smaller network"),
    "small-batches": (
        *("cartpole-apex", {"inference.mode": "central"}),
        {**LEARNS, "inference/busy_share": 0.9, "inference/batch_slots": 2.0},
        {"learner": 1.9, "actor_0": {"cpu_cores": 0.2, "slots": 16.0}},
        "--inference.min_batch 8",
    ),
    "compression": (
        *("pong-apex", {}, {**LEARNS, "learner/unpack_share": 0.2}),
        {"actor_0": {"compression_ratio": 1.03, "pack_share": 0.4}, "learner": 0.4},
        "--replay.compression none",
    ),
    "neighbours": (
        *("cartpole-apex", {}, LEARNS),
        {"learner": {"cpu_cores": 0.3, "starved_cores": 0.7}, "actor_0": 0.3},
        "stop some of them",
    ),
}


@pytest.mark.parametrize("row", MADE)
def test_on_a_quiet_machine_each_row_is_the_loudest_of_its_own_figures(row):
    preset, fields, metrics, services, flag = MADE[row]
    found = findings(quiet(preset, fields, metrics, **services))
    assert found[0].name == row, [(each.name, round(each.loudness, 2)) for each in found]
    assert flag in found[0].advice


def test_a_run_without_actors_waits_for_none():
    fields = {"run.offline": "my/pendulum-v0", "actor.processes": "0", "learner.device": "cuda"}
    waits = {"replay/items": 0.0, "speed/updates_per_s": 0.0, "speed/steps_per_s": 0.0}
    assert "waiting for replay to serve the data set" in verdict(quiet("pendulum-iql", fields, waits))[0]
    learns = quiet("pendulum-iql", fields, LEARNS, learner=1.0, replay_0=0.1)
    assert "bottleneck: learner" in verdict(learns)[0]
    assert not [each for each in findings(learns) if "actor" in each.what + each.advice]


def test_rows_are_found_by_what_was_planted_or_made():
    assert {limit.name for limit in LIMITS} == {row for row, _ in NAMED.values()} | MADE.keys()
    assert NAMED.keys() == PLANTS.keys()
    assert len(PLANTS) == 12
    assert len(RECORDED) == 11


def test_who_waits_for_a_side_that_is_slow_loses_nothing_by_missing_cores():
    starved = {"cpu_cores": 0.1, "starved_cores": 1.5}
    metrics = {"learner/wait_share": 0.95, "actor/env_ms": 1600.0}
    found = findings(quiet("cartpole-apex", {}, metrics, learner=starved, actor_0=0.1))
    assert [each.name for each in found][:1] == ["environment"]
    assert "neighbours" not in {each.name for each in found}


def test_old_parameters_are_the_fault_of_the_period_or_of_their_way():
    metrics = {**LEARNS, "params/staleness": 60.0}
    (slow, *_), (long, *_) = (
        findings(quiet("cartpole-apex", {"actor.params_period_steps": steps}, metrics, learner=1.0))
        for steps in ("1", "100000")
    )
    assert (slow.name, long.name) == ("old-parameters", "old-parameters")
    assert "--learner.publish_dtype bfloat16" in slow.advice
    assert "--actor.params_period_steps" in long.advice


def test_the_page_is_that_of_the_table():
    assert (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text() == page()
    assert not re.search("(?<!`)``(?!`)", page()), "marked as code twice"
