from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import zmq

from tests.harness import PATIENCE_S, InThread, bind, control_server, until
from troupe.common.agents import make_agent
from troupe.common.config import Config, load_config, structural_hash
from troupe.common.data.schema import Chunk, check_chunk
from troupe.common.envs import Episode, VectorEnv, make_spec
from troupe.common.errors import ConfigError, PeerError
from troupe.common.runtime.lifecycle import StopSignal
from troupe.common.wire import messages
from troupe.common.wire.codec import encode
from troupe.common.wire.control.member import RunState
from troupe.common.wire.control.messages import Game, TelemetryFields
from troupe.common.wire.replay import sharded
from troupe.services.actor import service as module
from troupe.services.actor.service import ActorService
from troupe.services.actor.timing import Timing
from troupe.services.learner.control.reports import Report
from troupe.services.learner.control.server import ControlServer

OVERRIDES = {
    "env.id": "gym:CartPole-v1",
    "agent.mlp_units": "[8]",
    "agent.hidden_units": "8",
    "actor.slots": "4",
    "actor.processes": "2",
    "actor.chunk_steps": "10",
    "actor.params_period_steps": "5",
}


class FakeReplay:
    """Takes every chunk, unless `closed_for_inserts`."""

    chunks: list[Chunk]
    closed_for_inserts = False
    outstanding = 0
    blocked_reason = "closed"
    paused = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.endpoint = args[0]
        self.counters: dict[str, int] = {}

    def insert(self, chunk: Chunk, table: str) -> bool:
        if FakeReplay.closed_for_inserts:
            return False
        FakeReplay.chunks.append(chunk)
        return True

    def poll(self, timeout_ms: int) -> None:
        time.sleep(timeout_ms / 1000)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, linger_s: float) -> None:
        pass


Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Replay: TypeAlias = type[FakeReplay]


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    FakeReplay.chunks = []
    FakeReplay.closed_for_inserts = False
    monkeypatch.setattr(sharded, "ReplayClient", FakeReplay)
    monkeypatch.setattr(
        "troupe.services.actor.timing.TimingReports.due",
        lambda self, period_s: time.monotonic() - self._last_s > 0.05,
    )
    return FakeReplay


@pytest.fixture
def control(context: Context) -> Iterator[ControlServer]:
    server = server_of(context, load_config(overrides=OVERRIDES))
    yield server
    server.stop()


def server_of(context: Context, config: Config, endpoint: str = "tcp://127.0.0.1:*") -> ControlServer:
    server = control_server(
        context,
        endpoint,
        "tcp://127.0.0.1:*",
        config=config.model_dump(mode="json"),
        structural_hash=structural_hash(config),
        total_slots=8,
        heartbeat_s=0.1,
        liveness_s=60.0,
    )
    server.start()
    return server


def publish(server: ControlServer, version: int = 0) -> None:
    config = load_config(overrides=OVERRIDES)
    server.publish(version, make_agent(config.agent, make_spec(config.env), seed=version).params())


def run_actor(context: Context, server: ControlServer, name: str = "actor-0", **kwargs: Any) -> InThread:
    stop = StopSignal()
    return InThread(ActorService(context, server.control_endpoint, name, stop, **kwargs), stop)


def reports(server: ControlServer) -> list[Report]:
    taken = []
    while not server.telemetry.empty():
        taken.append(server.telemetry.get())
    return taken


