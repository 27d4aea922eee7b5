"""More members than `select`, and the soft limit of open files, have room for."""

import logging
import os
import resource
from collections import Counter

import pytest

from tests.harness import LOOPBACK, until
from tests.wire.zmtp import RawPeer, frame
from troupe.common.runtime import open_files
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import encode
from troupe.common.wire.intake import Intake
from troupe.services.learner.control import server as control

MANY = 1100


@pytest.mark.slow
def test_over_a_thousand_members_are_served(serve, connect):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 3 * MANY:
        pytest.skip(f"needs a hard limit of {3 * MANY} open files")
    open_files.raise_limit()
    server = serve(total_slots=MANY + 1)
    # Without libzmq at this end, whose sockets take several files each.
    peers = [RawPeer(server.control_endpoint) for _ in range(MANY)]
    try:
        for number, peer in enumerate(peers):
            name = f"actor-{number}"
            say(peer, messages.Hello(role="actor", name=name, incarnation=number, slots_wanted=1))
        until(lambda: len(server.peers()) == MANY)
        assert len(set().union(*server.leases().values())) == MANY
        late = connect(server, "actor-late", slots_wanted=1)  # all of its files are above 1,023
        assert late.join(60).slots == [MANY]
        for peer in peers:
            say(peer, messages.Heartbeat(version=5))
        until(lambda: Counter(peer["version"] for peer in server.peers())[5] == MANY)
        for peer in peers:
            say(peer, messages.Bye(reason="test"))
        until(lambda: len(server.peers()) == 1)
    finally:
        for peer in peers:
            peer.tcp.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_messages_gather_only_where_there_are_many_members(serve, connect, monkeypatch):
    pauses = []
    sleep = control.system.sleep
    monkeypatch.setattr(control.system, "sleep", lambda seconds: pauses.append(seconds) or sleep(seconds))
    server = serve()
    client = connect(server, "actor-0", slots_wanted=1)
    client.join(60)
    before = client._member.answers
    until(lambda: client._member.answers > before + 3)
    assert control.GATHER_S not in pauses, "an answer sooner is worth more"
    monkeypatch.setattr(control, "MANY_MEMBERS", 0)
    until(lambda: control.GATHER_S in pauses)
    before = client._member.answers
    until(lambda: client._member.answers > before + 3)


def say(peer: RawPeer, body) -> None:
    *first, last = map(bytes, encode(body.message(1)))
    peer.send(b"".join(frame(each, more=True) for each in first) + frame(last))


@pytest.mark.parametrize("left", [5, 0])
def test_the_log_says_that_hardly_any_file_is_left(ctx, caplog, left):
    intake = Intake(sockets.make_router(ctx, LOOPBACK), 1 << 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    caplog.set_level(logging.WARNING)
    intake.look(Counter())
    assert not caplog.messages
    # Files are numbered from the lowest that is free, and the limit is of the numbers.
    held = [os.dup(1) for _ in range(64)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1 + left, hard))
        until(lambda: intake.look(Counter()) or caplog.messages)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            os.close(each)
    assert "of this process are open, and each member needs some: raise the hard" in caplog.messages[0]
