"""What is between simulated processes: connections that delay, hold and lose, and hosts that are cut off.

A connection keeps the order of each of its directions, as TCP does. What a partition stops arrives after it,
unless the connection ends before. When a connection ends, what was under way is lost from some message on.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.sockets import Socket
    from tests.simulation.world import Node, World


KEEPALIVE_S = 60.0
"""After which TCP gives up a connection on which nothing comes; see `troupe.common.wire.sockets`."""


class Pipe:
    """One end of a connection, at a socket."""

    def __init__(self, connection: Connection, socket: Socket) -> None:
        self.connection = connection
        self.socket = socket
        self.other: Pipe
        self.joined = False  # the greetings are over
        self.attached = False  # may send
        self.ended = False  # knows that the connection is over
        self.identity = b""  # of the other end
        self.inbox: list[list[bytes]] = []
        self.unread = 0  # sent from here and not taken from the other's inbox
        self.under_way: list[Flight] = []  # sent from here, not arrived
        self.last_s = 0.0  # when the last of these arrives
        self.topics: set[bytes] = set()  # subscribed to by the other end


class Tracker:
    """See `zmq.MessageTracker`."""

    done = False


class Flight:
    """A message under way."""

    __slots__ = ("due_s", "gone", "parts", "tracker")

    def __init__(
        self, parts: list[bytes] | Callable[[], None], due_s: float, tracker: Tracker | None
    ) -> None:
        self.parts = parts
        self.due_s = due_s
        self.tracker = tracker
        self.gone = False


class Connection:
    """Between a socket that connected and one that is bound."""

    def __init__(self, network: Network, client: Socket, server: Socket) -> None:
        self.network = network
        self.client = Pipe(self, client)
        self.server = Pipe(self, server)
        self.client.other, self.server.other = self.server, self.client
        self.over = False
        self.forgotten = False  # by what is between: nothing passes any more, and nobody is told
        network.connections.append(self)

    def send(self, pipe: Pipe, parts: list[bytes] | Callable[[], None], tracker: Tracker | None) -> None:
        """Put a message on its way to the other end."""
        network = self.network
        delay_s = network.latency(pipe.socket.node, pipe.other.socket.node)
        due_s = pipe.last_s = max(pipe.last_s + 1e-7, network.world.now + delay_s)
        flight = Flight(parts, due_s, tracker)
        pipe.under_way.append(flight)
        if self.forgotten:
            return
        network.world.at(due_s, self._arrive, pipe, flight)

    def _arrive(self, pipe: Pipe, flight: Flight) -> None:
        if flight.gone or self.forgotten:
            return
        network, other = self.network, pipe.other
        cut_until_s = network.cut_until(pipe.socket.node, other.socket.node)
        if cut_until_s > network.world.now or pipe.under_way[0] is not flight:
            # Behind others that are held, it comes after them.
            due_s = pipe.last_s = max(pipe.last_s + 1e-7, cut_until_s + network.latency(None, None))
            network.world.at(due_s, self._arrive, pipe, flight)
            return
        pipe.under_way.pop(0)
        if flight.tracker is not None:
            flight.tracker.done = True
        if callable(flight.parts):
            flight.parts()
            return
        if other.ended or other.socket.closed or other.socket.node.dead:
            return
        parts = flight.parts
        # Shards name their folders, which are under one of a random name.
        header = parts[0].replace(network.folder, b"") if parts else b""
        network.world.note(f"to {other.socket.label} {zlib.crc32(header)} {len(parts)}")
        other.socket.arrived(other, parts)

    def end(self, first: Pipe | None = None, *, deliver: float | None = None) -> None:
        """The connection is over. The process of `first` knows at once, or nobody does before the news come.

        `deliver`: the share of what is under way that still arrives; None for any.
        """
        if self.over:
            return
        self.over = True
        network = self.network
        world = network.world
        for pipe in (self.client, self.server):
            share = world.rng.random() if deliver is None else deliver
            kept = round(share * len(pipe.under_way))
            dead = pipe.other is first
            for flight in pipe.under_way[0 if dead else kept :]:
                flight.gone = True
                if flight.tracker is not None:
                    flight.tracker.done = True
            pipe.under_way = [] if dead else pipe.under_way[:kept]
            if pipe is first:
                self._hear(pipe)
            elif not self.forgotten:
                self._tell(pipe)
        if self in network.connections:
            network.connections.remove(self)

    def forget(self) -> None:
        """Have nothing pass any more, as where a firewall has lost its table; TCP notices at last."""
        self.forgotten = True
        for pipe in (self.client, self.server):
            self.network.world.after(KEEPALIVE_S, self._hear, pipe)

    def _tell(self, pipe: Pipe) -> None:
        """Have the news reach this end, behind what still arrives there."""
        world, other = self.network.world, pipe.other
        due_s = max(other.last_s, world.now + self.network.latency(other.socket.node, pipe.socket.node))
        world.at(due_s, self._heard_at, pipe)

    def _heard_at(self, pipe: Pipe) -> None:
        network = self.network
        until_s = network.cut_until(pipe.other.socket.node, pipe.socket.node)
        if until_s > network.world.now or pipe.other.under_way:
            again_s = max(until_s, pipe.other.last_s) + 1e-4
            network.world.at(again_s, self._heard_at, pipe)
            return
        self._hear(pipe)

    def _hear(self, pipe: Pipe) -> None:
        if not pipe.ended:
            pipe.ended = True
            pipe.attached = False
            pipe.socket.lost(pipe)


class Network:
    """Addresses, and how well hosts reach each other."""

    def __init__(self, world: World, folder: str) -> None:
        self.world, self.folder = world, folder.encode()
        self.bound: dict[str, Socket] = {}
        self.connections: list[Connection] = []
        self.observer: Any = None
        self._cut: dict[tuple[str, str], float] = {}
        self.slow_until_s = 0.0
        self.slow_s = 0.0

    def latency(self, source: Node | None, target: Node | None) -> float:
        """Seconds that a message takes now."""
        rng = self.world.rng
        if source is not None and target is not None and source.host == target.host:
            delay_s = 2e-5 + 2e-4 * rng.random()
        else:
            delay_s = 1e-4 + 1e-3 * rng.random()
        if rng.random() < 0.01:
            delay_s += 0.05 * rng.random()
        if self.world.now < self.slow_until_s:
            delay_s += self.slow_s * rng.random()
        return delay_s

    def cut(self, source: str, target: str, until_s: float) -> None:
        """Let nothing pass from one host to another until then."""
        self._cut[source, target] = max(self._cut.get((source, target), 0.0), until_s)

    def cut_until(self, source: Node, target: Node) -> float:
        """When something may pass again; a time that is over where it may now."""
        return self._cut.get((source.host, target.host), 0.0) if source.host != target.host else 0.0

    def reaches(self, one: Node, other: Node) -> float:
        """When both ways are open; a time that is over where they are."""
        return max(self.cut_until(one, other), self.cut_until(other, one))

    def forget_all(self, chance: float) -> None:
        """Let nothing pass through connections any more, each with some chance."""
        for each in self.connections:
            if self.world.rng.random() < chance:
                each.forget()

    def clung_to(self, seconds: float) -> list[str]:
        """Clients that asked something so long ago over connections that nothing passes, and keep to them."""
        now_s, found = self.world.now, []
        for each in self.connections:
            client = each.client.socket
            node, gone = client.node, client.closed or client.node.dead or not client.asks
            if not each.forgotten or gone or now_s < node.stalled_until + seconds:
                continue
            if any(flight.due_s < now_s - seconds for flight in each.client.under_way):
                found.append(client.label)
        return found

    def break_all(self, chance: float) -> None:
        """End connections, each with some chance."""
        for each in list(self.connections):
            if self.world.rng.random() < chance:
                each.end()
