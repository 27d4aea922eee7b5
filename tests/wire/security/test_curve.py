"""Keys on real sockets: who gets in, who does not, and what both sides say about it."""

import contextlib
import logging
import socket as tcp
import threading

import pytest
import zmq

from tests.harness import LOOPBACK, Context, control_server, fetched, until
from tests.wire.security.secured import secured
from troupe.common.errors import AuthError, ConfigError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security import handshakes, zap
from troupe.common.wire.security.handshakes import HandshakeMonitor, greeted_by_curve
from troupe.common.wire.security.keys import AllowList, load_keys, make_keys
from troupe.common.wire.sockets import Security


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The keys of another run."""
    path = tmp_path_factory.mktemp("other")
    make_keys(path)
    return path


def stranger(folder, other, tmp_path):
    """An actor that knows the servers, but whom they do not know."""
    mixed = tmp_path / "mixed"
    mixed.mkdir(mode=0o700)
    for source, names in ((folder, ("learner.public", "replay.public")), (other, ("actor.secret",))):
        for name in names:
            (mixed / name).touch(0o600)
            (mixed / name).write_bytes((source / name).read_bytes())
    return secured(mixed, "actor")


def test_with_keys_a_service_joins_and_gets_parameters(serve, connect, folder):
    import numpy as np

    server = serve(security=secured(folder, "learner"))
    server.publish(1, {"w": np.arange(1000.0)})
    client = connect(server, "actor-0", slots_wanted=2, security=secured(folder, "actor"))
    assert client.join(60).slots == [0, 1]
    assert fetched(client).params["w"][999] == 999.0
    server.set_state(stopping=True)  # said by ANNOUNCE at once, and by the next heartbeat's answer
    until(lambda: client.state.stopping)


def test_announcements_are_encrypted_as_well(ctx, folder):
    pub = sockets.make_pub(ctx, LOOPBACK, secured(folder, "learner"))
    endpoint = sockets.bound_endpoint(pub)
    sub = sockets.make_sub(ctx, endpoint, secured(folder, "actor").toward("learner"))
    without = sockets.make_sub(ctx, endpoint)

    def arrives():
        sockets.send(pub, Message("ANNOUNCE", {"version": 1}))
        return sub.poll(20)

    until(arrives)
    assert not without.poll(200)


def test_ipc_stays_as_it_is(ctx, folder, tmp_path):
    router = sockets.make_router(ctx, f"ipc://{tmp_path}/socket", secured(folder, "learner"))
    assert not router.getsockopt(zmq.CURVE_SERVER)
    dealer = sockets.make_dealer(ctx, sockets.bound_endpoint(router), b"plain.1.1")
    until(lambda: sockets.send(dealer, Message("X")))
    assert until(lambda: sockets.receive_frames(router))[0].bytes == b"plain.1.1"


# -- who is turned away, and what is said on both sides --


CASES = {  # the client's keys; what it says; what the server says
    "unlisted": ("allow-list does not have our key", "turned away a peer at 127.0.0.1: its key"),
    "wrong server key": ("its key is not that in", "it has another public key for this service"),
    "no keys": (
        "it requires keys (start this service with --keys)",
        "it has no keys, and this service requires them",
    ),
    "no keys at the server": ("it has no keys, and we have", "it requires keys, and this service has none"),
}


def security_of(case, folder, other, tmp_path):
    if case == "unlisted":
        return stranger(folder, other, tmp_path)
    if case == "no keys":
        return None
    return secured(other if case == "wrong server key" else folder, "actor")


@pytest.mark.parametrize("case", CASES)
def test_whom_the_learner_turns_away_is_said_on_both_sides(
    case, serve, connect, folder, other, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    theirs = None if case == "no keys at the server" else secured(folder, "learner")
    server = serve(security=theirs)
    client = connect(server, "actor-0", security=security_of(case, folder, other, tmp_path), liveness_s=30.0)
    with pytest.raises(AuthError) as caught:
        client.join(60)
    client_says, server_says = CASES[case]
    assert client_says in str(caught.value)
    assert server.control_endpoint in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4
    until(lambda: server_says in caplog.text)
    until(server.rejected)
    assert server.peers() == []


@pytest.mark.parametrize("case", CASES)
def test_whom_a_shard_turns_away_is_told(case, ctx, context, folder, other, tmp_path, caplog):
    """The client has threads of its own, as in a process of its own: which end hangs up first is chance."""
    theirs = None if case == "no keys at the server" else secured(folder, "replay")
    router = sockets.make_router(ctx, LOOPBACK, theirs)
    monitor = HandshakeMonitor(router)
    client = ReplayClient(
        sockets.bound_endpoint(router), ctx=context, security=security_of(case, folder, other, tmp_path)
    )
    client_says, server_says = CASES[case]
    with pytest.raises(AuthError, match="no connection with") as caught:
        client.status(30.0)
    assert client_says in str(caught.value)

    def said():
        monitor.drain(counts)
        return server_says in caplog.text

    from collections import Counter

    counts: Counter[str] = Counter()
    until(said)
    client.close(0)
    monitor.close()


def test_a_learner_that_changes_its_keys_is_noticed_by_a_member(serve, connect, folder, other):
    server = serve(security=secured(folder, "learner"))
    client = connect(server, "actor-0", security=secured(folder, "actor"), liveness_s=30.0)
    client.join(60)
    endpoint = server.control_endpoint
    server.stop()
    serve(endpoint, security=secured(other, "learner"))

    def noticed():
        try:
            client.check()
        except AuthError:
            return True
        return False

    until(noticed)


@contextlib.contextmanager
def door(answer):
    """Accepts, does `answer(connection)` and hangs up, again and again; gives its endpoint."""
    with tcp.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        closing = threading.Event()

        def serve():
            while not closing.is_set():
                with contextlib.suppress(OSError), listener.accept()[0] as connection:
                    connection.settimeout(0.2)
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            closing.set()
            thread.join(60)


def test_a_door_without_a_server_behind_it_is_no_reason_to_give_up(connect, folder):
    """A proxy whose server is not up yet accepts and hangs up, as a server does that cannot read us."""
    with door(lambda connection: None) as endpoint:
        assert not greeted_by_curve(endpoint)
        for security in (secured(folder, "actor"), Security()):
            client = connect(endpoint, "actor-0", security=security)
            with pytest.raises(Exception, match="could not join"):
                client.join(2)


@pytest.mark.parametrize("keys", [False, True])
def test_a_server_is_told_what_keys_there_are_by_who_hangs_up(connect, folder, keys):
    """libzmq hangs up before it has said so where the server's greeting comes at once."""
    ours, theirs = (b"CURVE", b"NULL\0") if keys else (b"NULL", b"CURVE")
    heard = []

    def greet(connection):
        connection.sendall(handshakes._GREETING.replace(b"CURVE", theirs))
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < 64 and (part := connection.recv(64)):
                said += part
        heard.append(said[12:32].rstrip(b"\0"))

    with door(greet) as endpoint:
        client = connect(endpoint, "actor-0", security=secured(folder, "actor") if keys else None)
        with pytest.raises(AuthError):
            client.join(60)
        until(lambda: ours in heard)


