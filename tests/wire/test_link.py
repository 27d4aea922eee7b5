"""A client's connection to one server, against real ROUTERs. Only the link's own clock is the test's."""

import contextlib
import socket as tcp
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.harness import LOOPBACK, until
from troupe.common import system
from troupe.common.errors import AuthError, ConfigError
from troupe.common.wire import link as module
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, WireError, decode
from troupe.common.wire.link import RETRY_AUTH_S, SILENT_S, Link, Question
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.sockets import Security

LIVENESS_S = 10.0
LARGE = 1 << 22
"""Bytes of a message that neither fits into the buffers of a connection nor is lost among them."""


@pytest.fixture
def clock(monkeypatch):
    """The time of links, which passes where a test says so."""
    clock = SimpleNamespace(now_s=1000.0)
    clock.monotonic = lambda: clock.now_s
    clock.random = system.random
    monkeypatch.setattr(module, "system", clock)
    monkeypatch.setattr(system.random, "uniform", lambda least, most: 1.0)  # no jitter
    return clock


@pytest.fixture
def connect(ctx, clock):
    links = []

    def make(endpoint, server="replay", **options):
        link = Link(ctx, endpoint, server, name="actor-0", incarnation=7, liveness_s=LIVENESS_S, **options)
        links.append(link)
        link.connect()
        return link

    yield make
    for link in links:
        link.close(0)


@pytest.fixture
def router(ctx):
    return sockets.make_router(ctx, LOOPBACK)


def heard(router):
    """The next message of a client, and its identity."""
    identity, *frames = until(lambda: sockets.receive_frames(router))
    return identity.bytes, decode(frames)


def reached(link, router):
    """Send something over `link`; the identity with which it has come."""
    until(lambda: link.send(messages.Status()))
    return heard(router)[0]


def received(link):
    """The messages that come next."""
    return until(lambda: list(link.receive()))


def test_silence_counts_while_something_is_awaited(connect, router, clock):
    link = connect(sockets.bound_endpoint(router))
    first = reached(link, router)
    for _ in range(5):
        clock.now_s += 10 * LIVENESS_S
        assert not link.maintain(waiting=False)
    assert link.silent_s == 0
    clock.now_s += LIVENESS_S + 0.1
    assert link.maintain(waiting=True)
    assert link.silent, "a new connection is no sign of life"
    assert not link.maintain(waiting=True)
    assert reached(link, router) != first
    assert link.connection == 2


def test_whoever_has_been_away_reads_first_what_has_come(connect, router, clock):
    link = connect(sockets.bound_endpoint(router))
    peer = reached(link, router)
    sockets.send(router, Message("X"), peer)
    until(lambda: link.wait(100))
    clock.now_s += 100 * LIVENESS_S
    assert [message.type for message in link.receive()] == ["X"]
    assert not link.maintain(waiting=True)
    assert not link.silent


def test_each_new_socket_is_given_longer_until_the_server_serves(connect, router, clock):
    link = connect(sockets.bound_endpoint(router))
    borne = []
    for _ in range(9):
        began_s = clock.now_s
        while not link.maintain(waiting=True):
            clock.now_s += 0.05
        borne.append(round(clock.now_s - began_s - LIVENESS_S, 1))
    assert borne[0] == 0
    assert borne == sorted(borne)
    assert borne[-1] == 5.0
    link.welcomed()
    clock.now_s += LIVENESS_S + 0.1
    assert link.maintain(waiting=True)


def test_a_silent_server_is_asked_again_and_answers_once(connect, router, clock):
    link = connect(sockets.bound_endpoint(router))
    question = Question(messages.Status().message(3), again_s=2.0)
    until(lambda: question.send(link) and router.poll(10))
    assert heard(router)[1].request_id == 3
    clock.now_s += 1.9
    assert question.send(link)
    assert sockets.receive_frames(router) is None
    clock.now_s += 0.2
    assert question.send(link)
    assert heard(router)[1].request_id == 3, "the same number: the server takes it once"
    clock.now_s += LIVENESS_S + 0.1
    assert link.maintain(waiting=True)
    until(lambda: question.send(link) and router.poll(10))
    peer, message = heard(router)
    sockets.send(router, Message(messages.StatusOk.TYPE, {}, {}, message.request_id), peer)
    assert [message.request_id for message in received(link)] == [3]
    question.repeat()
    assert question.send(link)
    assert heard(router)[0] == peer


