"""Groups of gloo over the simulated network.

Each learner sends its part to all others. A collective is complete where the parts of all have come, whatever
has become of the others meanwhile; so one learner may have completed what fails in another. Where a
connection ends first it fails at once; after the timeout it fails, and ends all connections of its process.
"""

from __future__ import annotations

import contextlib
import socket as real_socket
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

from torch import Tensor

from tests.simulation import stores
from tests.simulation.network import Connection, Network, Pipe
from tests.simulation.stores import End, Fabric, PrefixStore, Waits, send, the
from troupe.services.learner.peers import group, survivors
from troupe.services.learner.peers import network as addresses


class Work:
    """A collective under way, begun by this rank; complete where the parts of some ranks have come."""

    def __init__(
        self, group: Gloo, number: int, needed: Collection[int], finish: Callable[[dict[int, Tensor]], None]
    ) -> None:
        self._group, self._number, self._finish = group, number, finish
        self._needed = set(needed)
        self._end_s = group.node.world.now + group.timeout_s

    def is_completed(self) -> bool:
        """Whether it is complete, or never will be."""
        missing = self._needed - self._group.parts(self._number).keys()
        return not missing or bool(self._group.gone & missing)

    def wait(self, timeout: timedelta | None = None) -> None:
        """Until it is complete. Raises RuntimeError where it is not within `timeout`, or never will be."""
        group, needed = self._group, self._needed
        parts = group.parts(self._number)
        left_s = max(self._end_s - group.node.world.now, 0.0)
        patience_s = left_s if timeout is None else timeout.total_seconds()
        if not group.waits.until(self.is_completed, min(left_s, patience_s)):
            if patience_s < left_s:
                raise RuntimeError("Operation timed out!")
            group.abort()
            raise RuntimeError("[/gloo] Timed out waiting for recv operation to complete")
        if not needed <= parts.keys():
            raise RuntimeError("[/gloo] Connection closed by peer")
        if len({kind for kind, _ in parts.values()}) > 1:
            the().wrong(f"learners are in different collectives: {parts}")
            raise RuntimeError("[/gloo] collectives differ")
        self._finish({rank: tensor for rank, (_, tensor) in parts.items()})
        group.forget(self._number)


class Options:
    """See `ProcessGroupGloo._Options`."""

    _timeout = timedelta(seconds=1800)
    _devices: Sequence[Any] = ()


