"""Whatever comes in, the control server goes on serving, and says by kind what it could not serve."""

import socket
import threading
import time

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import until
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import layout_of
from troupe.common.wire.codec import Limits, Message, WireError, encode
from troupe.common.wire.replay.client import ReplayClient

QUIET = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def server(serve):
    return serve(liveness_s=30.0)


@pytest.fixture
def stranger(ctx, server):
    """A DEALER that does as it pleases."""
    dealer = sockets.make_dealer(ctx, server.control_endpoint, b"stranger.1.1")
    until(lambda: sockets.send(dealer, hello()))
    assert until(lambda: sockets.receive(dealer)).type == messages.Welcome.TYPE
    return dealer


def hello(**changes) -> Message:
    fields = {"role": "viewer", "name": "stranger", "incarnation": 1, **changes}
    return Message(messages.Hello.TYPE, fields, {}, 1)


def ask(dealer, message: Message) -> Message:
    sockets.send(dealer, message)
    return until(lambda: sockets.receive(dealer))


def still_serves(connect, server) -> None:
    client = connect(server, "evaluator")
    client.join(60)
    client.close()


def test_frames_that_are_no_message_are_counted_by_kind(server, stranger, connect):
    for frames in (
        [b"garbage"],
        [b""],
        [b"\xff" * 100_000],
        [msgpack.packb({"v": 1, "t": "TELEMETRY", "i": 0, "f": {}, "a": []}), b"extra"],
        [
            msgpack.packb({"v": 1, "t": "X", "i": 0, "f": {}, "a": [{"n": "x", "d": "object", "s": [1]}]}),
            b"12345678",
        ],
        encode(Message("SURPRISE")),
        encode(Message(messages.Heartbeat.TYPE, {"error": 7})),
        encode(Message(messages.Telemetry.TYPE, {"metrics": 5})),
        encode(Message(messages.Heartbeat.TYPE, {"version": "new"})),
    ):
        sockets.send_frames(stranger, frames)
    expected = {
        "bad_header": 2,
        "header_too_large": 1,
        "frame_count": 1,
        "bad_dtype": 1,
        "bad_type": 1,
        "bad_field": 3,
    }
    until(lambda: sum(server.rejected().values()) == sum(expected.values()))
    assert server.rejected() == expected
    (peer,) = server.peers()
    assert peer["rejected"] == sum(expected.values())
    still_serves(connect, server)


def test_who_waits_for_an_answer_is_told_what_is_wrong(server, stranger):
    for message, kind in (
        (Message("SURPRISE", {}, {}, 5), "bad_type"),
        (Message(messages.Heartbeat.TYPE, {"version": []}, {}, 5), "bad_field"),
        (Message(messages.ParamsGet.TYPE, {"version": "x"}, {}, 5), "bad_field"),
        (hello(incarnation="me"), "bad_field"),
        (hello(role="gardener"), "bad_hello"),
        (hello(slots_wanted=2**40), "bad_field"),
        (hello(slots_held=["a"]), "bad_field"),
        (hello(slots_held=[0, 1], slots_wanted=1), "bad_field"),
        (hello(hash="other"), "hash"),
    ):
        if kind == "bad_field" and message.type == messages.ParamsGet.TYPE:
            server.publish(1, {"w": np.zeros(1)})
        answer = ask(stranger, message)
        assert (answer.type, answer.request_id, answer.fields["kind"]) == ("ERROR", message.request_id, kind)


def test_only_members_are_served(ctx, server):
    dealer = sockets.make_dealer(ctx, server.control_endpoint, b"nobody.1.1")
    until(lambda: sockets.send(dealer, Message(messages.Telemetry.TYPE, {"metrics": {"x": 1.0}})))
    answer = until(lambda: sockets.receive(dealer))
    assert answer.fields["kind"] == "unknown_peer"
    for kind in (messages.Heartbeat.TYPE, messages.ParamsGet.TYPE):
        assert ask(dealer, Message(kind, {}, {}, 3)).fields["kind"] == "unknown_peer"
    assert server.telemetry.empty()


def test_another_protocol_version_is_named_to_the_peer(server, stranger):
    sockets.send_frames(stranger, [msgpack.packb({"v": 7, "new": "layout"})])
    answer = until(lambda: sockets.receive(stranger))
    assert answer.fields["kind"] == "version"
    assert "7" in answer.fields["detail"]
    assert "1" in answer.fields["detail"]


def test_bytes_that_are_not_even_zeromq_are_counted(server, connect):
    port = int(server.control_endpoint.rsplit(":", 1)[1])
    for noise in (b"GET / HTTP/1.1\r\n\r\n" * 8, b"\x00" * 200, b"SSH-2.0-OpenSSH_9.6\r\n" * 8):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(noise)
            time.sleep(0.05)
    until(lambda: sum(n for kind, n in server.rejected().items() if kind.startswith("handshake")) >= 1)
    still_serves(connect, server)


