import csv
import json

import pytest

from common.wire.control import Telemetry
from services.learner.counters import RunCounters
from services.learner.reporter import Reporter


class NoPeers:
    def peers(self):
        return []


@pytest.fixture
def reporter(tmp_path):
    reporter = Reporter(tmp_path, "atari:pong", 1000, 10.0, RunCounters(4), None)
    reporter.path = tmp_path
    return reporter


def rows(path):
    with (path / "metrics.csv").open() as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def test_steps_and_episodes_of_all_actors_are_put_together(reporter):
    reporter.collect(
        Telemetry("actor-0", "actor", 1, {"actor/steps": 40}, {"episodes": [[-20, 10], [-10, 20]]})
    )
    reporter.collect(Telemetry("actor-1", "actor", 2, {"actor/steps": 60}, {"episodes": [[0, 30]]}))
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    got = rows(reporter.path)
    assert float(got["train/episode_return"]["value"]) == -10.0
    assert float(got["train/episodes"]["value"]) == 3
    assert float(got["train/human_normalized"]["value"]) == pytest.approx(
        (-10 + 20.7) / (14.6 + 20.7), abs=1e-3
    )
    assert got["train/episode_return"]["steps"] == "100"
    assert got["train/episode_return"]["frames"] == "400"
    status = json.loads((reporter.path / "status.json").read_text())
    assert status["steps"] == 100
    assert status["total_steps"] == 1000


def test_evaluations_are_written_at_once(reporter):
    reporter.collect(Telemetry("evaluator", "evaluator", 3, {"eval/episode_return": 5.0, "eval/version": 12}))
    assert float(rows(reporter.path)["eval/episode_return"]["value"]) == 5.0
    assert reporter.evaluated_version == 12
    reporter.close()


def test_the_status_adds_up_the_shards(reporter):
    for shard, items in (("replay-0", 30.0), ("replay-1", 12.0), ("replay-0", 40.0)):
        reporter.collect(Telemetry(shard, "replay", hash(shard) & 0xFFFF, {"replay/items": items}))
    reporter.tick(NoPeers(), 0.0, force=True)
    reporter.close()
    assert json.loads((reporter.path / "status.json").read_text())["metrics"]["replay/items"] == 52.0
