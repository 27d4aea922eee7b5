"""The evaluator's loop against a stand-in for the control client."""

import numpy as np
import pytest

from common.agents import make_agent
from common.config import load_config
from common.envs import make_spec
from common.errors import PeerError
from common.runtime import StopSignal
from common.wire.control.client import Params, RunState
from services.evaluator import service
from services.evaluator.games import Result
from services.evaluator.service import Evaluator, evaluation_seed

FAST = {"evaluator.period_s": "0", "evaluator.episodes": "2", "env.id": "gym:CartPole-v1"}


class FakeClient:
    """Serves versions of one parameter set, and ends the run when told."""

    def __init__(self, config, stop):
        self.agent = make_agent(config.agent, make_spec(config.env), seed=9)
        self.version, self.stopping, self.stop = 1, False, stop
        self.sent = []
        self.silent = False

    @property
    def state(self):
        return RunState(steps=10, version=self.version, stopping=self.stopping)

    def check(self):
        pass

    def params_if_newer(self, version):
        return Params(self.version, self.agent.params()) if self.version > version else None

    def wait_params(self, timeout_s):
        if self.silent:
            raise PeerError("evaluator got no parameters")
        return Params(self.version, self.agent.params())

    def send_telemetry(self, metrics, blobs=None, fields=None):
        self.sent.append((metrics, blobs or {}))
        if metrics:
            self.games = fields["episodes"]
            self.on_sent(metrics)

    def on_sent(self, metrics):
        self.version += 1
        if self.version == 4:
            self.stopping = True


@pytest.fixture
def setting(monkeypatch):
    config = load_config("cartpole-apex", None, FAST, {})
    stop = StopSignal()
    return config, FakeClient(config, stop), stop


def scores(client):
    return [metrics for metrics, _ in client.sent if metrics]


def test_evaluates_each_version_and_the_last_once_more(setting):
    config, client, stop = setting
    Evaluator(config, client, stop).run()
    assert [m["eval/version"] for m in scores(client)] == [1, 2, 3, 4]
    for metrics in scores(client):
        assert metrics["eval/episodes"] == 2
        assert metrics["eval/episode_return"] == metrics["eval/episode_length"] > 0  # CartPole pays 1 a step
        assert "eval/human_normalized" not in metrics
    returns = [score for score, _ in client.games]
    assert scores(client)[-1]["eval/episode_return_std"] == pytest.approx(
        abs(returns[0] - returns[1]) / 2**0.5
    )


def test_human_normalised_where_it_is_known(setting):
    config, client, stop = setting
    evaluator = Evaluator(config, client, stop)
    atari = config.model_copy(update={"env": config.env.model_copy(update={"id": "atari:pong"})})
    evaluator._config = atari
    metrics = evaluator._metrics(Result([20.7, 20.7], [100, 100]), 1.0)
    assert metrics["eval/human_normalized"] > 1


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


def test_a_learner_that_is_gone_at_the_end_is_no_error(setting, caplog):
    config, client, stop = setting
    client.stopping, client.silent = True, True
    Evaluator(config, client, stop).run()
    assert "the last parameters were not evaluated" in caplog.text


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


def test_seeds_differ_by_version_and_run():
    seeds = {evaluation_seed(run, version) for run in (1, 2) for version in range(50)}
    assert len(seeds) == 100
    assert evaluation_seed(1, 3) == evaluation_seed(1, 3)
