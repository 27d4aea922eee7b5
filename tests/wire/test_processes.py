"""Deaths that leave no time for a word: `kill -9` of either side, and a learner that stands still."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness import LOOPBACK, until
from tests.replay.ports import free_port

ACTOR = """
import sys, time, zmq
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
client = ControlClient(zmq.Context(), sys.argv[1], role="actor", name="actor-0",
                       incarnation=new_incarnation(), slots_wanted=8)
print(client.join(60).slots, flush=True)
time.sleep(600)
"""
LEARNER = """
import sys, time, zmq
from troupe.services.learner.control.slots import SlotRules
from troupe.services.learner.control.requests import Terms
from troupe.services.learner.control.server import ControlServer
server = ControlServer(zmq.Context(), sys.argv[1], "tcp://127.0.0.1:*",
                       Terms({}, heartbeat_s=0.05, liveness_s=1.0), SlotRules(8))
server.start()
print(server.control_endpoint, flush=True)
time.sleep(600)
"""


@pytest.fixture
def spawn():
    """Starts a Python process and reads its first line."""
    processes = []

    def start(code: str, argument: str) -> tuple[subprocess.Popen, str]:
        process = subprocess.Popen([sys.executable, "-c", code, argument], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_slots_of_a_killed_actor_are_leased_again(serve, connect, spawn):
    server = serve(liveness_s=1.0)
    process, line = spawn(ACTOR, server.control_endpoint)
    assert line == str(list(range(8)))
    process.kill()
    assert connect(server, "actor-1", slots_wanted=8).join(60).slots == list(range(8))
    assert [peer["name"] for peer in server.peers()] == ["actor-1"]


def test_a_killed_learner_is_joined_again(connect, spawn):
    process, endpoint = spawn(LEARNER, f"tcp://127.0.0.1:{free_port()}")
    client = connect(endpoint, "actor-0", slots_wanted=3)
    client.join(60)
    session = client.state.session
    process.kill()
    process.wait()
    spawn(LEARNER, endpoint)
    until(lambda: client.joins == 2)
    assert client.slots == [0, 1, 2]
    assert client.state.session != session


def test_a_learner_that_stood_still_is_joined_again(connect, spawn):
    process, endpoint = spawn(LEARNER, LOOPBACK)
    client = connect(endpoint, "actor-0", slots_wanted=3)
    client.join(60)
    session = client.state.session
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: not client.connected)
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: client.connected)
    assert client.slots == [0, 1, 2]
    assert client.state.session == session
