"""The one loop of all servers: what a message causes is an ERROR to its sender, and the next is served."""

import threading

import msgpack
import numpy as np
import pytest

from tests.harness import LOOPBACK, until
from troupe.common.errors import RefusedError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message, encode
from troupe.common.wire.security.keys import load_keys, make_keys
from troupe.common.wire.server import Server


def refuse(envelope, body):
    raise RefusedError("no_table", "there is none", expected=7)


def run_out(envelope, body):
    raise MemoryError


def blunder(envelope, body):
    return {}["what nobody has thought of"]


HANDLERS = {
    messages.CreditQuestion: lambda envelope, body: messages.Credit(credit=1, session=body.incarnation),
    messages.Sample: refuse,
    messages.Priorities: run_out,
    messages.SnapshotRequest: blunder,
    messages.Insert: lambda envelope, body: None,
}


@pytest.fixture
def serve(ctx):
    """Starts a server; returns it and how to connect to it."""
    stop, threads = threading.Event(), []

    def start(security=None, handlers=HANDLERS):
        router = sockets.make_router(ctx, LOOPBACK, security)
        server = Server("test", router, handlers)
        server.open()

        def loop():
            while not stop.is_set():
                server.turn(0.05)
            server.close()

        threads.append(threading.Thread(target=loop))
        threads[-1].start()
        return server

    yield start
    stop.set()
    for thread in threads:
        thread.join(60)


def connect(ctx, server, security=None):
    return sockets.make_dealer(ctx, sockets.bound_endpoint(server.socket), b"peer.1", security)


def ask(dealer, frames):
    until(lambda: sockets.send_frames(dealer, frames))
    answer = until(lambda: sockets.receive(dealer))
    return messages.Error.of(answer) if answer.type == messages.Error.TYPE else answer, answer.request_id


def header(**changes):
    return msgpack.packb({"v": 1, "t": "SAMPLE", "i": 5, "f": {"batch_size": 1}, "a": [], **changes})


ARRAY = {"n": "x", "d": "uint8", "s": [3], "c": "raw"}


@pytest.mark.parametrize(
    ("frames", "kind", "about", "number"),
    [
        ([header()], "no_table", "SAMPLE", 5),
        ([header(f={})], "bad_field", "SAMPLE", 5),
        ([header(t="SURPRISE")], "bad_type", "SURPRISE", 5),
        ([header(t="WELCOME")], "bad_type", "WELCOME", 5),
        ([header(t="SNAPSHOT", f={})], "internal", "SNAPSHOT", 5),
        # What can be read of the header is said, whatever is wrong with the arrays.
        ([header(a=[5]), b"abc"], "bad_array", "SAMPLE", 5),
        ([header(a=[{**ARRAY, "d": "object"}]), b"abc"], "bad_dtype", "SAMPLE", 5),
        ([header(a=[{**ARRAY, "s": [4]}]), b"abc"], "bad_shape", "SAMPLE", 5),
        ([header(a=[ARRAY])], "frame_count", "SAMPLE", 5),
        ([header(a=[ARRAY] * 65), *[b"abc"] * 65], "too_large", "SAMPLE", 5),
        ([b"garbage"], "bad_header", "", 0),
        ([header(v=2)], "version", "", 0),
    ],
)
def test_what_cannot_be_served_is_an_error_and_the_next_message_is_served(
    ctx, serve, frames, kind, about, number
):
    server = serve()
    dealer = connect(ctx, server)
    error, answered = ask(dealer, frames)
    assert (error.kind, error.about, answered) == (kind, about, number)
    if kind == "no_table":
        assert error.expected == 7
    answer, answered = ask(dealer, encode(Message("CREDIT", {"incarnation": 9}, {}, 6)))
    assert (answer.fields["session"], answered) == (9, 6)
    assert server.rejections.by_kind == {kind: 1}


def test_memory_that_does_not_suffice_refuses_one_request(ctx, serve):
    server = serve()
    dealer = connect(ctx, server)
    arrays = {"ids": np.ones(1, np.uint64), "priorities": np.ones(1)}
    error, number = ask(dealer, encode(Message("PRIORITIES", {}, arrays, 3)))
    assert (error.kind, error.about, number) == ("memory", "PRIORITIES", 3)
    assert ask(dealer, encode(Message("CREDIT", {}, {}, 6)))[1] == 6


def test_every_role_may_send_what_the_table_says_and_nothing_else(ctx, serve, tmp_path):
    make_keys(tmp_path)
    secured = {
        role: sockets.Security(keys=load_keys(tmp_path, role), server="replay")
        for role in ("actor", "learner", "evaluator", "viewer")
    }
    for role, security in secured.items():
        handlers = {body: refuse for body in messages.BODIES if body.TYPE in messages.MAY_SEND}
        server = serve(sockets.Security(keys=load_keys(tmp_path, "replay")), handlers)
        dealer = connect(ctx, server, security)
        for kind, roles in messages.MAY_SEND.items():
            error, _ = ask(dealer, encode(Message(kind, {}, {}, 1)))
            assert (error.kind == messages.REFUSED_KEY) is (role not in roles), kind
        dealer.close(linger=0)