@pytest.fixture(autouse=True)
def _shard_for_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every actor hears of one shard."""
    monkeypatch.setattr(module.ControlClient, "shards", property(lambda self: ["tcp://127.0.0.1:1"]))


def test_acts_until_the_run_is_done(context: Context, control: ControlServer, replay: Replay) -> None:
    publish(control)
    actor = run_actor(context, control)
    until(lambda: len(replay.chunks) > 20)
    assert [peer["slots"] for peer in control.peers()] == [[0, 1, 2, 3]]
    control.set_state(stopping=True)
    actor.join()
    until(lambda: not control.peers())  # it said BYE
    config = load_config(overrides=OVERRIDES)
    agent = make_agent(config.agent, make_spec(config.env))
    for chunk in replay.chunks:
        check_chunk(chunk, agent.fields)
    told = reports(control)
    assert told[-1].metrics["actor/steps"] >= sum(chunk.steps for chunk in replay.chunks)
    episodes = [episode for report in told for episode in report.fields.episodes]
    assert episodes
    assert all(game.episode_return == game.steps for game in episodes)  # CartPole pays 1 a step


def test_stop_signal_flushes_first(context: Context, control: ControlServer, replay: Replay) -> None:
    publish(control)
    actor = run_actor(context, control, slots=2)
    until(lambda: replay.chunks)
    actor.end()
    until(lambda: not control.peers())  # it said BYE, after its last report
    steps = reports(control)[-1].metrics["actor/steps"]
    # Only the n newest steps of each running episode cannot be inserted.
    assert steps - 2 * 3 <= sum(chunk.steps for chunk in replay.chunks) <= steps


def test_takes_newer_parameters(context: Context, control: ControlServer, replay: Replay) -> None:
    publish(control, 0)
    actor = run_actor(context, control)
    until(lambda: replay.chunks)
    publish(control, 7)
    until(lambda: replay.chunks[-1].version == 7)
    until(lambda: any(r.metrics["params/staleness"] == 0 for r in reports(control)))
    actor.end()


def test_a_start_may_take_longer_than_a_turn(
    context: Context, control: ControlServer, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    doing: list[str] = []
    make = ActorService._make_acting

    def make_acting(service: ActorService) -> Any:
        doing.append(service._loop.doing)
        return make(service)

    monkeypatch.setattr(ActorService, "_make_acting", make_acting)
    publish(control)
    actor = run_actor(context, control)
    until(lambda: replay.chunks)
    actor.end()
    assert doing == ["its start"], "it imports torch"


def test_to_wait_for_slots_is_no_hang(context: Context, control: ControlServer, replay: Replay) -> None:
    publish(control)
    with_slots = [run_actor(context, control, name) for name in ("actor-0", "actor-1")]
    until(lambda: sum(len(peer["slots"]) for peer in control.peers()) == 8)
    waiting = run_actor(context, control, "actor-2")
    until(lambda: any(peer["name"] == "actor-2" for peer in control.peers()))
    loop = waiting.service._loop
    before = loop.turns
    until(lambda: loop.turns > before + 3)
    assert not any(peer["slots"] for peer in control.peers() if peer["name"] == "actor-2")
    for actor in (waiting, *with_slots):
        actor.end()


def test_two_actors_share_the_slots(
    context: Context, control: ControlServer, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[list[int], int]] = []  # to the environments, which may be unlike
    monkeypatch.setattr(VectorEnv, "assign", lambda env, slots, total: told.append((list(slots), total)))
    publish(control)
    actors = [run_actor(context, control, f"actor-{i}") for i in range(2)]
    until(lambda: sorted(s for peer in control.peers() for s in peer["slots"]) == list(range(8)))
    until(lambda: all(hasattr(getattr(a.service, "_acting", None), "rollout") for a in actors))
    assert sorted(told) == [([0, 1, 2, 3], 8), ([4, 5, 6, 7], 8)]
    ladders = np.concatenate([a.service._acting.rollout.epsilons for a in actors])
    assert len(np.unique(ladders)) == 8
    for actor in actors:
        actor.stop.set()
    for actor in actors:
        actor.join()


def test_pauses_without_credit(context: Context, control: ControlServer, replay: Replay) -> None:
    publish(control)
    replay.closed_for_inserts = True
    actor = run_actor(context, control)
    until(lambda: any(r.metrics["actor/insert_blocked_s"] > 0.3 for r in reports(control)))
    reports(control)  # those of before
    paused_at = control.telemetry.get(timeout=PATIENCE_S).metrics["actor/steps"]
    for _ in range(5):
        assert control.telemetry.get(timeout=PATIENCE_S).metrics["actor/steps"] == paused_at
    replay.closed_for_inserts = False
    until(lambda: any(r.metrics["actor/steps"] > paused_at for r in reports(control)))
    actor.end()


def test_follows_a_restarted_learner_to_other_slots(
    context: Context, control: ControlServer, replay: Replay
) -> None:
    publish(control)
    actor = run_actor(context, control)
    until(lambda: replay.chunks)
    endpoint = control.control_endpoint
    control.stop()
    config = load_config(overrides=OVERRIDES)
    again = control_server(
        context,
        endpoint,
        "tcp://127.0.0.1:*",
        config=config.model_dump(mode="json"),
        structural_hash=structural_hash(config),
        total_slots=3,  # fewer than the actor had
        heartbeat_s=0.1,
        liveness_s=60.0,
    )
    bind(again.start)
    publish(again, 1)
    until(lambda: any(peer["slots"] == [0, 1, 2] for peer in again.peers()))
    until(lambda: actor.service._acting.rollout.env.num_slots == 3)
    before = actor.service._acting.rollout.timing.steps
    until(lambda: actor.service._acting.rollout.timing.steps > before + 30)
    until(lambda: replay.chunks[-1].version == 1)
    actor.end()
    again.stop()


def test_an_actor_that_is_restarted_does_not_play_the_same_games_again(
    context: Context, control: ControlServer, replay: Replay
) -> None:
    def first_obs(control: ControlServer) -> bytes:
        """Where the first game of a new actor process begins."""
        replay.chunks.clear()
        actor = run_actor(context, control)
        until(lambda: replay.chunks)
        actor.end()
        # The next one may join over its own connection before the farewell of this one is read.
        until(lambda: control._budget.steps)
        return replay.chunks[0].fields["obs"][0].tobytes()

    publish(control)
    other = server_of(context, load_config(overrides=OVERRIDES))
    publish(other)
    first = first_obs(control)
    assert first_obs(other) == first  # nothing had been counted: the run's seed decides
    assert first_obs(other) != first
    other.stop()


def test_no_parameters_is_one_line(context: Context, replay: Replay) -> None:
    control = server_of(context, load_config(overrides=OVERRIDES | {"net.connect_timeout_s": "1"}))
    actor = run_actor(context, control)
    with pytest.raises(PeerError, match="no parameters"):
        actor.join()
    control.stop()


def test_no_learner_is_one_line(context: Context, replay: Replay) -> None:
    service = ActorService(context, "tcp://127.0.0.1:9", "actor-0", StopSignal(), join_timeout_s=0.5)
    with pytest.raises(PeerError, match="could not join"):
        service.run()


def test_stop_before_the_learner_comes(context: Context) -> None:
    stop = StopSignal()
    stop.set()
    ActorService(context, "tcp://127.0.0.1:9", "actor-0", stop).run()


def test_however_many_games_end_each_is_reported_once(context: Context) -> None:
    """One-step games of many slots are thousands a second: more than a message has room for."""
    sent: list[tuple[dict[str, float], TelemetryFields]] = []

    class Control:
        state = RunState()
        telemetry_dropped = 3

        def send_telemetry(self, metrics: dict[str, float], *, fields: TelemetryFields) -> None:
            encode(messages.Telemetry(metrics=metrics, fields=fields, blobs={}).message())
            sent.append((metrics, fields))

    games = [Episode((1 << 20) - 1, game / 3, 1 << 30, 4) for game in range(9001)]
    service: Any = ActorService(context, "tcp://127.0.0.1:5550", "actor-0", StopSignal())
    service._control = Control()
    service._watch = SimpleNamespace(metrics=dict)
    service._acting = SimpleNamespace(timing=Timing(steps=9001, episodes=list(games)), version=0)
    service._report()
    reported = [game for _, fields in sent for game in fields.episodes]
    assert reported == [Game(game.return_raw, game.steps, game.slot) for game in games]
    assert [metrics.get("actor/steps") for metrics, _ in sent] == [9001.0, *[None] * (len(sent) - 1)]
    assert sent[0][0]["actor/dropped_reports_total"] == 3.0


@pytest.mark.parametrize(
    ("env_id", "algorithm", "module"),
    [
        ("this:X", "apex", "this"),
        ("gym:this:X", "apex", "this"),
        ("gym:CartPole-v1", "xml.dom.pulldom", "xml.dom.pulldom"),
    ],
)
def test_a_module_that_nobody_has_permitted_here_is_not_imported(
    context: Context, env_id: str, algorithm: str, module: str
) -> None:
    """Whoever answers as the learner chooses environment and algorithm; importing a module runs it."""
    sys.modules.pop(module, None)
    config = load_config(overrides={**OVERRIDES, "env.id": env_id})
    agent = config.agent.model_copy(update={"algorithm": algorithm})
    server = server_of(context, config.model_copy(update={"agent": agent}))
    try:
        actor = run_actor(context, server)
        with pytest.raises(ConfigError, match=f"would run {module}"):
            actor.join()
        assert module not in sys.modules
        words = [sys.executable, "-m", "troupe.services.evaluator", "--learner", server.control_endpoint]
        evaluator = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert evaluator.returncode == 2
        assert f"would run {module}" in evaluator.stderr
        assert "Zen" not in evaluator.stdout + evaluator.stderr
    finally:
        server.stop()


def test_an_actor_that_runs_no_network_needs_no_permission_for_it(context: Context) -> None:
    sys.modules.pop("xml.dom.pulldom", None)
    config = load_config(overrides={**OVERRIDES, "inference.mode": "central"})
    agent = config.agent.model_copy(update={"algorithm": "xml.dom.pulldom"})
    server = server_of(context, config.model_copy(update={"agent": agent}))
    server.inference_endpoint = "tcp://127.0.0.1:1"
    try:
        actor = run_actor(context, server)
        until(lambda: [peer["slots"] for peer in server.peers()] == [[0, 1, 2, 3]])
        actor.end()
        assert "xml.dom.pulldom" not in sys.modules
    finally:
        server.stop()
