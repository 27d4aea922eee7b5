"""The learners of one epoch as they reach each other: a process group of torch, over TCP."""

from __future__ import annotations

import contextlib
import queue
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from troupe.common import system
from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime import lingering

T = TypeVar("T")

LOOK_S = 1.0
"""How often whoever waits for the others looks whether they have gone on without it."""


class GroupLostError(TroupeError):
    """A learner of the epoch has died, hangs or has left: what was being reduced is lost."""


class Meeting:
    """The store at which the learners of an epoch find each other, at an address of this machine.

    Attributes:
        port: of the address, chosen by the system.
    """

    def __init__(self, address: str) -> None:
        """Listen at `address`, an IP address; raises ConfigError where that cannot be."""
        # A socket of our own: the store would otherwise listen at every address of the machine.
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((address, 0))
            listener.listen(256)
        except OSError as error:
            listener.close()
            raise ConfigError(f"learners cannot meet at {address}: {error.strerror}") from None
        self.port: int = listener.getsockname()[1]
        self.store = dist.TCPStore(
            address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )


def joined_store(host: str, port: int, timeout_s: float) -> dist.Store:
    """The store of a `Meeting` elsewhere. Raises RuntimeError where none answers within `timeout_s`."""
    patience = timedelta(seconds=timeout_s)
    return within(
        timeout_s,
        lambda: dist.TCPStore(host, port, is_master=False, timeout=patience, wait_for_workers=False),
    )


def within(timeout_s: float, ask: Callable[[], T]) -> T:
    """What a store answers. Raises RuntimeError where it does not within `timeout_s`, or answers nonsense.

    Torch has no timeout of its own for a store that accepts a connection and is silent, as that of a process
    that is stopped: only for keys that are missing. The thread that waits is left to its connection's end.
    """
    answers: system.Queue[tuple[T | None, Exception | None]] = system.Queue()

    def wait() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    lingering.start(wait, "store")
    try:
        answer, error = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise RuntimeError(f"no answer within {timeout_s:.0f} s") from None
    if isinstance(error, RuntimeError):
        raise error
    if error is not None:  # such as MemoryError, for an answer of many gigabytes
        raise RuntimeError(f"an unusable answer: {type(error).__name__}: {first_line(error)}") from error
    return answer  # type: ignore[return-value]  # there is one where there is no error


def absent(store: dist.Store, epoch: int, size: int) -> list[int]:
    """Ranks that have not come to `store` for the group of `epoch`."""
    met = dist.PrefixStore(f"epoch-{epoch}", store)
    return [rank for rank in range(size) if not met.check([f"here-{rank}"])]


class ProcessGroup:
    """A `troupe.common.agents.learners.reduction.Group` by gloo. Tensors of a GPU go through host memory.

    It is of no use after the first error. Whoever waits for a learner whose group has been closed, or whose
    process has ended, fails at once, since the connection does.
    """

    def __init__(
        self,
        store: dist.Store,
        epoch: int,
        rank: int,
        size: int,
        address: str,
        timeout_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to all others, which do the same. Raises GroupLostError after `timeout_s`.

        Args:
            store: where they meet; each epoch has keys of its own there.
            epoch: number that no other group of this store has.
            rank: of this learner, from 0.
            size: how many they are.
            address: of this machine, at which the others connect.
            timeout_s: how long anything may take.
            over: whether another is known to have left the epoch; asked where one waits for the others.
        """
        self.rank, self.size = rank, size
        self._over = over
        # The classes behind `init_process_group`: that one keeps the only group of a process, and takes the
        # address from the host's name, which may lead to a public network.
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs know neither its options nor its methods
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [gloo.create_device(hostname=address)]
            met = dist.PrefixStore(f"epoch-{epoch}", store)

            def meet() -> Any:
                met.set_timeout(timedelta(seconds=timeout_s))
                met.set(f"here-{rank}", "")
                return gloo(met, rank, size, options)

            # It asks for the address of each, and then connects to all.
            self._group: Any = within((size + 1) * timeout_s, meet)
        except RuntimeError as error:
            raise GroupLostError(
                f"the learners of epoch {epoch} could not connect: {first_line(error)}"
            ) from None

    def sum(self, tensor: Tensor) -> None:
        """See `Group`."""
        self.sum_later(tensor)()

    def sum_later(self, tensor: Tensor) -> Callable[[], None]:
        """See `Group`."""
        host = tensor.cpu()
        with _lost():
            work = self._group.allreduce([host])

        def wait() -> None:
            self._wait(work)
            if host is not tensor:
                tensor.copy_(host)

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        host = tensor.cpu()
        found = [torch.empty_like(host) for _ in range(self.size)]
        with _lost():
            work = self._group.allgather([found], [host])
        self._wait(work)
        return [each.to(tensor.device) for each in found]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Put the tensor of rank `root` in the place of `tensor`, which is on the CPU."""
        with _lost():
            work = self._group.broadcast(tensor, root)
        self._wait(work)

    def _wait(self, work: Any) -> None:
        """Until all have done their part. Raises GroupLostError where one is lost, or has left.

        gloo notices on its own in most cases. It forgets what it was about to send to one that closed the
        connection just then: whoever waits for that waits for as long as anything may take.
        """
        while not work.is_completed():
            with contextlib.suppress(RuntimeError):  # a look is due, or the wait below says what went wrong
                work.wait(timedelta(seconds=LOOK_S))
                return
            if not work.is_completed() and self._over():
                raise GroupLostError("a learner is lost: another has left the epoch")
        with _lost():
            work.wait()

    def wait_at_most(self, timeout_s: float) -> None:
        """Say how long anything may take from now on."""
        self._group._set_default_timeout(timedelta(seconds=timeout_s))

    def close(self) -> None:
        """Disconnect: the others notice. May be called twice, and while another thread waits."""
        held = [self._group]
        self._group = None
        if held[0] is not None:
            with contextlib.suppress(RuntimeError):
                held[0].abort()
            # Its memory is given back once its own threads have ended: within 10 to 40 ms, but one that waits
            # in vain does so for as long as anything may take. Not on a daemon thread: a process that ends
            # meanwhile would be aborted.
            lingering.start(held.clear, "group", daemon=False)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupLostError(f"a learner is lost: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What gloo says, without where in its code, and its advice."""
    line = (str(error).splitlines() or [""])[0].partition(". This is typically")[0]
    return (line.partition("] ")[2] if line.startswith("[/") else line)[:200]
