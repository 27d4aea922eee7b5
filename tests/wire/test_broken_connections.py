"""A connection that breaks while what it sent waits to be read: no process may end of it.

libzmq ends the process by an assertion where it wants to write to such a connection, so each case has a
process of its own.
"""

import subprocess
import sys
import time

import pytest

from tests.wire.zmtp import RawPeer, frame

SERVER = """
import sys, time, zmq
from troupe.common.wire import sockets
router = sockets.make_router(zmq.Context(), "tcp://127.0.0.1:*")
print(sockets.bound_endpoint(router), flush=True)
sys.stdin.readline()  # nothing is read of the socket meanwhile
taken = 0
while router.poll(1000):
    router.recv_multipart()
    taken += 1
print(taken, flush=True)
"""
HEARTBEATS_S = 6.0
"""Longer than the period of those that did end a process."""


@pytest.fixture
def server():
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def taken(server):
    """How many messages the server read when it was told to; it has ended well."""
    print("go", file=server.stdin, flush=True)
    count = int(server.stdout.readline() or 0)
    assert server.wait(120) == 0
    return count


@pytest.mark.slow
def test_more_than_may_wait(server):
    peer = RawPeer(server.stdout.readline().strip())
    for _ in range(3000):  # a thousand may wait, in the connection's queue
        peer.send(frame(b"x"))
    time.sleep(1)
    peer.reset()
    time.sleep(HEARTBEATS_S)
    assert taken(server) > 100


@pytest.mark.slow
def test_pings_behind_more_than_may_wait(server):
    """A PING is answered as soon as it is read, though its sender may be gone."""
    peer = RawPeer(server.stdout.readline().strip())
    for _ in range(3000):
        peer.send(frame(b"x"))
        peer.send(frame(b"\x04PING\x00\x64", command=True))
    time.sleep(1)
    peer.reset()
    time.sleep(1)
    assert taken(server) > 100
