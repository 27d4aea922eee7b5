"""Sockets of ZeroMQ as far as Troupe uses them, with libzmq's semantics; `test_sockets.py` compares both."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from typing import Any

import zmq

from tests.simulation import threads
from tests.simulation.network import Connection, Network, Pipe, Tracker
from tests.simulation.world import Node, Task, World

# As plain numbers: operations on zmq's enumerations would take a tenth of all the time.
IN, OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
ROUTER, DEALER, PUB, SUB, PAIR = map(int, (zmq.ROUTER, zmq.DEALER, zmq.PUB, zmq.SUB, zmq.PAIR))
_SNDHWM, _RCVHWM, _CONFLATE, _LINGER = map(int, (zmq.SNDHWM, zmq.RCVHWM, zmq.CONFLATE, zmq.LINGER))

KERNEL_MESSAGES = 8
"""Messages that the kernels' buffers of one direction hold, beside the limits of both sockets."""

SLOW_READ_S = 0.5
"""At most so long a slow reader takes for a message."""


class _Again(zmq.Again):
    """Without asking libzmq for its words, which took a tenth of all the time."""

    errno, strerror = errno.EAGAIN, "not now"
    __init__ = Exception.__init__


class Context:
    """Of one process."""

    def __init__(self, node: Node, network: Network) -> None:
        self.node = node
        self.network = network
        self.underlying = id(self)
        self.sockets: list[Socket] = []
        self.made = 0
        node.at_exit.append(self._die)

    def socket(self, kind: int) -> Socket:
        socket = Socket(self, kind)
        self.sockets.append(socket)
        return socket

    def destroy(self, linger: int | None = None) -> None:
        for socket in list(self.sockets):
            socket.close(linger)

    term = destroy

    def _die(self) -> None:
        for socket in list(self.sockets):
            socket.vanish(None)