def test_a_frame_that_is_too_large_costs_its_sender_the_connection_only(ctx, serve, connect, monkeypatch):
    limits = Limits(array_bytes=1 << 20, total_bytes=1 << 20)
    monkeypatch.setattr("troupe.common.wire.messages.CONTROL_LIMITS", limits)
    server = serve()
    dealer = sockets.make_dealer(ctx, server.control_endpoint, b"big.1.1")
    until(lambda: sockets.send(dealer, Message("X", {}, {"x": np.zeros(1 << 21, np.uint8)}, 1)))
    assert not dealer.poll(200)  # it never got there
    still_serves(connect, server)


@given(frames=st.lists(st.binary(max_size=300), min_size=1, max_size=4))
@QUIET
def test_random_frames(stranger, server, frames):
    sockets.send_frames(stranger, frames)
    assert_alive(stranger)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KINDS = sorted({body.TYPE for body in messages.BODIES} - {messages.Bye.TYPE, messages.Hello.TYPE})
NAMES = sorted({name for body in messages.BODIES for name in layout_of(body).fields})


@given(
    kind=st.sampled_from(KINDS),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    request_id=st.integers(0, 2),
    blob=st.binary(max_size=20),
)
@QUIET
def test_well_formed_nonsense(stranger, server, kind, fields, request_id, blob):
    message = Message(kind, fields, {"blob": np.frombuffer(blob, np.uint8)}, request_id)
    sockets.send(stranger, message)
    assert_alive(stranger)


@given(changes=st.dictionaries(st.sampled_from(sorted(layout_of(messages.Hello).fields)), VALUES))
@QUIET
def test_nonsense_hellos(ctx, server, changes):
    dealer = sockets.make_dealer(ctx, server.control_endpoint, b"guest.1.1")
    try:
        message = hello(name="guest", **{k: v for k, v in changes.items() if k != "name"})
        try:
            until(lambda: sockets.send(dealer, message))
        except WireError:
            return
        assert until(lambda: sockets.receive(dealer)).type in (messages.Welcome.TYPE, messages.Error.TYPE)
    finally:
        dealer.close(linger=0)
    assert "internal" not in server.rejected()


def assert_alive(stranger) -> None:
    """The server answers a heartbeat, whatever it has answered before."""
    sockets.send(stranger, Message(messages.Heartbeat.TYPE, {"version": 1}, {}, 4711))
    while True:
        answer = until(lambda: sockets.receive(stranger))
        if answer.request_id == 4711 and answer.type == messages.HeartbeatOk.TYPE:
            return
        answers = (messages.Error, messages.HeartbeatOk, messages.Params, messages.StatusOk)
        assert answer.type in [each.TYPE for each in answers]


def test_nonsense_from_a_learner_does_not_end_a_client(ctx, connect, caplog):
    router = sockets.make_router(ctx, "tcp://127.0.0.1:*")
    client = connect(sockets.bound_endpoint(router), "actor-0", liveness_s=5.0)
    joined = []
    thread = threading.Thread(target=lambda: joined.append(client.join(60)))
    thread.start()
    identity, *_ = until(lambda: sockets.receive_frames(router))
    state = {"session": 1, "version": -1, "steps": 0, "updates": 0, "stopping": False}
    welcome = {
        "config": {},
        "slots": [],
        "total_slots": 0,
        "announce": "tcp://127.0.0.1:1",
        "shards": [],
        "heartbeat_s": 0.05,
        "liveness_s": 5.0,
        **state,
    }
    sockets.send_frames(router, [b"nonsense"], identity.bytes)
    sockets.send(router, Message("WELCOME", welcome), identity.bytes)
    thread.join(60)
    assert joined
    bad_blob = Message(
        "PARAMS", {"manifest": [["w", "object", [1], 0]], **state}, {"blob": np.zeros(8, np.uint8)}
    )
    for message in (
        Message("HEARTBEAT_OK", {"steps": "many"}),
        bad_blob,
        Message("ERROR", {}),
        Message("WHAT"),
    ):
        sockets.send(router, message, identity.bytes)
    for _ in range(20):
        sockets.send_frames(router, [b"nonsense"], identity.bytes)
    sockets.send(
        router, Message("HEARTBEAT_OK", {"shards": ["tcp://a:1"], **state, "steps": 77}), identity.bytes
    )
    until(lambda: client.state.steps == 77)
    assert client.shards == ["tcp://a:1"]
    assert client.rejected == 24
    # The kinds are told once each.
    lines = [record.getMessage() for record in caplog.records if "bad message" in record.getMessage()]
    assert 0 < len(lines) == len({line.split(": ")[2] for line in lines}) <= 3


def test_nonsense_from_replay_is_counted_and_told_once(ctx, caplog):
    router = sockets.make_router(ctx, "tcp://127.0.0.1:*")
    client = ReplayClient(sockets.bound_endpoint(router), ctx=ctx, name="actor-0")

    def asked():
        client.poll(10)
        return sockets.receive_frames(router)

    identity, *_ = until(asked)
    for _ in range(20):
        sockets.send_frames(router, [b"nonsense"], identity.bytes)

    def all_counted():
        client.poll(10)
        return client.counters["bad_messages"] == 20

    until(all_counted)
    assert sum("bad message from replay" in record.getMessage() for record in caplog.records) == 1
    client.close(0)
