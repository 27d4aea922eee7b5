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

from tests.harness import Context, control_server, end_tree, until
from troupe.common.agents import make_agent
from troupe.common.config import load_config, structural_hash
from troupe.common.envs import make_spec
from troupe.common.wire.replay.client import ReplayClient

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


@pytest.mark.slow
def test_no_learner_is_one_line_and_exit_code_3() -> None:
    actor = start("troupe.services.actor", "--learner", "tcp://127.0.0.1:9", "--join-timeout-s", "0.5")
    _, errors = actor.communicate(timeout=120)
    assert actor.returncode == 3
    assert errors.strip().splitlines()[-1].startswith("troupe: error: actor-0 could not join")
    assert "Traceback" not in errors


class Run:
    """A control server in this process, and replay and actor as processes."""

    def __init__(self, directory: Path) -> None:
        self.config = load_config(overrides=OVERRIDES)
        self.context: zmq.Context[zmq.Socket[bytes]] = Context()
        self.control = control_server(
            self.context,
            f"ipc://{directory}/control",
            f"ipc://{directory}/announce",
            config=self.config.model_dump(mode="json"),
            structural_hash=structural_hash(self.config),
            total_slots=8,
        )
        self.control.start()
        params = make_agent(self.config.agent, make_spec(self.config.env)).params()
        self.control.publish(3, params)
        self.bind = f"ipc://{directory}/replay-0"
        self.data_dir = str(directory / "replay")
        self.children: list[subprocess.Popen[str]] = []
        self.client = ReplayClient(self.bind, ctx=self.context, name="test")

    def start_replay(self) -> subprocess.Popen[str]:
        where = ("--bind", self.bind, "--data-dir", self.data_dir, "--index", "0")
        return self._start(
            "troupe.services.replay", "serve", "--learner", self.control.control_endpoint, *where
        )

    def start_actor(self, name: str = "actor-0", *words: str) -> subprocess.Popen[str]:
        return self._start(
            "troupe.services.actor", "--learner", self.control.control_endpoint, "--name", name, *words
        )

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self.children.append(start(*words))
        return self.children[-1]

    def stored_steps(self) -> int:
        return int(self.client.status(60)["inserted_steps"])

    def acted_steps(self) -> float:
        told = []
        while not self.control.telemetry.empty():
            told.append(self.control.telemetry.get())
        return [t.metrics["actor/steps"] for t in told if t.source == "actor-0"][-1]

    def wait_until_gone(self, name: str) -> None:
        until(lambda: name not in {peer["name"] for peer in self.control.peers()})

    def close(self) -> None:
        for child in self.children:
            end_tree(child)
            child.communicate()
        self.control.stop()
        self.client.close()
        self.context.destroy(linger=0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.close()


@pytest.mark.slow
def test_fills_replay_and_flushes_on_sigterm(run: Run) -> None:
    run.start_replay()
    actor = run.start_actor()
    batch = run.client.sample(32, timeout_s=120)
    assert set(batch.versions) == {3}
    assert batch.fields["obs"].shape == (32, 4, 4)  # the observation and three that follow
    time.sleep(1)
    actor.send_signal(signal.SIGTERM)
    assert actor.wait(120) == 0
    run.wait_until_gone("actor-0")
    # Everything but the n newest steps of each running episode was stored before the actor said BYE.
    steps = run.acted_steps()
    assert steps - 4 * 3 <= run.stored_steps() <= steps


@pytest.mark.slow
def test_outlives_replay(run: Run) -> None:
    replay = run.start_replay()
    actor = run.start_actor()
    run.client.sample(32, timeout_s=120)
    replay.kill()
    replay.wait()
    time.sleep(1)
    run.start_replay()
    after = run.stored_steps()
    until(lambda: run.stored_steps() > after + 50, step=lambda: time.sleep(0.1))
    assert actor.poll() is None


@pytest.mark.slow
def test_actors_of_one_host_share_a_relay(run: Run, tmp_path: Path) -> None:
    run.start_replay()
    relay = tmp_path / "relay"
    words = ("--relay", str(relay), "--slots", "4")
    actors = [run.start_actor(f"actor-{index}", *words) for index in range(2)]
    until(lambda: [peer["version"] for peer in run.control.peers() if peer["role"] == "actor"] == [3, 3])
    assert [file.suffix for file in sorted(relay.iterdir())] == ["", ".lock"]
    for actor in actors:
        actor.send_signal(signal.SIGTERM)
        assert actor.wait(120) == 0
    assert list(relay.iterdir()) == []
