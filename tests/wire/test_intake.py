"""A message that never ends costs its sender the connection, and nobody else anything."""

import socket
import threading
import time
from collections import Counter
from multiprocessing import get_context

import numpy as np
import pytest
import zmq

from tests.harness import LOOPBACK, until
from tests.replay import processes
from tests.replay.ports import free_port
from tests.wire.security.secured import secured
from tests.wire.zmtp import RawPeer, frame
from troupe.common.errors import ConfigError
from troupe.common.wire import intake, messages, sockets
from troupe.common.wire.codec import Limits, Message, encode
from troupe.common.wire.intake import CUT, Intake
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.security.keys import make_keys

MIB = 1 << 20
MAX_GROWTH_MB = 5000
"""A shard that cuts does not grow by so much, however late it looks; one that keeps everything soon does."""


def memory_mb(process) -> float:
    """Memory of a process that belongs to no file, in MB: not the chunks it has mapped."""
    with open(f"/proc/{process.pid}/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * 4096 / 1e6


@pytest.fixture
def shard(tmp_path):
    """A shard's process, and its address."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    process = processes.start(tmp_path / "data", endpoint, "--table", "default:capacity=1000")
    yield process, endpoint
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("size", [100_000_000, 0])
def test_frames_without_end_do_not_fill_a_shard(shard, size):
    process, endpoint = shard
    client = ReplayClient(endpoint, name="actor-0")
    processes.insert(client, 0)
    assert client.flush(120)
    before_mb = memory_mb(process)
    enough, served = threading.Event(), []

    def go_on():
        while not enough.is_set() or not served:
            served.append(client.sample(32, timeout_s=120))

    good = threading.Thread(target=go_on)
    good.start()
    hostile = RawPeer(endpoint)
    try:
        # It may have four messages while others wait, and what comes between two looks: on a fast machine, or
        # where the shard gets no turn, much. Nobody bounds what is sent but by cutting the connection.
        assert hostile.flood(
            frame(b"x" * size, more=True),
            64 << 30,
            enough=lambda: memory_mb(process) - before_mb > MAX_GROWTH_MB,
        )
    finally:
        enough.set()
        good.join(60)
        hostile.close()
    assert client.status(60)["rejected"] == {CUT: 1}
    processes.insert(client, 1)
    assert client.flush(120)
    client.close(0)


class Reader:
    """A bound socket whose messages have a MiB at most, and its intake."""

    def __init__(self, ctx):
        self.router = sockets.make_router(ctx, LOOPBACK)
        self.endpoint = sockets.bound_endpoint(self.router)
        self.intake = Intake(self.router, MIB)
        self.counts = Counter()
        self.taken = []

    def turn(self, *, receive=True):
        while receive and (frames := self.intake.receive()) is not None:
            self.taken.append(sum(map(len, frames[1:])))
        self.intake.look(self.counts)
        time.sleep(0.01)

    def kept(self):
        """Bytes by connection."""
        return sorted(each.kept for each in self.intake._connections.values() if each.watched)

    def until(self, condition, **options):
        until(
            condition,
            step=lambda: self.turn(**options),
            why=lambda: (self.counts, self.kept(), self.taken),
        )


@pytest.fixture
def reader(ctx, monkeypatch):
    for limit in ("QUIET_PERIOD_S", "MAX_QUIET_PERIOD_S"):
        monkeypatch.setattr(intake, limit, intake.PERIOD_S)  # it looks whenever it is due
    return Reader(ctx)


def test_connections_are_looked_at_seldom_unless_memory_grows(ctx, monkeypatch):
    """To look at all of them ten times a second took a tenth of a learner's core with 500 members."""
    router, looks, now_s, memory = sockets.make_router(ctx, LOOPBACK), [], [100.0], [1 << 28]
    monkeypatch.setattr(intake, "_anonymous_memory", lambda: memory[0])
    monkeypatch.setattr(intake.system, "monotonic", lambda: now_s[0])
    watch = Intake(router, MIB)
    monkeypatch.setattr(watch, "_measure", lambda: looks.append(now_s[0]))

    def advance(seconds):
        now_s[0] += seconds

    def go_on(seconds, growth=0):
        looks.clear()
        for _ in range(round(seconds / 0.05)):
            now_s[0] += 0.05
            memory[0] += growth
            watch.look(Counter())
        return len(looks)

    assert go_on(20.0) in (9, 10, 11)
    assert go_on(2.0, growth=intake.NOTICED_BYTES) >= 15
    assert go_on(2.0, growth=-intake.NOTICED_BYTES) <= 2
    go_on(0.1, growth=intake.NOTICED_BYTES)  # from the least that it was, not from the most
    assert looks
    monkeypatch.setattr(watch, "_measure", lambda: looks.append(now_s[0]) or advance(0.004))
    assert go_on(40.0) in (9, 10, 11), "a thousandth of the time"
    monkeypatch.setattr(watch, "_measure", lambda: looks.append(now_s[0]) or advance(0.1))
    assert go_on(60.0) in (5, 6, 7), "but never less often than that"


def several_looks(reader):
    for _ in range(3):
        due_s = reader.intake._due_s
        reader.until(lambda due_s=due_s: reader.intake._due_s > due_s)


def test_a_message_that_takes_long_is_served(reader):
    peer = RawPeer(reader.endpoint)
    part = frame(bytes(MIB // 4), more=True)
    for round_ in range(5):  # more in all than one message may have
        for _ in range(3):
            peer.send(part)
            several_looks(reader)
        peer.send(frame(b"end"))
        reader.until(lambda round_=round_: len(reader.taken) == round_ + 1)
    assert not reader.counts


def test_whole_messages_may_wait_for_a_server_that_is_busy(reader):
    peer = RawPeer(reader.endpoint)
    for _ in range(6):
        peer.send(frame(bytes(MIB // 2)))
    reader.until(lambda: sum(reader.kept()) > 3 * MIB, receive=False)
    several = reader.intake._due_s + 0.3
    reader.until(lambda: time.monotonic() > several, receive=False)
    reader.until(lambda: len(reader.taken) == 6)
    assert not reader.counts


def test_a_peer_of_an_older_protocol_does_no_harm(reader):
    with socket.create_connection(("127.0.0.1", int(reader.endpoint.rsplit(":", 1)[1]))) as peer:
        peer.sendall(b"\x01\x00" + b"\x06\x00hello")  # ZMTP 1.0: an identity of no bytes, and a frame
        reader.until(lambda: reader.taken == [5])
    several_looks(reader)
    assert not reader.counts


def test_the_log_says_which_limit_it_was(reader, caplog, monkeypatch):
    peer = RawPeer(reader.endpoint)
    peer.send(frame(bytes(3 * MIB // 2), more=True))
    reader.until(lambda: "and the limit for one connection is 1.3 MB" in caplog.text)
    reader.intake._throttle = intake.Throttle(0.0)
    monkeypatch.setattr(intake, "SMALL_BYTES", 1000)
    monkeypatch.setattr(intake, "_anonymous_memory", lambda: 1 << 40)
    other = RawPeer(reader.endpoint)
    other.send(frame(b"", more=True) * 1000)
    reader.until(lambda: "and such small frames take" in caplog.text)


def test_so_many_that_memory_would_go_may_not_wait_even_then(reader):
    peer = RawPeer(reader.endpoint)
    for _ in range(16):
        peer.send(frame(bytes(MIB // 2)))
    reader.until(lambda: reader.counts[CUT], receive=False)
    assert peer.is_cut()


def test_many_connections_may_not_do_together_what_one_may_not(reader):
    peers = [RawPeer(reader.endpoint) for _ in range(6)]
    for number, peer in enumerate(peers):
        peer.send(frame(bytes(MIB * (4 + number) // 10), more=True))
    reader.until(lambda: reader.counts[CUT] == 2)
    assert [peer.is_cut(0.2) for peer in peers] == 4 * [False] + 2 * [True]
    for peer in peers[:4]:
        peer.send(frame(b"end"))
    reader.until(lambda: len(reader.taken) == 4)


def test_a_new_connection_has_nothing_of_the_one_whose_descriptor_it_gets(reader):
    first = RawPeer(reader.endpoint)
    for _ in range(3):
        first.send(frame(bytes(MIB // 2)))
    reader.until(lambda: sum(reader.kept()) > MIB, receive=False)
    first.close()
    reader.until(lambda: not any(reader.kept()), receive=False)
    second = RawPeer(reader.endpoint)  # before what the first has sent comes out of the socket
    reader.until(lambda: any(reader.kept()), receive=False)
    reader.until(lambda: len(reader.taken) == 3)
    several_looks(reader)
    assert sum(reader.kept()) < 200
    second.send(frame(bytes(3 * MIB // 4), more=True))
    several_looks(reader)
    assert not reader.counts
    second.send(frame(bytes(3 * MIB // 4), more=True))
    reader.until(lambda: reader.counts[CUT] == 1)
    assert second.is_cut()


def test_small_frames_are_not_saved_up(reader):
    peer = RawPeer(reader.endpoint)
    peer.send((frame(b"", more=True) * 62 + frame(b"")) * 2000)  # counts as more than it is, and is forgotten
    reader.until(lambda: len(reader.taken) == 2000)
    several_looks(reader)
    peer.send(frame(bytes(3 * MIB // 2), more=True))
    reader.until(lambda: reader.counts[CUT] == 1)


class Dam:
    """Passes on so many bytes of what a client sends, and everything that it is sent."""

    def __init__(self, endpoint, max_bytes):
        self._target = ("127.0.0.1", int(endpoint.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._max_bytes = max_bytes
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = threading.Event()
        self._ends = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        client, server = self._listener.accept()[0], socket.create_connection(self._target)
        self._listener.close()
        self._ends = [client, server]
        threading.Thread(target=self._copy, args=(server, client, 1 << 62), daemon=True).start()
        self._copy(client, server, self._max_bytes)

    def _copy(self, source, target, max_bytes):
        try:
            while max_bytes and (data := source.recv(min(max_bytes, 1 << 16))):
                target.sendall(data)
                max_bytes -= len(data)
        except OSError:
            pass
        if max_bytes:
            self.broken.set()

    def close(self):
        self._listener.close()
        for end in self._ends:
            end.close()


def begin_a_message_that_is_too_large(endpoint, folder):
    """With a viewer's key; until it is killed."""
    ctx = zmq.Context()
    hostile = sockets.make_dealer(ctx, endpoint, None, secured(folder, "viewer").toward("learner"))
    until(lambda: hostile.poll(0, zmq.POLLOUT))
    for _ in range(64):
        hostile.send(bytes(MIB // 8), zmq.SNDMORE)
    hostile.send(b"end")  # the part of the message that arrives is 3 MiB of 8
    threading.Event().wait(60)


def test_with_keys_as_well(serve, connect, tmp_path, monkeypatch):
    folder = tmp_path / "keys"
    make_keys(folder)
    limits = Limits(array_bytes=MIB, total_bytes=MIB)
    monkeypatch.setattr("troupe.common.wire.messages.CONTROL_LIMITS", limits)
    server = serve(security=secured(folder, "learner"))
    dam = Dam(server.control_endpoint, 3 * MIB)
    # In a process of its own: ZeroMQ aborts one that closes a socket whose message was cut in its midst.
    sender = get_context("spawn").Process(
        target=begin_a_message_that_is_too_large, args=(dam.endpoint, folder)
    )
    sender.start()
    try:
        until(lambda: server.rejected().get(CUT) == 1)
        assert dam.broken.wait(60)
        client = connect(server, "evaluator", security=secured(folder, "evaluator").toward("learner"))
        client.join(60)
        client.close()
    finally:
        sender.kill()
        sender.join(60)
        dam.close()


def test_subscriptions_are_bounded(ctx, serve):
    server = serve()
    sub = sockets.make_sub(ctx, server.announce_endpoint)
    assert until(lambda: sockets.receive(sub)).type == messages.Announce.TYPE
    hostile = RawPeer(server.announce_endpoint, b"SUB")
    words = np.random.default_rng(0).bytes(1 << 22)
    flood = b"".join(frame(b"\x01" + words[at : at + 200]) for at in range(0, len(words), 200))
    assert hostile.flood(flood, 1 << 30)
    until(lambda: server.rejected().get(CUT, 0) >= 1)
    assert until(lambda: sockets.receive(sub)).type == messages.Announce.TYPE
    sub.close(linger=0)


def test_no_subscription_is_long(ctx, serve):
    hostile = RawPeer(serve().announce_endpoint, b"SUB")
    hostile.send(frame(b"\x01" + bytes(1 << 14)))
    assert hostile.is_cut()


def test_a_chunk_that_no_shard_takes_is_not_sent(monkeypatch):
    monkeypatch.setattr(messages, "REPLAY_LIMITS", Limits(total_bytes=1000))
    with pytest.raises(ConfigError, match="shorter chunks"):
        processes.good_insert()
    assert len(encode(Message("STATUS"))) == 1
