"""TCPStore and `socket` as `troupe.services.learner.peers` uses them, over the simulated network.

As measured with torch 2.13: who connects to a store whose process stands still, or asks it for a key, waits
until that goes on or the connection ends, however long. Only a key that is not there is given up after the
store's timeout.
"""

from __future__ import annotations

import itertools
import socket as real_socket
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from greenlet import GreenletExit

from tests.simulation.network import Connection, Network, Pipe
from tests.simulation.world import Node, Task

NETWORK = "10.0.0.0/16"
"""Of all hosts: see `net.learner_network`."""


class Fabric:
    """What listens, by address, and the groups that are being made, in one world."""

    def __init__(self, network: Network) -> None:
        self.network, self.world = network, network.world
        self.stores: dict[tuple[str, int], StoreServer] = {}
        self.groups: dict[int, Any] = {}
        self.numbers = itertools.count(1)
        self.wrong: Callable[[str], None] = lambda what: None
        self._addresses: dict[str, str] = {}

    def address(self, host: str) -> str:
        """Of a host, in `NETWORK`."""
        return self._addresses.setdefault(host, f"10.0.2.{len(self._addresses) + 1}")

    def round_trip(self, node: Node) -> float:
        """Seconds for a greeting and its answer."""
        return self.network.latency(node, None) + self.network.latency(None, node)


fabric: Fabric | None = None
"""That of the world that runs now."""


def the() -> Fabric:
    if fabric is None:  # what ends with its world
        raise GreenletExit
    return fabric


class Waits:
    """Something that tasks of a process wait for."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting: list[Task] = []

    def until(self, done: Callable[[], Any], timeout_s: float | None = None) -> bool:
        """Wait; False where the time is over first."""
        task, world = self.node.world.here(), self.node.world
        end_s = None if timeout_s is None else world.now + timeout_s
        while not done():
            left_s = None if end_s is None else end_s - world.now
            if left_s is not None and left_s <= 0.0:
                return False
            self.waiting.append(task)
            task.wait(left_s)
            if task in self.waiting:
                self.waiting.remove(task)
        return True

    def tell(self) -> None:
        """Have those who wait look again."""
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            task.wake()


class End:
    """What a `Pipe` takes for its socket."""

    closed = asks = False

    def __init__(
        self, node: Node, label: str, arrived: Callable[..., None], lost: Callable[..., None]
    ) -> None:
        self.node, self.label = node, f"{node.name}.{label}"
        self._arrived, self._lost = arrived, lost

    def arrived(self, pipe: Pipe, parts: list[Any]) -> None:
        """A message has come."""
        self._arrived(pipe, parts)

    def lost(self, pipe: Pipe) -> None:
        """The connection has ended."""
        if not self.node.dead:
            self._lost(pipe)


def send(pipe: Pipe, *parts: Any) -> None:
    """Send a line, which the world notes, and what belongs to it."""
    if not pipe.connection.over:
        pipe.connection.send(pipe, [str(parts[0]).encode(), *parts[1:]], None)


# -- stores --


class StoreServer:
    """Keeps keys in the process that listens; answers nothing while that stands still."""

    def __init__(self, node: Node, host: str, port: int) -> None:
        self.node, self.number = node, next(the().numbers)
        self.place, self.fabric = (host, port), the()
        self.changed = Waits(node)
        self.keys: dict[str, bytes] = {}
        self._wanted: list[tuple[str, Pipe]] = []
        self._pipes: list[Pipe] = []
        the().stores[self.place] = self
        node.at_exit.append(self._die)

    def connect(self, client: End) -> Pipe:
        """A connection; the client's end of it."""
        server = End(self.node, f"store{self.number}", self._come, lambda pipe: None)
        connection = Connection(the().network, client, server)  # type: ignore[arg-type]
        self._pipes.append(connection.server)
        return connection.client

    def _come(self, pipe: Pipe, parts: list[Any]) -> None:
        world = self.node.world
        if self.node.dead:
            return
        if world.now < self.node.stalled_until:
            world.at(self.node.stalled_until, self._come, pipe, parts)
            return
        _, what, key, value = parts
        if what == "set":
            self.put(key, value)
        elif what == "check":
            send(pipe, "answer", key in self.keys)
        elif what == "give up":
            if (key, pipe) in self._wanted:
                self._wanted.remove((key, pipe))
                send(pipe, "answer", None)
        elif key in self.keys:
            send(pipe, "answer", self.keys[key])
        else:
            self._wanted.append((key, pipe))

    def put(self, key: str, value: bytes) -> None:
        """Set a key, and answer those who wait for it."""
        self.keys[key] = value
        for each in [each for each in self._wanted if each[0] == key]:
            self._wanted.remove(each)
            send(each[1], "answer", value)
        self.changed.tell()

    def _die(self) -> None:
        if self.fabric.stores.get(self.place) is self:
            del self.fabric.stores[self.place]
        for pipe in self._pipes:
            pipe.connection.end(pipe)


