"""Planted faults of learning: what real runs recorded, and what is said to keep them from learning."""

import io
import json
import math
import re

import numpy as np
import pytest
from rich.console import Console

import troupe.services.__main__ as cli
from tests.doctor.faults import PLANTS, train, unpack
from tests.launcher.test_progress import STATUS, view
from troupe.common.config import load_config, to_toml
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.config.schema import SECTIONS
from troupe.services.doctor.why import NOTHING, lines_of
from troupe.services.launcher.evidence import Evidence, of_run
from troupe.services.launcher.learning import FAULTS, faults
from troupe.services.launcher.panel import render
from troupe.services.launcher.troubleshooting import SHOWN

FAULTY = [name for name, plant in PLANTS.items() if plant.finding]
HEALTHY = [name for name, plant in PLANTS.items() if not plant.finding]


def test_ten_faults_and_five_healthy_runs_are_kept():
    assert len(FAULTY) >= 10
    assert len(HEALTHY) >= 5


@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_is_named_first_or_second(name, tmp_path):
    found = faults(of_run(unpack(name, tmp_path)))
    assert PLANTS[name].finding in [each.name for each in found[:2]]
    assert name_of(SHOWN[name]) == [each.name for each in found]


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_run_without_a_fault(name, tmp_path):
    assert lines_of(unpack(name, tmp_path)) == [NOTHING] == [SHOWN[name]]


def name_of(shown):
    return shown.split(", ")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_is_named_by_a_planted_run_or_by_figures_made_for_it(fault, tmp_path):
    planted = {each for name in FAULTY for each in name_of(SHOWN[name])}
    # By tests of their own: they go by returns alone, or by what the status says.
    assert fault.name in planted | MADE.keys() | {
        "fallen",
        "failing-episodes",
        "endless-episodes",
        "learner-dies",
    }


RISEN = [(steps, float(steps)) for steps in range(20)]
FLAT = [(steps, 1.0 + 0.1 * (steps % 2)) for steps in range(20)]
WORTH = {"learner/reward_size_learned": 1.0, "train/episode_length": 300.0}
MADE = {
    "values": ("cartpole-apex", {**WORTH, "learner/q_mean": 900.0}, {**WORTH, "learner/q_mean": 99.0}),
    "policy-moves": ("cartpole-ppo", {"learner/clipped": 0.9}, {"learner/clipped": 0.3}),
    "repeats": (
        "cartpole-apex",
        {"replay/samples_per_s": 9000.0, "replay/inserts_per_s": 9.0},
        {"replay/samples_per_s": 900.0, "replay/inserts_per_s": 9.0},
    ),
    "exploration": ("cartpole-pqn", {"learner/epsilon": 0.001}, {"learner/epsilon": 0.01}),
    "unexplained": (
        *("cartpole-ppo", {"learner/explained_variance": -0.3}),
        {"learner/explained_variance": 0.3},
    ),
    "gradients": ("cartpole-ppo", {"learner/grad_norm": 90.0}, {"learner/grad_norm": 5.0}),
}
"""Preset, figures that mean a fault, and such as do not."""


@pytest.mark.parametrize("name", MADE)
def test_figures_that_mean_a_fault(name):
    preset, bad, good = MADE[name]
    config = load_config(preset, None, {}, {})
    assert [each.name for each in faults(Evidence(config, bad, FLAT))] == [name]
    assert not faults(Evidence(config, good, FLAT))


def test_a_run_that_learns_from_a_data_set_is_judged_by_its_evaluations(tmp_path):
    fields = {"run.offline": "my/pendulum-v0", "actor.processes": "0", "replay.capacity_items": "600"} | {
        "replay.min_items": "1"
    }
    (tmp_path / "config.toml").write_text(to_toml(load_config("pendulum-iql", None, fields, {})))
    line = "{0},{0},{0},{0},{1},{2},{3}\n"
    for kept, named in ((FLAT, ["unexplained"]), (RISEN, [])):
        rows = [line.format(step, "evaluator", "eval/episode_return", value) for step, value in kept]
        rows += [line.format(step, "learner", "learner/explained_variance", -0.3) for step, _ in kept]
        head = "wall_s,steps,frames,updates,source,name,value\n"
        (tmp_path / "metrics.csv").write_text(head + "".join(rows))
        # Nor is it said that replay is small: nothing of a data set is ever lost.
        assert [each.name for each in faults(of_run(tmp_path))] == named


@pytest.mark.parametrize("size", [5e4, 2e-4])
@pytest.mark.parametrize(
    ("preset", "option"),
    [
        ("cartpole-apex", "normalize_rewards"),
        ("cartpole-sac", "normalize_rewards"),
        ("memory-r2d2", "normalize_rewards"),
        ("cartpole-impala", "normalize_returns"),
        ("cartpole-ppo", "normalize_returns"),
    ],
)
def test_rewards_of_another_size_are_named_with_the_option_that_takes_them(preset, option, size):
    figures = {"learner/reward_size": size, "learner/reward_size_learned": size}
    found = faults(Evidence(load_config(preset), figures, FLAT))
    if preset == "memory-r2d2" and size > 1.0:
        assert not found  # its values are rescaled
    else:
        assert [each.name for each in found] == ["reward-scale"]
        assert f"--agent.{option} true in a new run" in found[0].advice
    assert not faults(Evidence(load_config(preset, None, {f"agent.{option}": "true"}), figures, FLAT))


