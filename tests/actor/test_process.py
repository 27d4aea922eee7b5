"""The actor as a process of its own, against a real replay process and a real control server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from common.agents import make_agent
from common.config import load_config, structural_hash
from common.envs import make_spec
from common.wire.control import ControlServer
from common.wire.replay_client import ReplayClient

OVERRIDES = {
    "env.id": "gym:CartPole-v1",
    "agent.mlp_units": "[8]",
    "agent.hidden_units": "8",
    "actor.slots": "4",
    "actor.chunk_steps": "10",
    "replay.capacity_items": "5000",
    "replay.min_items": "10",
}


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True)


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for child in running:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_no_learner_is_one_line_and_exit_code_3() -> None:
    actor = start("services.actor", "--learner", "tcp://127.0.0.1:9", "--join-timeout-s", "0.5")
    _, errors = actor.communicate(timeout=60)
    assert actor.returncode == 3
    assert errors.strip().splitlines()[-1].startswith("troupe: error: actor-0 could not join")
    assert "Traceback" not in errors


@pytest.mark.slow
def test_fills_replay_and_flushes_on_sigterm(tmp_path: Path, children: list[subprocess.Popen[str]]) -> None:
    config = load_config(overrides=OVERRIDES)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = ControlServer(
        context,
        f"ipc://{tmp_path}/control",
        f"ipc://{tmp_path}/announce",
        config_dict=config.model_dump(mode="json"),
        structural_hash=structural_hash(config),
        total_slots=8,
    )
    control.start()
    control.publish(3, make_agent(config.agent, make_spec(config.env)).params())
    learner, bind = control.control_endpoint, f"ipc://{tmp_path}/replay-0"
    data = str(tmp_path / "replay")
    try:
        children.append(
            start("services.replay", "--learner", learner, "--bind", bind, "--data-dir", data, "--index", "0")
        )
        actor = start("services.actor", "--learner", learner, "--name", "actor-0")
        children.append(actor)
        replay = ReplayClient(bind, ctx=context, name="test")
        batch = replay.sample(32, timeout_s=60)
        assert set(batch.versions) == {3}
        assert batch.fields["obs"].shape == (32, 4, 4)  # the observation and three that follow
        time.sleep(1)
        actor.send_signal(signal.SIGTERM)
        assert actor.wait(20) == 0
        told = []
        deadline = time.monotonic() + 10
        while "actor-0" in {peer["name"] for peer in control.peers()}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while not control.telemetry.empty():
            told.append(control.telemetry.get())
        steps = [t for t in told if t.source == "actor-0"][-1].metrics["actor/steps"]
        # Everything but the n newest steps of each running episode was stored before the actor said BYE.
        stored = replay.status()["inserted_steps"]
        assert steps - 4 * 3 <= stored <= steps
        replay.close()
    finally:
        control.stop()
        for child in children:
            child.kill()
            child.wait()
        context.destroy(linger=0)
