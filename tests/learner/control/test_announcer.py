"""Announcements, which may wait for those who subscribe, while nothing else does."""

import threading

import pytest
import zmq

from tests.harness import until
from troupe.common.wire import messages, sockets
from troupe.services.learner.control import roster


@pytest.fixture
def dam(monkeypatch):
    """Holds what a PUB sends, as libzmq does while peers subscribe faster than it takes subscriptions in."""
    send_frames, full, opened = sockets.send_frames, threading.Event(), threading.Event()

    def hold(socket, frames, to=None):
        if socket.type == zmq.PUB:
            full.set()
            opened.wait()
        return send_frames(socket, frames, to)

    monkeypatch.setattr(sockets, "send_frames", hold)
    hold.full, hold.opened = full, opened
    yield hold
    opened.set()


def test_who_joins_does_not_wait_for_an_announcement_that_takes_for_ever(serve, connect, dam):
    server = serve()
    assert dam.full.wait(60)
    client = connect(server, "actor-0", slots_wanted=1)
    assert client.join(60).slots == [0]
    server.set_state(updates=7)
    until(lambda: client.state.updates == 7)  # heartbeats are answered, and say what announcements would
    dam.opened.set()


def test_what_changes_during_an_announcement_is_said_after_it(ctx, serve, dam):
    server = serve()
    sub = sockets.make_sub(ctx, server.announce_endpoint)
    assert dam.full.wait(60)
    server.set_state(updates=8, stopping=True)
    dam.opened.set()

    def stopping():
        message = sockets.receive(sub)
        return message and messages.Announce.of(message).stopping

    until(stopping)
    sub.close(linger=0)


def test_what_many_have_heard_is_announced_again_less_often_but_for_the_end(serve, connect, monkeypatch):
    monkeypatch.setattr(roster, "FREQUENT_ACTORS", 2)
    server = serve(heartbeat_s=0.05, total_slots=8)
    for number in range(8):
        connect(server, f"actor-{number}", slots_wanted=1).join(60)
    assert server._announced_again_s() == 0.2
    server.set_state(stopping=True)
    assert server._announced_again_s() == 0.05
