"""DMLab-30, one id for thirty levels: which are played, and what the record says of those that are not."""

import csv
import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

import troupe.services.__main__ as cli
from tests.envs.engines import EPISODE_STEPS
from tests.experiments.folders import make_run
from tests.harness import games
from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.config.schema import EvaluatorConfig
from troupe.common.envs import make_spec, make_vector
from troupe.common.envs.dmlab import DMLAB30
from troupe.common.runtime import StopSignal
from troupe.common.stats.scores import random_and_human
from troupe.common.wire.codec import encode
from troupe.common.wire.control.client import Games, Params, RunState
from troupe.common.wire.messages import Telemetry
from troupe.common.wire.security import claims
from troupe.serial import SerialTraining
from troupe.services.actor.service import MAX_GAMES, MAX_NAMED_GAMES
from troupe.services.actor.timing import Timing, TimingReports
from troupe.services.evaluator.games import play
from troupe.services.evaluator.report import _COLUMNS, markdown, summary, table
from troupe.services.evaluator.service import Evaluator
from troupe.services.launcher.panel import render
from troupe.services.launcher.progress import plain_line, run_view
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record.gathered import Gathered
from troupe.services.learner.record.reporter import Reporter
from troupe.services.learner.saving.counters import RunCounters

pytestmark = pytest.mark.usefixtures("engines")

RETURN = 0.5 * 4 * EPISODE_STEPS
"""Of every game of the stand-in, which pays 0.5 an action, and repeats each four times."""


class Learner:
    """What an evaluator needs of the control client; hands each report to the run's record."""

    def __init__(self, reporter):
        self.reporter = reporter
        self.state = RunState(steps=10, version=1, stopping=False)

    def send_telemetry(self, metrics, blobs=None, fields=None):
        self.reporter.collect(Report("evaluator", "evaluator", 1, metrics, fields or games(), blobs or {}))


class NoPeers:
    def peers(self):
        return []

    def tell(self, status):
        pass

    def leases(self):
        return {}


def small(**fields):
    kwargs = "{width = 32, height = 24, instructions = false}"
    given = {"agent.torso": "shallow", "env.kwargs": kwargs, "evaluator.video": "false", **fields}
    return load_config("dmlab-impala-paper", None, given, {})


def recorded(path, config):
    tasks = make_spec(config.env).tasks
    return Reporter(
        path,
        config.env.id,
        1000,
        10.0,
        RunCounters(4, StepBudget()),
        None,
        gathered=Gathered(config, tasks),
        tasks=tasks,
    )


def evaluated(path, episodes, slots):
    """Play every part of an evaluation into a run's record."""
    config = small(**{"evaluator.episodes": str(episodes), "evaluator.slots": str(slots)})
    reporter = recorded(path, config)
    evaluator = Evaluator(config, Learner(reporter), StopSignal())
    for part in range(math.ceil(episodes / slots)):
        evaluator._evaluate(Games(part, Params(3, evaluator._agent.params())))
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    return json.loads((path / "evaluations.jsonl").read_text())


def rows(path):
    with (path / "metrics.csv").open() as file:
        return {row["name"]: float(row["value"]) for row in csv.DictReader(file)}


def view(path):
    """What the terminal shows, in any form."""
    return run_view(json.loads((path / "status.json").read_text()), total_steps=1000)


def panel(path):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render(view(path), "title", "footer"))
    return console.export_text()


def human(level):
    low, high = random_and_human(f"dmlab:{level}")
    return (RETURN - low) / (high - low)


def test_a_live_evaluation_in_rounds_of_slots_plays_all_levels(tmp_path, caplog):
    caplog.set_level("INFO")
    row = evaluated(tmp_path, episodes=60, slots=7)
    assert row["level_of_game"] == [*DMLAB30, *DMLAB30]
    assert (row["levels_played"], row["levels"]) == (30, 30)
    found = rows(tmp_path)
    assert (found["eval/levels_played"], found["eval/levels"]) == (30, 30)
    assert found["eval/human_normalized"] == pytest.approx(np.mean([human(level) for level in DMLAB30]))
    assert found["eval/human_normalized/rooms_watermaze"] == pytest.approx(human("rooms_watermaze"))
    assert found["eval/return/rooms_watermaze"] == RETURN
    assert " levels" not in plain_line(view(tmp_path)) + panel(tmp_path) + caplog.text


