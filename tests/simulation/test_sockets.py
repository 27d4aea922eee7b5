"""The simulated sockets and libzmq's own, asked the same by random scripts."""

import errno
import random
import time
from collections import defaultdict

import pytest
import zmq

from tests.harness import Context, until
from tests.simulation import sockets as simulated
from tests.simulation.machine import simulated_machine

NAMES = (b"one", b"two", b"three")
SETTLE_S = 5.0


class Real:
    """A ROUTER and its DEALERs in this process."""

    def __init__(self, context, place):
        self.context, self.place = context, place
        self.dealers, self.router = {}, None

    def socket(self, kind):
        return self.context.socket(kind)

    def settled(self):
        """A moment for libzmq's own thread; what has to be so is asked again until it is."""
        time.sleep(0.01)


class Simulated(Real):
    def __init__(self, world, network):
        self.world = world
        node = world.node("all")
        super().__init__(simulated.Context(node, network), "tcp://10.0.0.9:1")

        def idle():
            while True:
                world.sleep(1e9)

        self.task = node.start(idle)
        world.run(0.001)
        world.current = self.task  # whoever calls a socket is a task

    def settled(self):
        self.world.current = None
        self.world.run(self.world.now + SETTLE_S)
        self.world.current = self.task


def bind(side):
    side.router = side.socket(zmq.ROUTER)
    side.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    side.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    side.router.setsockopt(zmq.LINGER, 0)
    side.router.bind(side.place)


def connect(side, name):
    dealer = side.dealers[name] = side.socket(zmq.DEALER)
    for option, value in ((zmq.IDENTITY, name), (zmq.IMMEDIATE, 1), (zmq.LINGER, 0), (zmq.RECONNECT_IVL, 20)):
        dealer.setsockopt(option, value)
    dealer.connect(side.place)


def outcome(socket, parts):
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError as error:
        return errno.errorcode[error.errno]
    return "sent"


def received(socket):
    """Everything that has come, by sender: between senders there is no order."""
    found = defaultdict(list)
    while True:
        try:
            *sender, body = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return dict(found)
        found[tuple(sender)].append(body)


def gathered(socket, wanted):
    """What libzmq brings: all of it may take a moment."""
    found = defaultdict(list)

    def enough():
        for sender, bodies in received(socket).items():
            found[sender] += bodies
        return dict(found) == wanted

    until(enough, 20.0)
    return dict(found)


def writable(side, name):
    return bool(side.dealers[name].poll(0, zmq.POLLOUT))


@pytest.mark.parametrize("seed", range(8))
def test_a_router_and_its_dealers_do_the_same(seed, tmp_path):
    rng = random.Random(seed)
    context = Context()
    try:
        with simulated_machine(seed) as (world, network, _):
            real, other = Real(context, f"ipc://{tmp_path}/s"), Simulated(world, network)
            both = (real, other)
            for side in both:
                bind(side)
            for step in range(25):
                one_step(rng, step, real, other)
    finally:
        context.destroy(linger=0)


def one_step(rng, step, real, other):
    name = rng.choice(NAMES)
    kind = rng.choice(("send", "send", "send", "receive", "answer", "answer", "close", "unbind"))
    if name not in real.dealers:
        kind = "connect"
    for side in (real, other):
        if kind == "connect":
            connect(side, name)
        elif kind == "close":
            side.dealers.pop(name).close(0)
        elif kind == "unbind":
            side.router.close(0)
            if side is real:  # libzmq gives the address up in the background
                side.settled()
    if kind == "unbind":
        other.settled()
        until(lambda: not any(writable(real, each) for each in real.dealers), 20.0)
        assert not any(writable(other, each) for each in other.dealers)
        assert outcome(other.dealers[name], [b"x"]) == outcome(real.dealers[name], [b"x"]) == "EAGAIN"
        for side in (real, other):
            until(lambda side=side: bound(side), 20.0)
    other.settled()
    for each in real.dealers:
        assert writable(other, each)
        until(lambda each=each: writable(real, each), 20.0)
    body = b"%d" % step
    if kind == "send":
        for count in range(rng.randrange(1, 4)):
            parts = [body + b".%d" % count]
            assert outcome(other.dealers[name], parts) == outcome(real.dealers[name], parts) == "sent"
        other.settled()
    if kind in ("receive", "close", "unbind", "send"):
        wanted = received(other.router)
        assert gathered(real.router, wanted) == wanted
    if kind == "answer":
        answers(rng, name, body, real, other)


def bound(side):
    try:
        bind(side)
    except zmq.ZMQError:
        side.router.close(0)
        return False
    return True


def answers(rng, name, body, real, other):
    to = rng.choice((name, b"nobody"))
    expected = outcome(other.router, [to, body])
    until(lambda: outcome(real.router, [to, body]) == expected, 20.0)
    assert expected == ("sent" if to == name else "EHOSTUNREACH")
    other.settled()
    if to == name:
        wanted = received(other.dealers[name])
        assert gathered(real.dealers[name], wanted) == wanted == {(): [body]}


def test_a_peer_that_does_not_read_stops_its_router_about_where_libzmq_says(tmp_path):
    context, most = Context(), 5
    try:
        with simulated_machine(1) as (world, network, _):
            counts = []
            for side in (Real(context, f"ipc://{tmp_path}/s"), Simulated(world, network)):
                side.router = side.socket(zmq.ROUTER)
                side.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                side.router.setsockopt(zmq.SNDHWM, most)
                side.router.bind(side.place)
                dealer = side.socket(zmq.DEALER)
                dealer.setsockopt(zmq.IDENTITY, b"one")
                dealer.setsockopt(zmq.RCVHWM, most)
                dealer.connect(side.place)
                side.settled()
                until(lambda side=side: outcome(side.router, [b"one", b""]) == "sent", 20.0)
                count, refused = 0, 0
                while refused < 100:
                    sent = outcome(side.router, [b"one", bytes(1 << 20)])
                    assert sent in ("sent", "EAGAIN")
                    count, refused = (count + 1, 0) if sent == "sent" else (count, refused + 1)
                    side.settled()
                counts.append(count)
            for count in counts:
                assert 2 * most - 2 <= count <= 2 * most + 32, counts
    finally:
        context.destroy(linger=0)


def test_a_reader_of_the_newest_gets_the_newest_whatever_it_missed(tmp_path):
    context = Context()
    try:
        with simulated_machine(1) as (world, network, _):
            for side in (Real(context, f"ipc://{tmp_path}/s"), Simulated(world, network)):
                publisher, reader = side.socket(zmq.PUB), side.socket(zmq.SUB)
                publisher.bind(side.place)
                for option, value in ((zmq.CONFLATE, 1), (zmq.SUBSCRIBE, b"")):
                    reader.setsockopt(option, value)
                publisher.send(b"0")
                side.settled()
                assert not reader.poll(0), "nobody listened"
                reader.connect(side.place)
                side.settled()

                def heard(side=side, publisher=publisher, reader=reader):
                    publisher.send(b"1")
                    side.settled()
                    return reader.poll(0)

                until(heard, 20.0)
                for number in range(2, 60):
                    publisher.send(b"%d" % number)
                side.settled()
                last = []

                def newest(reader=reader, last=last):
                    last.extend(body for bodies in received(reader).values() for body in bodies)
                    return last and last[-1] == b"59"

                until(newest, 20.0)
    finally:
        context.destroy(linger=0)