def test_a_question_goes_once_over_each_connection(connect, router, clock):
    link = connect(sockets.bound_endpoint(router))
    question = Question(messages.Status().message(3))
    until(lambda: question.send(link) and router.poll(10))
    heard(router)
    clock.now_s += 1e6
    assert question.send(link)
    assert sockets.receive_frames(router) is None
    link.connect()
    until(lambda: question.send(link) and router.poll(10))
    assert heard(router)[1].request_id == 3


def test_what_cannot_be_sent_is_not_taken_for_sent(connect, ctx, clock):
    link = connect("tcp://127.0.0.1:1")
    question = Question(messages.Status().message(1))
    assert not question.send(link)
    assert not question.send(link)
    link.connect("inproc://later")
    later = sockets.make_router(ctx, "inproc://later")
    until(lambda: question.send(link))
    assert heard(later)[1].request_id == 1


def test_a_server_that_is_restarted_elsewhere_is_found(connect, ctx, router, clock):
    link = connect(sockets.bound_endpoint(router))
    before = reached(link, router)
    router.close(linger=0)
    elsewhere = sockets.make_router(ctx, LOOPBACK)
    link.connect(sockets.bound_endpoint(elsewhere))
    after = reached(link, elsewhere)
    assert before != after
    assert str(link) == f"replay at {sockets.bound_endpoint(elsewhere)}"
    sockets.send(elsewhere, Message("X"), after)
    assert [message.type for message in received(link)] == ["X"]


def test_no_two_links_of_a_process_have_one_identity(connect, router):
    links = [connect(sockets.bound_endpoint(router)) for _ in range(3)]
    assert len({reached(link, router) for link in links}) == 3


def test_a_long_name_leaves_room_for_the_number(ctx, router):
    options = {"name": "\N{GRINNING FACE}" * 100, "incarnation": 1 << 62, "liveness_s": 1.0}
    links = [Link(ctx, sockets.bound_endpoint(router), "learner", **options) for _ in range(2)]
    for link in links:
        link.connect()
    identities = {reached(link, router) for link in links}
    assert [len(identity) for identity in identities] == [255, 255]
    for link in links:
        link.close(0)


def test_what_is_no_address_is_one_line(connect):
    with pytest.raises(ConfigError, match="nonsense"):
        connect("nonsense")


class Forwarder:
    """A TCP connection to a server on which answers stop after so many bytes, until they are let go."""

    def __init__(self, server, stop_after):
        self.passed = 0
        self.stopped = threading.Event()
        self.go = threading.Event()
        self._listening = tcp.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._server = tcp.create_connection(("127.0.0.1", int(server.rpartition(":")[2])))
        self._stop_after = stop_after
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        with self._listening, self._server, self._listening.accept()[0] as client:
            back = threading.Thread(target=self._pass, args=(client, self._server, False), daemon=True)
            back.start()
            self._pass(self._server, client, True)
            with contextlib.suppress(OSError):
                client.shutdown(tcp.SHUT_RDWR)
            back.join()

    def _pass(self, source, target, stops):
        with contextlib.suppress(OSError):  # closed at either end
            self._copy(source, target, stops)

    def _copy(self, source, target, stops):
        while data := source.recv(1 << 16):
            if stops:
                room = max(0, self._stop_after - self.passed)
                target.sendall(data[:room])
                if room < len(data):
                    self.stopped.set()
                    self.go.wait()
                    target.sendall(data[room:])
                self.passed += len(data)
            else:
                target.sendall(data)

    def close(self):
        self.go.set()
        with contextlib.suppress(OSError):  # closed at the other end
            self._server.shutdown(tcp.SHUT_RDWR)
        self._thread.join()


def test_a_message_counts_when_all_of_it_is_there(connect, router, clock):
    """As the protocol's page says: bytes of a large one on its way are no sign of life."""
    forwarder = Forwarder(sockets.bound_endpoint(router), LARGE)
    link = connect(forwarder.endpoint)
    peer = reached(link, router)
    sockets.send(router, Message("X", {}, {"x": np.ones(2 * LARGE, np.uint8)}), peer)
    assert forwarder.stopped.wait(60)
    clock.now_s += SILENT_S - 0.1
    assert list(link.receive()) == []
    assert not link.maintain(waiting=True)
    assert not link.silent
    clock.now_s += LIVENESS_S - SILENT_S
    assert list(link.receive()) == []
    assert not link.maintain(waiting=True)
    assert link.silent, "half of it has come"
    forwarder.go.set()
    (message,) = received(link)
    assert message.arrays["x"].sum() == 2 * LARGE
    assert not link.silent
    clock.now_s += LIVENESS_S - 1
    assert not link.maintain(waiting=True), "counted from when it was whole"
    clock.now_s += 2
    assert link.maintain(waiting=True)
    forwarder.close()