class Socket:
    """One socket; `arrived` and `lost` are called by the network."""

    def __init__(self, context: Context, kind: int) -> None:
        self.context = context
        self.kind = int(kind)
        self.node = context.node
        self.network = context.network
        self.world: World = context.node.world
        self.closed = False
        self.waiting: list[Task] = []
        self.waiting_for_room: list[Task] = []
        self.pipes: list[Pipe] = []
        self.monitor: Socket | None = None
        self.events: list[tuple[int, int]] = []
        context.made += 1
        self.label = f"{self.node.name}.{context.made}"
        self._options: dict[int, Any] = {_SNDHWM: 1000, _RCVHWM: 1000, _LINGER: -1}
        self._topics: list[bytes] = []
        self._endpoint = ""
        self._bound = ""
        self._to = ""
        self._pause_s = 0.1
        self._masks = 0

    # -- options --

    def setsockopt(self, option: int, value: Any) -> None:
        if option != zmq.SUBSCRIBE:
            self._options[int(option)] = value
            return
        self._topics.append(value)
        for pipe in self.pipes:
            self._subscribe(pipe, value)

    def _subscribe(self, pipe: Pipe, topic: bytes) -> None:
        pipe.connection.send(pipe, lambda: pipe.other.topics.add(topic), None)

    def getsockopt(self, option: int) -> Any:
        if option == zmq.LAST_ENDPOINT:
            return self._endpoint.encode() + b"\0"
        if option == zmq.EVENTS:
            return self.ready(IN | OUT)
        if option == zmq.CURVE_SERVER:
            return 0
        return self._options.get(int(option), 0)

    # -- connections --

    def bind(self, endpoint: str) -> None:
        if endpoint.endswith(":*") or endpoint.endswith(":0"):
            endpoint = f"{endpoint.rpartition(':')[0]}:{40000 + len(self.network.bound)}"
        if endpoint in self.network.bound:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self.network.bound[endpoint] = self
        self._bound = self._endpoint = endpoint

    def connect(self, endpoint: str) -> None:
        self._to = self._endpoint = endpoint
        self._try()

    def _try(self) -> None:
        """Begin a connection: it is there on the server's side first or on ours, as it happens."""
        if self.closed or self.node.dead:
            return
        server = self.network.bound.get(self._to)
        world, network = self.world, self.network
        if server is None:
            world.after(network.latency(None, None), self._refused)
            return
        open_s = network.reaches(self.node, server.node)
        if open_s > world.now:
            world.at(open_s + world.rng.random(), self._try)
            return
        connection = Connection(network, self, server)
        for pipe in (connection.server, connection.client):
            source = pipe.other.socket.node
            delay_s = 2 * network.latency(source, pipe.socket.node)
            world.after(delay_s, self._attach, pipe)

    def _attach(self, pipe: Pipe) -> None:
        connection, world = pipe.connection, self.world
        if connection.over or pipe.socket.closed or pipe.socket.node.dead:
            return
        open_s = self.network.reaches(pipe.socket.node, pipe.other.socket.node)
        if open_s > world.now:
            world.at(open_s + self.network.latency(None, None), self._attach, pipe)
        else:
            pipe.socket.join(pipe)

    def join(self, pipe: Pipe) -> None:
        """Both have greeted each other, as this end knows."""
        if pipe.joined:
            return
        pipe.joined = True
        if self.kind == ROUTER and not self._identify(pipe):
            return
        pipe.attached = True
        self.pipes.append(pipe)
        self._pause_s = 0.1
        if self.kind == SUB:
            for topic in self._topics:
                self._subscribe(pipe, topic)
        self._tell_monitor(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0)
        self.notify()

    def _identify(self, pipe: Pipe) -> bool:
        """Give a pipe its identity; False where another has it, and keeps it."""
        identity = pipe.other.socket.option(zmq.IDENTITY) or self._new_identity()
        for each in [each for each in self.pipes if each.identity == identity]:
            if each.ended:  # what it brought is read under another name, to which nobody can answer
                each.identity = self._new_identity()
            elif self.option(zmq.ROUTER_HANDOVER):
                self.pipes.remove(each)
                each.inbox.clear()
                each.connection.end(each, deliver=0.0)
            else:
                return False
        pipe.identity = identity
        return True

    def _new_identity(self) -> bytes:
        return b"\0" + self.world.rng.randbytes(4)

    def option(self, option: int) -> Any:
        """What was set, or 0."""
        return self._options.get(int(option), 0)

    def arrived(self, pipe: Pipe, parts: list[bytes]) -> None:
        """A message has come; the greeting came before it."""
        self.join(pipe)
        if not pipe.attached:
            return
        if self._options.get(_CONFLATE):
            pipe.other.unread -= len(pipe.inbox)
            pipe.inbox.clear()
            parts = parts[-1:]
        pipe.inbox.append(parts)
        self.notify()

    def lost(self, pipe: Pipe) -> None:
        """The connection has ended; what it brought can still be read."""
        if self.closed or self.node.dead:
            return
        if not pipe.inbox and pipe in self.pipes:
            self.pipes.remove(pipe)
        if self._to:
            self._tell_monitor(zmq.EVENT_DISCONNECTED, 0)
            self._again()
        self.notify()

    def _again(self) -> None:
        self.world.after(self._pause_s * (1 + self.world.rng.random()), self._try)
        self._pause_s = min(2 * self._pause_s, 2.0)

    def _refused(self) -> None:
        if not (self.closed or self.node.dead):
            self._again()

    def close(self, linger: int | None = None) -> None:
        if not self.closed:
            linger = self._options[_LINGER] if linger is None else linger
            self.vanish(linger)

    def vanish(self, linger_ms: int | None) -> None:
        """Close, with some time for what is to be sent; None where the process has died."""
        if self.closed:
            return
        self.closed = True
        if self in self.context.sockets:
            self.context.sockets.remove(self)
        if self._bound and self.network.bound.get(self._bound) is self:
            del self.network.bound[self._bound]
        for connection in list(self.network.connections):
            for pipe in (connection.client, connection.server):
                if pipe.socket is self:
                    soon = all(
                        each.due_s - self.world.now < (linger_ms or 0) / 1000 for each in pipe.under_way
                    )
                    connection.end(pipe, deliver=1.0 if linger_ms and soon else None)

    # -- messages --

    def send_multipart(
        self, parts: Sequence[Any], flags: int = 0, copy: bool = True, track: bool = False
    ) -> Tracker | None:
        self.world.preempt()
        if self.closed:
            raise zmq.ZMQError(errno.ENOTSOCK)
        frames = [bytes(part) for part in parts]
        tracker = Tracker() if track else None
        if self.kind == PUB:
            for pipe in list(self.pipes):
                if any(frames[0].startswith(topic) for topic in pipe.topics) and self._room(pipe):
                    self._send(pipe, frames, None)
            return None
        if self.kind == ROUTER:
            identity, *frames = frames
            to = next((each for each in self.pipes if each.identity == identity and not each.ended), None)
            if to is None or not self._room(to):
                if self.option(zmq.ROUTER_MANDATORY):
                    raise zmq.Again if to else zmq.ZMQError(errno.EHOSTUNREACH)
                return tracker
        else:
            to = next(
                (each for each in self.pipes if each.attached and not each.ended and self._room(each)), None
            )
            if to is None:
                raise _Again
        self._send(to, frames, tracker)
        return tracker

    def send(self, data: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Tracker | None:
        return self.send_multipart([data], flags, copy, track)

    @property
    def asks(self) -> bool:
        """Whether it is of a client that waits for answers."""
        return self.kind == DEALER and self.node.name != "stranger"

    @property
    def address(self) -> str:
        """What it has connected to."""
        return self._to

    def _send(self, pipe: Pipe, frames: list[bytes], tracker: Tracker | None) -> None:
        if self.network.observer is not None:
            self.network.observer.on_send(self, frames)
        pipe.unread += 1
        pipe.connection.send(pipe, frames, tracker)

    def _room(self, pipe: Pipe) -> bool:
        """Whether a message may be sent into this pipe: both limits and the kernels' buffers are between."""
        most = self._options[_SNDHWM]
        theirs = pipe.other.socket._options[_RCVHWM]
        if not most:
            return True
        if not theirs or pipe.other.socket._options.get(_CONFLATE):
            return len(pipe.under_way) < most + KERNEL_MESSAGES
        return pipe.unread < most + theirs + KERNEL_MESSAGES

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        if self.events:
            event, value = self.events.pop(0)
            return [struct.pack("=hi", event, value), b"tcp://peer"]
        self.world.preempt(0.005)
        if self.closed:
            raise zmq.ZMQError(errno.ENOTSOCK)
        if self.node.reads_slowly_until > self.world.now:
            self.world.here().wait(SLOW_READ_S * self.world.rng.random())
        pipe = self._next()
        if pipe is None:
            if not int(flags) & 1:
                raise AssertionError("a blocking receive")
            raise _Again
        parts = pipe.inbox.pop(0)
        pipe.other.unread -= 1
        if pipe.ended and not pipe.inbox and pipe in self.pipes:
            self.pipes.remove(pipe)
        elif pipe.other.unread in (self._options[_RCVHWM], 0):
            for task in pipe.other.socket.waiting_for_room:
                task.wake()
        if self.network.observer is not None:
            self.network.observer.on_receive(self, parts, pipe.identity)
        if self.kind == ROUTER:
            parts = [pipe.identity, *parts]
        if copy:
            return list(parts)
        # A frame of libzmq's where something is asked of it: whom it is from.
        return [zmq.Frame(parts[0], copy=True), *map(memoryview, parts[1:])]

    def _next(self) -> Pipe | None:
        """The pipe to read from: any, for their messages race each other."""
        first, more = None, []
        for pipe in self.pipes:
            if pipe.inbox:
                if first is None:
                    first = pipe
                else:
                    more.append(pipe)
        return self.world.rng.choice([first, *more]) if more else first

    # -- waiting --

    def ready(self, flags: int) -> int:
        """Which of these events there are."""
        found = 0
        if flags & IN:
            if self.events:
                found = IN
            else:
                for pipe in self.pipes:
                    if pipe.inbox:
                        found = IN
                        break
        if flags & OUT and (
            self.kind in (ROUTER, PUB)
            or any(each.attached and not each.ended and self._room(each) for each in self.pipes)
        ):
            found |= OUT
        return found

    def notify(self) -> None:
        """Wake who waits for this socket."""
        for task in self.waiting:
            task.wake()
        for task in self.waiting_for_room:
            task.wake()

    def poll(self, timeout: float | None = None, flags: int = IN) -> int:
        flags = int(flags)
        if found := self.ready(flags):
            if timeout != 0:
                self.world.preempt(0.005)
            return found
        if timeout == 0:
            self.world.spin()
            return 0
        poller = Poller()
        poller.register(self, flags)
        found_all = poller.poll(timeout)
        return found_all[0][1] if found_all else 0

    # -- monitors --

    def get_monitor_socket(self, events: int, addr: str | None = None) -> Socket:
        self.monitor, self._masks = Socket(self.context, zmq.PAIR), int(events)
        return self.monitor

    def disable_monitor(self) -> None:
        self.monitor = None

    def _tell_monitor(self, event: int, value: int) -> None:
        if self.monitor is not None and self._masks & int(event):
            self.monitor.events.append((int(event), value))
            self.monitor.notify()


class Poller:
    """See `zmq.Poller`; takes what stands for file descriptors as well."""

    def __init__(self) -> None:
        self._registered: dict[Any, int] = {}

    def register(self, socket: Any, flags: int = IN | OUT) -> None:
        self._registered[socket] = int(flags)

    def unregister(self, socket: Any) -> None:
        del self._registered[socket]

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        world = threads.the()
        end_s = None if timeout is None or timeout < 0 else world.now + timeout / 1000
        found = self._found()
        if not found and timeout == 0:
            world.spin()
            return found
        if found:
            world.preempt(0.005)
            return found
        task = world.here()
        lists = [
            each.waiting_for_room if flags & OUT else each.waiting for each, flags in self._registered.items()
        ]
        for waiting in lists:
            waiting.append(task)
        try:
            while not found:
                left_s = None if end_s is None else end_s - world.now
                if left_s is not None and left_s <= 0:
                    return found
                task.wait(left_s)
                found = self._found()
        finally:
            for waiting in lists:
                waiting.remove(task)
        world.preempt(0.005)
        return found

    def _found(self) -> list[tuple[Any, int]]:
        found = []
        for each, flags in self._registered.items():
            events = each.ready(flags)
            if events:
                found.append((each, events))
        return found