def test_a_server_that_always_hangs_up_before_it_can_be_read_wants_keys(connect):
    """libzmq may lose what a server that is done with us had still sent, and then says nothing of keys."""

    def hang_up_on_who_has_none(connection):
        if b"CURVE" in connection.recv(64):
            connection.sendall(handshakes._GREETING)

    with door(hang_up_on_who_has_none) as endpoint:
        client = connect(endpoint, "actor-0")
        with pytest.raises(AuthError, match="it requires keys"):
            client.join(60)


def test_the_allow_list_is_followed_without_a_restart(serve, connect, folder, other, tmp_path):
    own = tmp_path / "own"
    make_keys(own)
    server = serve(security=secured(own, "learner"))
    actor = secured(own, "actor")
    text = (own / "allowed").read_text()
    without = "".join(line for line in text.splitlines(True) if not line.startswith("actor"))
    (own / "allowed").write_text(without)
    with pytest.raises(AuthError, match="does not have our key"):
        connect(server, "actor-0", security=actor).join(60)
    (own / "allowed").write_text(text)
    connect(server, "actor-0", security=actor).join(60)


def test_a_key_is_good_for_its_role_only(serve, connect, folder):
    server = serve(security=secured(folder, "learner"))
    with pytest.raises(AuthError, match="claims the role actor, but its key is for the role viewer"):
        connect(server, "actor-0", security=secured(folder, "viewer")).join(60)
    connect(server, "viewer-0", security=secured(folder, "viewer")).join(60)
    connect(server, "viewer-1", security=secured(folder, "actor")).join(60)