def test_an_agent_that_has_learned_may_do_the_same_always():
    config = load_config("cartpole-ppo", None, {}, {})
    flat = {"learner/entropy_share": 0.001, "learner/dead_share/torso": 0.9}
    assert [each.name for each in faults(Evidence(config, flat, FLAT))] == ["dead-units", "entropy"]
    assert not faults(Evidence(config, flat, RISEN))
    assert not faults(Evidence(config, flat, FLAT[:2]))  # too early to tell


def went(*levels, deviation=0.4, seed=0):
    """Returns `[(steps, value)]`, ten around each level, 100 steps apart."""
    values = np.repeat(levels, 10) + np.random.default_rng(seed).normal(0.0, deviation, 10 * len(levels))
    return [(100.0 * (place + 1), float(value)) for place, value in enumerate(values)]


def test_returns_that_rose_and_fell_are_named_with_what_they_were_and_when():
    config = load_config("cartpole-ppo")
    for seed in range(50):
        returns = went(-1.5, 0.0, 1.8, 0.0, -0.8, seed=seed)
        (found,) = faults(Evidence(config, {}, returns))
        assert (found.name, found.advice) == ("fallen", "a smaller --agent.learning_rate")
        best, steps, last = re.findall(r"-?\d[\d,.]*\d", found.what)
        assert (float(best), float(last)) == pytest.approx((1.8, -0.8), abs=0.5)
        assert 2_500 <= int(steps.replace(",", "")) <= 3_500


@pytest.mark.parametrize(
    "levels",
    [
        (0.0,) * 6,  # never rose
        (-1.0, 0.0, 1.0, 2.0, 2.0),
        (-1.0, 0.0, 2.0, 0.3, 2.0),  # back again
        (-1.0, 2.0, 2.0, 1.0, 1.0),  # kept most of it
        (2.0, 1.0, 0.0, -1.0, -2.0),  # only fell
    ],
)
def test_returns_that_did_not_rise_or_kept_it_are_not(levels):
    config = load_config("cartpole-ppo")
    for seed in range(50):
        assert not faults(Evidence(config, {}, went(*levels, seed=seed)))
    assert not faults(Evidence(config, {}, went(-1.5, 1.8, -0.8)[::6]))  # too few to tell


DIED = "troupe: error: KeyError: 'rewards' (a2c.py:118)"
GOES_ON = "2026-11-27 20:24:00,000 INFO    learner: joined"


@pytest.mark.parametrize(
    ("log", "status", "is_named"),
    [
        ([GOES_ON, DIED], {}, True),
        ([DIED, GOES_ON], {"restarts": 2, "updates_since_start": 0}, True),  # it waits for its first update
        ([DIED, GOES_ON], {"restarts": 2, "updates_since_start": 9}, False),
        ([DIED, GOES_ON], {"restarts": 0, "updates_since_start": 0}, False),  # resumed by somebody
        ([GOES_ON], {"restarts": 1, "updates_since_start": 0}, False),
        ([], {}, False),
    ],
)
def test_what_the_learner_died_of_is_named(log, status, is_named, tmp_path):
    run = unpack("healthy-ppo", tmp_path)
    (run / "logs").mkdir()
    (run / "logs" / "learner.log").write_text("\n".join([*log, ""]))
    (run / "status.json").write_text(json.dumps(status))
    (said,) = lines_of(run)
    if is_named:
        assert said.startswith(
            "learner-dies: the learner died with an error, and there has been no update since: KeyError: "
        )
        assert "'rewards' (a2c.py:118); logs/learner.log" in said
        (run / "metrics.csv").unlink()  # of the first update there is no record
        assert lines_of(run) == [said]
    else:
        assert said == NOTHING


LAST = "actor-0: my:Env raised KeyError: 'x' (env.py:11) at step 150, slot 3, seed 5"


@pytest.mark.parametrize(
    ("told", "share"),
    [
        ({"failures": 128, "episodes": 0}, "100% of the episodes (128 of 128)"),
        ({"failures": 30, "episodes": 70}, "30% of the episodes (30 of 100)"),
        ({"failures": 10, "episodes": 90}, ""),
        ({"failures": 4, "episodes": 0}, ""),
        ({"failures": 128}, ""),  # of an earlier version, which has not counted the others
        ({"failures": 0, "episodes": 0}, ""),
    ],
)
def test_episodes_that_fail_are_named_with_the_line_that_fails(told, share, tmp_path, capsys):
    run = unpack("healthy-ppo", tmp_path)
    (run / "status.json").write_text(json.dumps({"environments": {"last": LAST, **told}}))
    assert cli.main(["why", str(run)]) == 0
    said = capsys.readouterr().out
    if not share:
        assert said == f"{NOTHING}\n"
        return
    assert said.startswith(f"failing-episodes: {share} ended with a failure of the environment")
    assert (
        f"the last: {LAST}; fix it there, then test for longer with troupe env check gym:CartPole-v1 " in said
    )
    # Also in the panel, even before there is an update.
    status = {"steps": 9, "environments": {"last": LAST, **told}}
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(view(status, config=load_config("cartpole-ppo")), "title", "the footer"))
    assert f"learning: {share} ended with a failure" in console.export_text()