class Gloo:
    """See `torch.distributed.ProcessGroupGloo`."""

    _Options = Options

    @staticmethod
    def create_device(*, hostname: str) -> str:
        return hostname

    def __init__(self, store: PrefixStore, rank: int, size: int, options: Options) -> None:
        self.node = the().world.here().node
        self.rank, self.size = rank, size
        self.timeout_s = options._timeout.total_seconds()
        self.key = f"{store.place} {store.path}"
        self.waits = Waits(self.node)
        self.gone: set[int] = set()  # ranks whose connections have ended
        self._pipes: dict[int, Pipe] = {}
        self._links: list[Pipe] = []  # those that the others know of too
        self._parts: dict[int, dict[int, tuple[str, Tensor]]] = {}
        self._begun = 0
        number = next(the().numbers)
        the().groups[number] = self
        self.node.at_exit.append(self.abort)
        try:
            self._connect(store, number)
        except RuntimeError:
            self.abort()
            raise
        finally:
            del the().groups[number]

    def _connect(self, store: PrefixStore, number: int) -> None:
        """A connection to each other rank: the higher of two makes it."""
        store.set(f"{self.rank}", str(number))
        for rank in range(self.rank):
            other = int(store.get(f"{rank}"))
            self._greet(rank, other)
        if not self.waits.until(lambda: len(self._pipes) == self.size - 1 or self.gone, self.timeout_s):
            raise RuntimeError("[/gloo] Gloo connectFullMesh failed with timeout")
        if self.gone:
            raise RuntimeError("[/gloo] Connection reset by peer")

    def _greet(self, rank: int, number: int) -> None:
        world, network = self.node.world, the().network
        end_s = world.now + self.timeout_s
        while True:
            other = the().groups.get(number)
            until_s = 0.0 if other is None else network.reaches(self.node, other.node)
            pause_s = max(until_s - world.now, 0.0) + the().round_trip(self.node)
            world.sleep(min(pause_s, max(end_s - world.now, 0.0)))
            if world.now >= end_s:
                raise RuntimeError("[/gloo] Connect timeout")
            if the().groups.get(number) is None:
                raise RuntimeError("[/gloo] Connection refused")
            if other is not None and until_s <= world.now:
                break
        mine = End(self.node, "gloo", self._come, lambda pipe: self._end(rank))
        theirs = End(other.node, "gloo", other._come, lambda pipe: other._end(self.rank))
        connection = Connection(network, mine, theirs)  # type: ignore[arg-type]
        self._links.append(connection.client)
        other._links.append(connection.server)
        self._pipes[rank] = connection.client
        send(connection.client, "greeting", "", self.rank, connection.server)

    def _come(self, pipe: Pipe, parts: list[Any]) -> None:
        _, kind, rank, what = parts
        if kind:
            number, tensor = what
            self._parts.setdefault(number, {})[rank] = kind, tensor
        else:
            self._pipes[rank] = what
        self.waits.tell()

    def _end(self, rank: int) -> None:
        self.gone.add(rank)
        self.waits.tell()

    def parts(self, number: int) -> dict[int, tuple[str, Tensor]]:
        """What has come for a collective, by rank, with what each took it for."""
        return self._parts.setdefault(number, {})

    def forget(self, number: int) -> None:
        """It is over here."""
        self._parts.pop(number, None)

    def _begin(
        self,
        what: str,
        tensor: Tensor,
        finish: Callable[[dict[int, Tensor]], None],
        *,
        root: int | None = None,
    ) -> Work:
        number, self._begun = self._begun, self._begun + 1
        kind = f"{what} {tuple(tensor.shape)} {tensor.dtype}"
        if root is None or root == self.rank:
            mine = tensor.clone()
            self.parts(number)[self.rank] = kind, mine
            for rank in sorted(self._pipes.keys() - self.gone):
                send(self._pipes[rank], f"{number} {kind}", kind, self.rank, (number, mine))
        return Work(self, number, range(self.size) if root is None else [root], finish)

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """The sum, in the order of ranks."""
        (tensor,) = tensors

        def finish(parts: dict[int, Tensor]) -> None:
            total = parts[0].clone()
            for rank in range(1, self.size):
                total += parts[rank]
            tensor.copy_(total)

        return self._begin("sum", tensor, finish)

    def allgather(self, found: list[list[Tensor]], tensors: list[Tensor]) -> Work:
        """Those of all."""
        (own,), (tensor,) = found, tensors

        def finish(parts: dict[int, Tensor]) -> None:
            for rank, place in enumerate(own):
                place.copy_(parts[rank])

        return self._begin("gather", tensor, finish)

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """That of `root`, which waits for nobody."""
        return self._begin("broadcast", tensor, lambda parts: tensor.copy_(parts[root]), root=root)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """How long what begins from now on may take."""
        self.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        """End all connections: the others notice."""
        self.gone |= set(range(self.size)) - {self.rank}
        for pipe in self._links:
            pipe.connection.end(pipe)
        self.waits.tell()


DIST = types.SimpleNamespace(TCPStore=stores.TCPStore, PrefixStore=PrefixStore, ProcessGroupGloo=Gloo)
SOCKET = types.SimpleNamespace(
    AF_INET=real_socket.AF_INET,
    AF_INET6=real_socket.AF_INET6,
    SOCK_STREAM=real_socket.SOCK_STREAM,
    socket=stores.Listener,
    create_connection=stores.create_connection,
)
PSUTIL = types.SimpleNamespace(net_if_addrs=stores.net_if_addrs)


@contextlib.contextmanager
def simulated_groups(network: Network) -> Iterator[Fabric]:
    """Put all of this in the place of torch's and Python's."""
    stores.fabric = Fabric(network)
    with contextlib.ExitStack() as changes:
        for module, name, value in (
            (group, "dist", DIST),
            (group, "socket", SOCKET),
            (survivors, "dist", DIST),
            (survivors, "socket", SOCKET),
            (addresses, "psutil", PSUTIL),
        ):
            changes.enter_context(mock.patch.object(module, name, value))
        try:
            yield stores.fabric
        finally:
            stores.fabric = None