class TCPStore:
    """See `torch.distributed.TCPStore`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        is_master: bool,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = False,
        master_listen_fd: int = -1,
    ) -> None:
        node = the().world.here().node
        self.timeout_s = timeout.total_seconds()
        self._waits, self._answers = Waits(node), []  # type: ignore[var-annotated]
        self._lost = False
        self._own = StoreServer(node, host, port) if is_master else None
        server = self._own or reached(host, port, 2 * self.timeout_s)
        if server is None:
            raise RuntimeError(
                f"The client socket has timed out while trying to connect to ({host}, {port})."
            )
        self.place = server.place
        if is_master:
            return
        self._pipe = server.connect(End(node, "store", self._come, self._end))
        node.at_exit.append(lambda: self._pipe.connection.end(self._pipe))
        self._ask("check", "validate", b"")

    def _come(self, pipe: Pipe, parts: list[Any]) -> None:
        self._answers.append(parts[1])
        self._waits.tell()

    def _end(self, pipe: Pipe) -> None:
        self._lost = True
        self._waits.tell()

    def _ask(self, what: str, key: str, value: bytes, timeout_s: float | None = None) -> Any:
        if not self._lost:
            send(self._pipe, f"{what} {key}", what, key, value)
        if self._waits.until(lambda: self._answers or self._lost, timeout_s):
            if not self._answers:
                raise RuntimeError("Connection reset by peer")
            return self._answers.pop(0)
        raise TimeoutError

    def set(self, key: str, value: str | bytes) -> None:
        """Tell the server, which need not hear of it before this returns."""
        value = value.encode() if isinstance(value, str) else value
        if self._own is not None:
            self._own.put(key, value)
            return
        if self._lost:
            raise RuntimeError("Broken pipe")
        send(self._pipe, f"set {key}", "set", key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        if self._own is not None:
            return self._own.keys.keys() >= set(keys)
        return all(self._ask("check", key, b"") for key in keys)

    def get(self, key: str) -> bytes:
        """Wait for a key."""
        if self._own is not None:
            self._own.changed.until(lambda: key in self._own.keys, self.timeout_s)
            return self._found(key, self._own.keys.get(key))
        try:
            value: bytes | None = self._ask("get", key, b"", self.timeout_s)
        except TimeoutError:
            value = self._ask("give up", key, b"")  # which is answered at last, for it waits for that
        return self._found(key, value)

    def _found(self, key: str, value: bytes | None) -> bytes:
        if value is None:
            raise RuntimeError(f"wait timeout after {self.timeout_s * 1000:.0f}ms, keys: /{key}")
        return value

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` waits."""
        self.timeout_s = timeout.total_seconds()


class PrefixStore:
    """See `torch.distributed.PrefixStore`."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store
        self.place, self.path = store.place, f"{getattr(store, 'path', '')}/{prefix}"

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check([f"{self._prefix}/{key}" for key in keys])
        return found

    def get(self, key: str) -> bytes:
        found: bytes = self._store.get(f"{self._prefix}/{key}")
        return found

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def reached(host: str, port: int, timeout_s: float) -> StoreServer | None:
    """Who listens there, once the kernels have greeted each other; None after that time."""
    world, node = the().world, the().world.here().node
    end_s = world.now + timeout_s
    while True:
        server = the().stores.get((host, port))
        until_s = the().network.reaches(node, server.node) if server is not None else world.now + 0.5
        pause_s = max(until_s - world.now, 0.0) + the().round_trip(node)
        world.sleep(min(pause_s, max(end_s - world.now, 0.0)))
        if server is not None and not server.node.dead and until_s <= world.now < end_s:
            return server
        if world.now >= end_s:
            return None


# -- sockets --


class Listener:
    """A socket that listens, until a store takes it over."""

    def __init__(self, family: int, kind: int) -> None:
        self._place = "", 0

    def bind(self, place: tuple[str, int]) -> None:
        self._place = place[0], 40000 + next(the().numbers)

    def listen(self, backlog: int) -> None:
        pass

    def close(self) -> None:
        pass

    def getsockname(self) -> tuple[str, int]:
        return self._place

    def detach(self) -> int:
        return -1


class Connected:
    """What `create_connection` gives, which is only closed again."""

    def close(self) -> None:
        pass


def create_connection(place: tuple[str, int], timeout_s: float) -> Connected:
    """See `socket.create_connection`: refused at once where nobody listens."""
    world = the().world
    server = the().stores.get(place)
    if server is None:
        world.sleep(the().round_trip(world.here().node))
        raise ConnectionRefusedError
    if reached(*place, timeout_s) is None:
        raise TimeoutError
    return Connected()


def net_if_addrs() -> dict[str, list[Any]]:
    """See `psutil.net_if_addrs`."""
    address = the().address(the().world.here().node.host)
    return {"eth0": [types.SimpleNamespace(family=real_socket.AF_INET, address=address)]}
