"""`threading` and `queue` as `troupe.common.system` has them, for greenlets of a `World`."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.simulation.world import Task, World

world: World | None = None
"""The one that runs now."""


def the() -> World:
    assert world is not None
    return world


class Thread:
    def __init__(
        self, *, target: Callable[..., Any], args: tuple = (), name: str = "thread", daemon: bool = False
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._call = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = the().here().node.start(self._call, self.name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        assert task is not None
        if not task.done:
            me = the().here()
            task.joiners.append(me)
            me.wait(timeout)


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            task = the().here()
            self._waiting.append(task)
            task.wait(timeout)
        return self._set


class Condition:
    """With its lock, which its holder may take again. Where it is taken, others may go first."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._depth = 0
        self._entering: deque[Task] = deque()
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        the().preempt(0.005)
        self._take()
        return True

    def __exit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            if self._entering:
                self._entering.popleft().wake()

    def _take(self) -> None:
        me = the().here()
        while self._owner is not None and self._owner is not me:
            self._entering.append(me)
            me.wait(None)
        self._owner = me
        self._depth += 1

    def wait(self, timeout: float | None = None) -> bool:
        me, depth = the().here(), self._depth
        assert self._owner is me
        self._waiting.append(me)
        self._owner, self._depth = None, 0
        if self._entering:
            self._entering.popleft().wake()
        woken = me.wait(timeout)
        if me in self._waiting:
            self._waiting.remove(me)
        self._take()
        self._depth = depth
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else the().now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - the().now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()


class Queue:
    def __class_getitem__(cls, _: Any) -> type[Queue]:
        return cls

    def __init__(self, maxsize: int = 0) -> None:
        self._most = maxsize
        self._items: deque[Any] = deque()
        self._waiting: list[Task] = []

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def full(self) -> bool:
        return 0 < self._most <= len(self._items)

    def put(self, item: Any, timeout: float | None = None) -> None:
        if self.full():
            raise queue.Full
        self._items.append(item)
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.wake()

    put_nowait = put

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        me = the().here()
        end = None if timeout is None else the().now + timeout
        while not self._items:
            left = None if end is None else end - the().now
            if not block or (left is not None and left <= 0):
                raise queue.Empty
            self._waiting.append(me)
            me.wait(left)
        return self._items.popleft()


class Readable:
    """Stands for a file descriptor that a poller watches."""

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Task] = []
        self.waiting_for_room = self.waiting

    def ready(self, flags: int) -> int:
        """As a socket's: `zmq.POLLIN`, or nothing."""
        return flags & 1 if self.is_set else 0

    def set(self) -> None:
        self.is_set = True
        for task in self.waiting:
            task.wake()


class Eventfds:
    """The part of `os` that is about file descriptors which a process wakes itself by."""

    EFD_NONBLOCK = EFD_CLOEXEC = 0

    @staticmethod
    def eventfd(initial: int, flags: int) -> Readable:
        return Readable()

    @staticmethod
    def eventfd_read(fd: Readable) -> None:
        if not fd.is_set:
            raise BlockingIOError
        fd.is_set = False

    @staticmethod
    def eventfd_write(fd: Readable, value: int) -> None:
        fd.set()

    @staticmethod
    def close(fd: Readable) -> None:
        pass


class Waker:
    """See `troupe.common.wire.sockets.Waker`."""

    def __init__(self) -> None:
        self.fd = Readable()

    def wake(self) -> None:
        self.fd.set()

    def clear(self) -> None:
        self.fd.is_set = False

    def wait(self, timeout_s: float) -> None:
        if not self.fd.is_set:
            me = the().here()
            self.fd.waiting.append(me)
            me.wait(max(timeout_s, 0.0))
            self.fd.waiting.remove(me)
        self.clear()

    def close(self) -> None:
        pass


class StopSignal:
    """See `troupe.common.runtime.lifecycle.StopSignal`."""

    def __init__(self) -> None:
        self._readable = Readable()

    def set(self) -> None:
        self._readable.set()

    @property
    def requested(self) -> bool:
        return self._readable.is_set

    def __bool__(self) -> bool:
        return self.requested

    def fileno(self) -> Readable:
        return self._readable

    def wait(self, timeout_s: float) -> bool:
        if not self.requested:
            me = the().here()
            self._readable.waiting.append(me)
            me.wait(timeout_s)
            self._readable.waiting.remove(me)
        return self.requested
