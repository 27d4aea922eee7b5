"""One result for each evaluation, whoever played its games."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.harness import games, make_reporter
from troupe.common.config import load_config
from troupe.common.wire.control.messages import Game
from troupe.common.wire.control.params import Published
from troupe.services.learner.control.reports import Report
from troupe.services.learner.record.gathered import Gathered


def config(**fields):
    given = {"evaluator.episodes": "5", "evaluator.slots": "2", "env.id": "atari:pong", **fields}
    return load_config("pong-apex", None, given, {})


def part(number, version, *scores, **fields):
    entries = games(*([score, 100 + int(score)] for score in scores), part=number, **fields)
    metrics = {"eval/version": float(version), "eval/duration_s": 2.0}
    return Report(f"evaluator-{number}", "evaluator", number, metrics, entries)


def add(gathered, report, **how):
    return gathered.add(report, report.fields.part, **how)


def test_parts_in_any_order_are_one_result(tmp_path):
    reporter = make_reporter(tmp_path, total_steps=9, gathered=Gathered(config()))
    for each in (part(2, 3, 5.0), part(0, 3, 1.0, 2.0)):
        reporter.collect(each)
    assert reporter.evaluated_version == -1
    reporter.collect(part(1, 3, 3.0, 4.0))
    assert reporter.evaluated_version == 3
    reporter.collect(part(1, 3, 3.0, 4.0))  # once more
    reporter.close()
    (line,) = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line)["returns"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["name"].startswith("eval/")]
    got = {row["name"]: float(row["value"]) for row in rows}
    assert len(got) == len(rows)
    assert got["eval/episode_return"] == 3.0
    assert got["eval/episode_return_std"] == pytest.approx(np.std([1, 2, 3, 4, 5], ddof=1))
    assert (got["eval/episode_return_min"], got["eval/episode_return_max"]) == (1.0, 5.0)
    assert (got["eval/episode_length"], got["eval/episodes"], got["eval/duration_s"]) == (103.0, 5.0, 6.0)
    assert got["eval/human_normalized"] == pytest.approx((3 + 20.7) / (14.6 + 20.7), rel=1e-6)


def test_what_the_environment_says_is_of_all_games():
    gathered = Gathered(config())
    for number, scores, success in ((0, (1.0, 2.0), 1.0), (1, (3.0, 4.0), 0.5)):
        each = part(number, 3, *scores)
        each.metrics["eval/env/is_success"] = success
        assert add(gathered, each) == []
    (result,) = add(gathered, part(2, 3, 5.0))  # of a game that says nothing
    assert result.metrics["eval/env/is_success"] == 0.75


def test_what_is_missing_is_told(caplog):
    gathered = Gathered(config())
    assert add(gathered, part(0, 3, 1.0, 2.0)) == []
    assert gathered.expired() == []
    # The end of the run comes before the rest of version 3.
    assert add(gathered, part(0, 4, 7.0, 7.0), complete=True) == []
    assert add(gathered, part(1, 3, 1.0, 2.0)) == []  # too late
    (ended,) = gathered.end()
    assert ended.metrics["eval/version"] == 4
    assert ended.games == [Game(7.0, 107)] * 2
    assert "version 4 has 2 of 5 episodes" in caplog.text
    assert gathered.end() == []
    assert add(gathered, part(1, 4, 1.0, 2.0)) == []


def test_an_evaluation_has_a_deadline():
    gathered = Gathered(config(**{"evaluator.timeout_s": "1e-9"}))
    add(gathered, part(0, 3, 1.0, 2.0))
    (ended,) = gathered.expired()
    assert ended.metrics["eval/episode_return"] == 1.5


def test_tasks_are_scored_each_by_its_own():
    gathered = Gathered(config(**{"evaluator.episodes": "4"}), ("a", "b", "c"))
    add(gathered, part(1, 0, 3.0, 9.0, tasks=["a", "b"]))
    (ended,) = add(gathered, part(0, 0, 1.0, 5.0, tasks=["a", "b"]))
    assert ended.metrics["eval/return/a"] == 2.0
    assert ended.metrics["eval/return/b"] == 7.0
    assert (ended.metrics["eval/levels_played"], ended.metrics["eval/levels"]) == (2, 3)


def test_an_evaluation_that_is_given_up_counts_with_the_games_that_came():
    gathered = Gathered(config())
    add(gathered, part(0, 3, 1.0, 2.0))
    (ended,) = add(gathered, part(0, 4, 7.0, 7.0))
    assert (ended.metrics["eval/version"], ended.metrics["eval/episodes"]) == (3, 2)


def test_games_that_cannot_be_played_end_an_evaluation_with_their_reason(tmp_path, caplog):
    reporter = make_reporter(tmp_path, total_steps=9, gathered=Gathered(config()))
    for number in range(3):
        assert not reporter.is_evaluated(3)
        reporter.collect(part(number, 3, trouble="no episode of gym:X ends"))
    assert reporter.is_evaluated(3)
    assert (reporter.evaluated_version, reporter.is_evaluated(4)) == (-1, False)
    assert caplog.text.count("version 3 cannot be evaluated: no episode of gym:X ends") == 1
    reporter.collect(part(0, 4, 1.0, 2.0))
    reporter.collect(part(1, 4, trouble="no episode of gym:X ends"))
    reporter.collect(part(2, 4, 5.0))
    assert reporter.evaluated_version == 4
    assert "version 4 has 3 of 5 episodes: no episode of gym:X ends" in caplog.text
    reporter.close()


def test_few_games_choose_no_best_checkpoint(tmp_path):
    chosen = []

    class Best:
        def evaluated(self, played, mean_return):
            chosen.append((played.version, mean_return))

    reporter = make_reporter(tmp_path, total_steps=9, gathered=Gathered(config()), best=Best())
    for version, parts in ((3, 1), (4, 3)):
        for number in range(parts):
            scores = (21.0, 21.0)[: 1 if number == 2 else 2]
            params = Published(version, [], b"", 0, 0, 0.0)
            reporter.collect(replace(part(number, version, *scores), played=params))
        reporter.end_evaluation()
        assert reporter.evaluated_version == version
    assert chosen == [(4, 21.0)]
    reporter.close()


def test_names_of_tasks_are_those_of_the_environment():
    gathered = Gathered(config(**{"evaluator.episodes": "2"}), ("a", "b"))
    (ended,) = add(gathered, part(0, 0, 1.0, 3.0, tasks=["a", "x"]))
    assert ended.metrics["eval/episode_return"] == 2.0
    assert not any(name.startswith(("eval/return/", "eval/levels")) for name in ended.metrics)