def test_a_run_in_which_no_episode_ends_is_named(tmp_path):
    run = unpack("healthy-ppo", tmp_path)
    slots = of_run(run).config.total_slots
    head, *rows = (run / "metrics.csv").read_text().splitlines()
    endless = [row for row in rows if ",train/episode_" not in row]
    assert endless != rows

    def found(rows, steps, told=None):
        late = f"99,{steps},{steps},9,learner,speed/steps_per_s,100"
        (run / "metrics.csv").write_text("\n".join([head, *rows, late, ""]))
        (run / "status.json").write_text(json.dumps({"environments": told or {}}))
        return [each.name for each in faults(of_run(run))]

    made = max(int(row.split(",")[1]) for row in rows)
    enough = max(made, 5_000 * slots)
    assert found(endless, enough) == ["endless-episodes"]
    assert found(endless, enough, {"failures": 3, "episodes": 0}) == []  # cut off by these
    assert found(rows, enough) == []
    few = [row for row in endless if int(row.split(",")[1]) < 4_000 * slots]
    assert found(few, 4_999 * slots) == []
    status = {"steps": enough, "updates": 9, "metrics": {}}
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(render(view(status, config=load_config("cartpole-ppo")), "title", "the footer"))
    assert "learning: no episode has ended in " in console.export_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_field_that_is_advised_exists(fault):
    known = {f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields}
    known |= {f"agent.{name}" for algorithm in ALGORITHMS for name in agent_model(algorithm).model_fields}
    named = re.findall(r"--([a-z]+\.[a-z_]+)", fault.advice + fault.page_advice)
    assert not set(named) - known


def test_the_command_prints_findings_by_run_and_as_json(tmp_path, capsys):
    bad, good = unpack("raw-pixels", tmp_path), unpack("healthy-ppo", tmp_path)
    assert cli.main(["why", str(bad)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("inputs: the network sees numbers from 0 to 255")
    assert "--agent.normalize_vectors true" in first
    assert cli.main(["why", str(bad), str(good)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{bad}:", f"  {first}", f"{good}:", f"  {NOTHING}"]
    assert cli.main(["why", "--json", str(bad), str(good)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told[str(bad)]] == ["inputs"]
    assert told[str(good)] == []


def test_a_directory_of_runs_stands_for_those_that_have_recorded_something(tmp_path, capsys):
    bad, good, new = (unpack(name, tmp_path) for name in ("raw-pixels", "healthy-ppo", "healthy-apex"))
    (new / "metrics.csv").unlink()
    assert cli.main(["why", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [f"{good}:", f"{bad}:"]
    assert err == f"troupe: left out: {new} has no record of learning yet: see logs/learner.log\n"
    assert cli.main(["why", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_run_that_has_recorded_nothing_is_told_in_one_line(tmp_path, capsys):
    run = unpack("healthy-ppo", tmp_path)
    (run / "metrics.csv").unlink()
    assert cli.main(["why", str(run)]) == 2
    assert "has no record of learning yet" in capsys.readouterr().err


def test_the_last_line_of_the_panel_is_the_first_finding():
    def last_line(**metrics):
        console = Console(width=400, record=True, file=io.StringIO())
        config = load_config("cartpole-ppo", None, {}, {})
        status = {**STATUS, "metrics": {**STATUS["metrics"], **metrics}}
        console.print(render(view(status, config=config), "title", "the footer"))
        return console.export_text().splitlines()[-2]

    seen = {"learner/seen_mean": 0.1, "learner/seen_least": 0.0, "learner/seen_most": 255.0}
    shown = last_line(**seen, **{"learner/seen_deviation": 80.0})
    assert "learning: the network sees numbers from 0 to 255" in shown
    assert "the footer" in last_line(**seen, **{"learner/seen_deviation": 2.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 1e-320, 0.0, -1.0])
def test_figures_beyond_all_reckoning_neither_raise_nor_are_shown(value):
    names = {name for fault in FAULTS for name in fault.metrics}
    for preset in ("cartpole-apex", "cartpole-ppo"):
        config = load_config(preset, None, {}, {})
        run = Evidence(config, dict.fromkeys(names, value), [(steps, value) for steps in range(9)])
        said = " ".join(each.what for each in faults(run))
        assert not re.search(r"\b(nan|inf)\b|e[+]300", said)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fault_is_named_in_a_run_of_the_services(tmp_path, monkeypatch):
    monkeypatch.setattr(PLANTS["raw-pixels"], "steps", 4_000)
    found = faults(of_run(train("raw-pixels", tmp_path)))
    assert "inputs" in [each.name for each in found[:2]]
