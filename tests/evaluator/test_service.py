"""The evaluator's loop against a stand-in for the control client."""

import numpy as np
import pytest

from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec
from troupe.common.runtime import StopSignal
from troupe.common.stats.played import Result
from troupe.common.wire.control.client import Games, Params, RunState
from troupe.services.evaluator import service
from troupe.services.evaluator.service import Evaluator, evaluation_seed

FAST = {"evaluator.period_s": "0", "evaluator.episodes": "2", "env.id": "gym:CartPole-v1"}


class FakeClient:
    """Gives out one part of every version, and ends the run when told."""

    def __init__(self, config, stop):
        self.agent = make_agent(config.agent, make_spec(config.env), seed=9)
        self.version, self.stopping, self.stop = 1, False, stop
        self.sent = []
        self.given = 0
        self.silent = False

    @property
    def state(self):
        return RunState(steps=10, version=self.version, stopping=self.stopping)

    @property
    def games_over(self):
        return self.stopping and self.given == self.version and not self.silent

    def check(self):
        pass

    def next_games(self):
        if self.silent or self.given == self.version:
            return None
        self.given = self.version
        return Games(0, Params(self.version, self.agent.params()))

    def send_telemetry(self, metrics, blobs=None, fields=None):
        if metrics and "eval/version" not in metrics:
            return  # what the process takes of its machine
        self.sent.append((metrics, blobs or {}))
        if metrics:
            self.fields = fields
            self.on_sent(metrics)

    def on_sent(self, metrics):
        if not self.stopping:
            self.version += 1
            self.stopping = self.version == 4


@pytest.fixture
def setting(monkeypatch):
    config = load_config("cartpole-apex", None, FAST, {})
    stop = StopSignal()
    return config, FakeClient(config, stop), stop


def scores(client):
    return [metrics for metrics, _ in client.sent if metrics]


def test_evaluates_what_it_is_given_until_there_is_no_more(setting):
    config, client, stop = setting
    Evaluator(config, client, stop).run()
    assert [m["eval/version"] for m in scores(client)] == [1, 2, 3, 4]
    assert client.fields.part == 0
    assert len(client.fields.episodes) == 2
    # CartPole pays 1 a step.
    assert all(game.episode_return == game.steps > 0 for game in client.fields.episodes)


@pytest.mark.parametrize(("part", "games"), [(0, 2), (1, 2), (2, 1)])
def test_every_part_has_all_of_its_games_and_the_same_again(part, games):
    fields = FAST | {"evaluator.episodes": "5", "evaluator.slots": "2"}
    config = load_config("cartpole-apex", None, fields, {})
    played = []
    for _ in range(2):
        client = FakeClient(config, StopSignal())
        evaluator = Evaluator(config, client, client.stop)
        evaluator._agent.load_params(client.agent.params())
        evaluator._evaluate(Games(part, Params(7, client.agent.params())))
        played.append(client.fields.episodes)
    assert played[0] == played[1]
    assert len(played[0]) == games


def test_a_stop_signal_ends_it_without_a_last_evaluation(setting):
    config, client, stop = setting
    client.on_sent = lambda metrics: stop.set()
    Evaluator(config, client, stop).run()
    assert len(scores(client)) == 1


def test_the_end_of_the_run_cuts_a_stale_evaluation_short(setting, monkeypatch):
    config, client, stop = setting
    played = []

    def play(agent, env, *, should_stop, **_):
        played.append(client.version)
        if len(played) == 1:
            client.version, client.stopping = 7, True
        return None if should_stop() else Result([1.0], [1])

    monkeypatch.setattr(service, "play", play)
    client.on_sent = lambda metrics: None
    Evaluator(config, client, stop).run()
    assert [m["eval/version"] for m in scores(client)] == [7]


def test_a_learner_that_is_gone_at_the_end_is_no_error(setting, caplog, monkeypatch):
    config, client, stop = setting
    monkeypatch.setattr(service, "LAST_GAMES_S", 0.3)
    client.stopping, client.silent = True, True
    Evaluator(config, client, stop).run()
    assert "no part of the last evaluation was left to play" in caplog.text


def test_a_film_goes_ahead_of_the_scores_now_and_then(setting, monkeypatch):
    config, client, stop = setting

    def play(agent, env, *, recorder, **_):
        if recorder is not None:
            recorder.add(np.zeros((8, 8, 3), np.uint8))
        return Result([1.0], [1])

    monkeypatch.setattr(service, "play", play)

    Evaluator(config, client, stop).run()
    kinds = ["film" if blobs else "scores" for _, blobs in client.sent]
    assert kinds == ["film", "scores", "scores", "scores", "film", "scores"]
    gif = client.sent[0][1]["video"]
    assert gif[:3] == b"GIF"
    assert client.sent[0][1]["mp4"][4:8] == b"ftyp"


def test_an_environment_that_only_fails_is_told_once_and_ends_each_evaluation(setting, caplog):
    fields = FAST | {"env.id": "tests.envs.broken:Broken-v0", "env.kwargs": "{how = 'raise', at = 5}"}
    config, stop = load_config("cartpole-apex", None, fields), StopSignal()
    client = FakeClient(config, stop)
    Evaluator(config, client, stop).run()
    assert scores(client) == [{"eval/version": version} for version in (1, 2, 3, 4)]
    assert (client.fields.part, client.fields.episodes) == (0, [])
    assert client.fields.trouble.startswith(
        "no episode of tests.envs.broken:Broken-v0 can be finished: 8 failures, the last: "
    )
    assert "(broken.py:" in client.fields.trouble
    assert caplog.text.count("part 0 cannot be played: no episode of") == 1


def test_seeds_differ_by_run_version_and_part():
    places = [(run, version, part) for run in (1, 2) for version in range(10) for part in range(5)]
    assert len({evaluation_seed(*place) for place in places}) == 100
    assert evaluation_seed(1, 3, 2) == evaluation_seed(1, 3, 2)