def test_an_evaluation_of_fewer_games_than_levels_says_so(tmp_path, caplog, capsys):
    caplog.set_level("INFO")
    run = make_run(tmp_path / "some", **{"env.id": "dmlab:dmlab30"})
    (run / "metrics.csv").unlink()
    row = evaluated(run, episodes=12, slots=5)
    assert row["level_of_game"] == list(DMLAB30[:12])
    assert (row["levels_played"], row["levels"]) == (12, 30)
    found = rows(run)
    assert (found["eval/levels_played"], found["eval/levels"]) == (12, 30)
    assert found["eval/human_normalized"] == pytest.approx(np.mean([human(level) for level in DMLAB30[:12]]))
    assert f"return {RETURN:.2f}, 12 of 30 levels" in caplog.text
    assert f"eval return {RETURN:.2f} (12 of 30 levels)" in plain_line(view(run))
    assert "12 of 30 levels" in view(run).last_evaluation
    assert "played 12 of 30 levels: raise evaluator.episodes" in panel(run)
    assert cli.main(["compare", str(run)]) == 0
    assert "1 run with evaluations that played 12 of 30 levels" in capsys.readouterr().out
    assert cli.main(["compare", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["levels_missed"] == {str(run): "12 of 30 levels"}
    assert cli.main(["runs", str(run)]) == 0
    assert f"{RETURN:.2f} (12 of 30 levels)" in capsys.readouterr().out


def test_the_games_of_a_checkpoint_say_which_levels_are_left_out():
    config = small()
    agent = make_agent(config.agent, make_spec(config.env), seed=1)

    def reported(episodes):
        result = play(
            agent, config.env, episodes=episodes, slots=8, seed=1, epsilon=0.0, max_episode_frames=1000
        )
        checkpoint = type("Checkpoint", (), {"meta": {"config": config.to_dict()}, "path": "runs/a/step-1"})
        return summary(result, config, checkpoint, seed=1, epsilon=0.0, slots=8)

    some, all_of_them = reported(20), reported(30)
    assert list(some["tasks"]) == sorted(DMLAB30[:20])
    assert (some["levels_played"], some["levels"]) == (20, 30)
    assert "20 of 30 levels: give --episodes 30" in table(some)
    assert "| 20 (20 of 30 levels) |" in markdown([some])
    assert [_COLUMNS[name](some) for name in ("levels_played", "levels")] == ["20", "30"]
    assert (all_of_them["levels_played"], all_of_them["levels"]) == (30, 30)
    assert "of 30 levels" not in table(all_of_them) + markdown([all_of_them])


def test_training_has_returns_by_level_and_a_score_once_all_have_ended_a_game(tmp_path):
    config = small()
    reporter, reports = recorded(tmp_path, config), TimingReports()
    env = make_vector(config.env, 10, 1)
    env.assign(range(10), 10)
    env.reset()
    for played in (10, 20, 30):
        timing = Timing()
        for _ in range(EPISODE_STEPS):
            timing.take(env.step(np.zeros(10, np.int64)).episodes, list(range(10)))
        metrics, fields = reports.report(timing, 0)
        reporter.collect(Report("actor-0", "actor", 1, metrics, fields))
        reporter.tick(NoPeers(), 0.0, force=True)
        found = rows(tmp_path)
        ended = {name.removeprefix("train/return/") for name in found if name.startswith("train/return/")}
        assert ended == set(DMLAB30[:played])
        assert ("train/human_normalized" in found) == (played == 30)
    reporter.close()
    assert found["train/return/rooms_watermaze"] == RETURN
    assert found["train/human_normalized/rooms_watermaze"] == pytest.approx(human("rooms_watermaze"))
    scores = [human(level) for level in DMLAB30]
    assert found["train/human_normalized"] == pytest.approx(np.mean(scores))
    assert found["train/human_normalized_capped"] == pytest.approx(np.mean(np.minimum(1.0, scores)))


def test_a_serial_training_says_so_too(tmp_path, capsys):
    fields = {"run.total_steps": "500", "run.log_every_s": "0.001", "agent.unroll_steps": "5"}
    fields |= {"actor.processes": "1", "actor.slots": "10", "evaluator.episodes": "3"}
    fields |= {"replay.batch_size": "5", "agent.hidden_units": "8", "agent.lstm_units": "8"}
    SerialTraining(small(**fields), tmp_path / "run", StopSignal()).run()
    found = rows(tmp_path / "run")
    assert {name for name in found if name.startswith("train/return/")} == {
        f"train/return/{level}" for level in DMLAB30
    }
    assert found["train/human_normalized"] == pytest.approx(np.mean([human(level) for level in DMLAB30]))
    assert (found["eval/levels_played"], found["eval/levels"]) == (3, 30)
    assert f"return {RETURN:.2f}, 3 of 30 levels" in capsys.readouterr().out


def test_names_that_are_no_level_of_the_environment_do_not_count(tmp_path):
    reporter = recorded(tmp_path, small())
    ended = games([1.0, 2, 0], [3.0, 2, 1], tasks=["somebody/elses", DMLAB30[0]])
    reporter.collect(Report("actor-0", "actor", 1, {}, ended))
    reporter.close()
    found = rows(tmp_path)
    assert found["train/episode_return"] == 2.0
    assert [name for name in found if name.startswith("train/return/")] == [f"train/return/{DMLAB30[0]}"]


def test_every_report_of_an_evaluation_fits_into_a_message():
    section = EvaluatorConfig(episodes=1 << 16, slots=1024)
    _, part_games, *_ = section.division()
    ended = [[-1.5e20, 2**53]] * part_games
    told = {f"eval/env/a_number_that_an_environment_tells_{number}": 0.1 for number in range(60)}
    fields = games(*ended, tasks=[max(DMLAB30, key=len)] * part_games, part=3)
    encode(Telemetry(metrics=told, fields=fields, blobs={}).message())
    assert EvaluatorConfig(slots=7).division()[1] == 7


def test_a_report_of_many_games_fits_into_a_message():
    ended = [[-1.5e20, 2**53, (1 << 20) - 1, 0.1]] * MAX_GAMES
    metrics = {f"actor/a_metric_of_an_actor_{number:033}": 0.1 for number in range(claims.MAX_METRICS)}
    encode(Telemetry(metrics=metrics, fields=games(*ended), blobs={}).message())


def test_a_report_of_named_games_fits_into_a_message():
    ended = [[-1.5e20, 2**53, 65_535, 0.1]] * MAX_NAMED_GAMES
    names = [max(DMLAB30, key=len)] * MAX_NAMED_GAMES
    metrics = {f"actor/a_metric_of_an_actor_{number}": 0.1 for number in range(60)}
    encode(Telemetry(metrics=metrics, fields=games(*ended, tasks=names), blobs={}).message())