def test_the_role_of_a_key_comes_with_every_message(ctx, folder):
    router = sockets.make_router(ctx, LOOPBACK, secured(folder, "learner"))
    endpoint = sockets.bound_endpoint(router)
    dealer = sockets.make_dealer(ctx, endpoint, None, secured(folder, "evaluator").toward("learner"))
    until(lambda: sockets.send(dealer, Message(messages.Heartbeat.TYPE)))
    frames = until(lambda: sockets.receive_frames(router))
    assert sockets.peer_key(frames[0]).role == "evaluator"


# -- addresses, and the proof at start --


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "*", "[::]", "192.0.2.1", "127.evil.example", "localhost.example"]
)
def test_an_address_that_others_reach_needs_keys_or_a_word(ctx, host):
    for make in (sockets.make_router, sockets.make_pub):
        with pytest.raises(ConfigError, match=r"without keys.*--insecure"):
            make(ctx, f"tcp://{host}:5999")


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "127.0.0.1", "127.3.2.1", "localhost"])
def test_with_keys_it_may_be_bound_and_is_proven(ctx, folder, host):
    router = sockets.make_router(ctx, f"tcp://{host}:*", secured(folder, "replay"))
    assert greeted_by_curve(sockets.bound_endpoint(router).replace("0.0.0.0", "127.0.0.1"))


def test_a_check_that_lets_everybody_in_ends_the_start(ctx, folder, monkeypatch):
    monkeypatch.setattr(AllowList, "role_of", lambda self, key: "actor")
    for make in (sockets.make_router, sockets.make_pub):
        with pytest.raises(AuthError, match="lets in a client with a wrong key"):
            make(ctx, LOOPBACK, secured(folder, "learner"))


def test_a_server_that_is_not_encrypted_ends_the_start(ctx, folder, monkeypatch):
    monkeypatch.setattr(zap, "protect", lambda ctx, socket, keys: None)
    with pytest.raises(AuthError, match="lets in a client without a key"):
        sockets.make_router(ctx, LOOPBACK, secured(folder, "learner"))


def test_a_check_that_fails_lets_nobody_in_and_ends_the_start(ctx, folder, monkeypatch):
    def fail(self, key):
        raise RuntimeError("a defect")

    monkeypatch.setattr(AllowList, "role_of", fail)
    monkeypatch.setattr(zap, "PROOF_S", 1.0)
    with pytest.raises(AuthError, match="did not decide"):
        sockets.make_router(ctx, LOOPBACK, secured(folder, "learner"))


def test_a_server_without_a_list_does_not_start(ctx, folder, tmp_path):
    for name in ("learner.secret", "replay.public"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(AuthError, match="allowed: No such file"):
        sockets.make_router(ctx, LOOPBACK, secured(tmp_path, "learner"))


def test_the_proof_itself_is_not_logged(ctx, folder, caplog):
    sockets.make_router(ctx, LOOPBACK, secured(folder, "learner"))
    assert "turned away" not in caplog.text


def test_one_handler_serves_all_sockets_of_a_context_and_ends_with_it(folder, other):
    for _ in range(3):  # a new context may get the address of the one before
        context: zmq.Context = Context()
        routers = [
            sockets.make_router(context, LOOPBACK, secured(keys, role))
            for keys in (folder, other)
            for role in ("learner", "replay")
        ]
        # Each list counts at its own servers only.
        for router, keys in zip(routers, (folder, folder, other, other), strict=True):
            endpoint = sockets.bound_endpoint(router)
            server = load_keys(keys, "learner" if router in routers[::2] else "replay").public
            for client, gets_in in ((keys, True), (other if keys is folder else folder, False)):
                pair = load_keys(client, "actor")
                own = (pair.public, pair.secret)
                assert zap.turned_away(context, zmq.DEALER, endpoint, own, server) != gets_in
        threads = [thread for thread in threading.enumerate() if thread.name == "zap"]
        context.destroy(linger=0)
        until(lambda threads=threads: not any(thread.is_alive() for thread in threads))


def test_the_server_uses_the_keys_it_was_given(ctx, folder):
    control = control_server(
        ctx,
        LOOPBACK,
        LOOPBACK,
        config={},
        structural_hash="",
        total_slots=1,
        security=secured(folder, "learner"),
    )
    control.start()
    assert greeted_by_curve(control.control_endpoint)
    assert greeted_by_curve(control.announce_endpoint)
    control.stop()
