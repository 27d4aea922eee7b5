"""The actor without a network, against a real control server and a real inference service."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from tests.harness import PATIENCE_S, Context, InThread, bind, control_server, until
from tests.learner.halves import FakeReplay, check_consecutive
from troupe.common.agents import make_agent
from troupe.common.config import Config, load_config, structural_hash
from troupe.common.data.schema import Chunk, check_chunk
from troupe.common.envs import make_spec
from troupe.common.errors import PeerError
from troupe.common.runtime.lifecycle import StopSignal
from troupe.services.actor.service import ActorService
from troupe.services.learner.inference import service as module
from troupe.services.learner.inference.service import CentralInference

OVERRIDES = {
    "env.id": "tests.envs.counting:Counting-v0",
    "env.kwargs": "{length = 6, ends_by = 'truncation', signed = true}",
    "agent.mlp_units": "[8]",
    "agent.hidden_units": "8",
    "actor.slots": "5",
    "actor.chunk_steps": "10",
    "inference.mode": "central",
    "inference.timeout_ms": "1",
    "net.connect_timeout_s": "60",
}


class Learner:
    """Control and inference as the learner has them, without learning."""

    def __init__(self, context: zmq.Context, config: Config, control: str = "tcp://127.0.0.1:*") -> None:
        self.chunks: list[Chunk] = []
        self.spec = make_spec(config.env)
        self.agent = make_agent(config.agent, self.spec, seed=1)
        self.control = control_server(
            context,
            control,
            "tcp://127.0.0.1:*",
            config=config.to_dict(),
            structural_hash=structural_hash(config),
            total_slots=config.total_slots,
            heartbeat_s=0.1,
            liveness_s=60.0,
        )
        self.inference = CentralInference(
            context,
            config,
            self.agent,
            self.spec,
            leases=self.control.leases,
            shards=lambda: ["shard"],
            replay=FakeReplay(context, self.chunks),  # type: ignore[arg-type]
            seed=1,
        )
        self.inference.endpoint = "tcp://127.0.0.1:*"
        self.inference.start()
        self.control.inference_endpoint = self.inference.endpoint
        bind(self.control.start)
        self.offer(1)

    def offer(self, version: int) -> None:
        params = make_agent(self.agent.config, self.spec, seed=version).params()  # type: ignore[attr-defined]
        self.control.publish(version, params)
        self.inference.offer(version, params)

    def stop(self) -> None:
        self.control.stop()
        self.inference.stop()


def run_actor(context: zmq.Context, learner: Learner, name: str = "actor-0") -> InThread:
    stop = StopSignal()
    endpoint = learner.control.control_endpoint
    return InThread(ActorService(context, endpoint, name, stop, modules=["tests.envs"]), stop)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setattr(module, "SWEEP_S", 0.05)
    context = Context()
    running: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running.append(kind(context, *args, **kwargs))
        return running[-1]

    yield make
    for one in running:
        one.stop() if isinstance(one, Learner) else one.stop.set()
    for one in running:
        if isinstance(one, InThread):
            one.wait(PATIENCE_S)
    context.destroy(linger=0)


def config_of(**more: str) -> Config:
    return load_config(overrides={**OVERRIDES, **{k.replace("__", "."): v for k, v in more.items()}})


def test_acts_until_the_run_is_done(start: Callable[..., Any]) -> None:
    learner = start(Learner, config_of())
    actor = start(run_actor, learner)
    until(lambda: len(learner.chunks) > 20)
    learner.offer(7)
    until(lambda: learner.chunks[-1].version == 7)
    learner.control.set_state(updates=1, stopping=True)
    actor.join()
    until(lambda: not learner.control.peers())  # it said BYE
    reports = []
    while not learner.control.telemetry.empty():
        reports.append(learner.control.telemetry.get())
    steps = reports[-1].metrics["actor/steps"]
    # What is complete has been flushed: only the newest steps of each episode are missing.
    until(lambda: sum(chunk.steps for chunk in learner.chunks) >= steps - 5 * 3)
    assert sum(chunk.steps for chunk in learner.chunks) <= steps
    episodes = [episode for report in reports for episode in report.fields.episodes]
    assert episodes
    assert all(game.steps == 6 for game in episodes)
    for chunk in learner.chunks:
        check_chunk(chunk, learner.agent.fields)
        assert np.isfinite(chunk.priorities).all()
    assert len(check_windows(learner.chunks)) == 5


def check_windows(chunks: list[Chunk]) -> set[int]:
    """The copies that chunks are of; each of one, in one piece. An episode's end repeats its last frame."""
    copies = set()
    for chunk in chunks:
        episode, t, pid, copy = chunk.fields["obs"].astype(int).T
        assert len(set(episode)) == len(set(pid)) == len(set(copy)) == 1
        assert set(np.diff(t)) <= {0, 1}
        assert (np.diff(t) == 1)[: chunk.steps].all()
        copies.add(copy[0])
    return copies


@pytest.mark.parametrize("slots", [3, 1])  # in two groups as before, and in one
def test_begins_again_with_a_restarted_learner_in_fewer_slots(start: Callable[..., Any], slots: int) -> None:
    first = start(Learner, config_of())
    actor = start(run_actor, first)
    until(lambda: len(first.chunks) > 5)
    where = first.control.control_endpoint
    first.stop()
    second = start(Learner, config_of(actor__slots=str(slots)), where)
    until(lambda: len(second.chunks) > 5 or actor.error)
    assert actor.error is None
    assert [peer["slots"] for peer in second.control.peers()] == [list(range(slots))]
    check_windows(first.chunks)
    assert len(check_windows(second.chunks)) == slots
    actor.end()


def test_says_that_the_learner_has_come_back_in_another_mode(start: Callable[..., Any]) -> None:
    first = start(Learner, config_of())
    actor = start(run_actor, first)
    until(lambda: first.chunks)
    where = first.control.control_endpoint
    first.stop()
    start(Learner, config_of(inference__mode="local"), where)
    with pytest.raises(PeerError, match=r"inference\.mode local"):
        actor.join()


def test_two_actors_share_the_slots_and_the_batches(start: Callable[..., Any]) -> None:
    learner = start(Learner, config_of(actor__processes="2", inference__min_batch="10"))
    for number in range(2):
        start(run_actor, learner, f"actor-{number}")
    until(lambda: len(check_windows(learner.chunks)) == 10)
    assert sorted(s for peer in learner.control.peers() for s in peer["slots"]) == list(range(10))


def test_it_loads_no_torch() -> None:
    code = "import sys, troupe.services.actor.service, troupe.services.actor.central_inference as _"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_consecutive_steps_are_told_from_mixed_ones() -> None:
    """The check that the tests above rely on does fail where it has to."""
    obs = np.array([[0, 1, 5, 0], [0, 2, 5, 0], [0, 3, 6, 0]], np.float32)
    index = np.zeros(1, np.int32)
    mixed = Chunk({"obs": obs}, 2, index, index + 1, np.ones(1))
    for check in (check_windows, check_consecutive):
        with pytest.raises(AssertionError):
            check([mixed])