def test_a_message_that_takes_longer_than_silence_is_borne_costs_the_connection(connect, router, clock):
    forwarder = Forwarder(sockets.bound_endpoint(router), LARGE)
    link = connect(forwarder.endpoint)
    peer = reached(link, router)
    sockets.send(router, Message("X", {}, {"x": np.ones(2 * LARGE, np.uint8)}), peer)
    assert forwarder.stopped.wait(60)
    clock.now_s += LIVENESS_S + 1
    assert list(link.receive()) == []
    assert link.lost()
    forwarder.close()


def test_nonsense_is_counted_and_no_sign_of_life(connect, router, clock, caplog):
    link = connect(sockets.bound_endpoint(router))
    peer = reached(link, router)
    clock.now_s += LIVENESS_S + 1
    for _ in range(3):
        sockets.send_frames(router, [b"nonsense"], peer)
    until(lambda: not list(link.receive()) and link.bad_messages == 3)
    link.bad(WireError("other", "of another kind"))
    assert link.bad_messages == 4
    lines = [record.getMessage() for record in caplog.records if "bad message" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("actor-0: bad message from replay at tcp://127.0.0.1:")
    assert link.maintain(waiting=True)


def test_a_flood_leaves_time_for_everything_else(connect, router, monkeypatch):
    monkeypatch.setattr(module, "MESSAGES_PER_TURN", 4)
    link = connect(sockets.bound_endpoint(router))
    peer = reached(link, router)
    for _ in range(40):
        sockets.send_frames(router, [b"nonsense"], peer)
    sockets.send(router, Message("X"), peer)
    came, turns = [], 0
    while not came:
        until(lambda: link.wait(100))
        came, turns = list(link.receive()), turns + 1
        assert link.bad_messages <= 4 * turns
    assert link.bad_messages == 40


# -- keys --


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Of the run, and of another."""
    folders = [tmp_path_factory.mktemp(name) for name in ("run", "other")]
    for folder in folders:
        make_keys(folder)
    return lambda role, other=False: Security(keys=load_keys(folders[other], role))


def bind_again(ctx, endpoint, security):
    """A ROUTER where another one has just been closed, which libzmq does in the background."""

    def bound():
        try:
            return sockets.make_router(ctx, endpoint, security)
        except ConfigError:
            return None

    return until(bound)


def test_a_server_that_comes_back_with_another_key_ends_the_client(connect, ctx, keys, clock):
    router = sockets.make_router(ctx, LOOPBACK, keys("replay"))
    endpoint = sockets.bound_endpoint(router)
    link = connect(endpoint, security=keys("actor"))
    reached(link, router)
    router.close(linger=0)
    other = bind_again(ctx, endpoint, keys("replay", other=True))

    def refused():
        try:
            link.maintain(waiting=False)
        except AuthError as error:
            return str(error)
        link.wait(20)
        return ""

    assert endpoint in until(refused)
    assert sockets.receive_frames(other) is None


def test_a_client_that_outlasts_a_wrong_key_tries_again_and_is_served(connect, ctx, keys, clock):
    false = sockets.make_router(ctx, LOOPBACK, keys("replay", other=True))
    endpoint = sockets.bound_endpoint(false)
    link = connect(endpoint, security=keys("actor"), retry_auth=True)
    until(lambda: link.maintain(waiting=False) or link.wait(20) or link.refusal)
    assert link.silent
    false.close(linger=0)
    router = bind_again(ctx, endpoint, keys("replay"))
    clock.now_s += RETRY_AUTH_S - 1
    assert not link.maintain(waiting=True)
    clock.now_s += 2
    assert link.maintain(waiting=False), "whether or not something is awaited"
    peer = reached(link, router)
    sockets.send(router, Message("X"), peer)
    assert received(link)
    assert not link.refusal
    assert not link.maintain(waiting=True)
    assert not link.silent
