"""How much of what a peer sends this process keeps for it before there is a message to serve.

libzmq bounds a frame (`ZMQ_MAXMSGSIZE`), but not the frames of a message that never ends: those pile up until
memory is gone. Nor may it bound the whole messages that wait (`ZMQ_RCVHWM`; see `make_router`). What it
keeps of a connection can be worked out from outside: what TCP has received on it, less what is in the kernel
still, less what the socket gave.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import math
import os
import socket as tcp
import termios
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

import zmq

from troupe.common import system
from troupe.common.runtime import open_files
from troupe.common.runtime.logging import Throttle

Socket: TypeAlias = "zmq.Socket[bytes]"

_log = logging.getLogger(__name__)

PERIOD_S = 0.1
"""How often it is asked whether memory has grown. Where it has, connections are looked at; less often where
that would take more than a twentieth of the time."""

QUIET_PERIOD_S, MAX_QUIET_PERIOD_S = 2.0, 10.0
"""How often they are looked at where it has not: what is kept of them is in memory. A look takes five
microseconds for each, and a learner has two of every member: less often where that would take more than a
thousandth of the time, within these limits."""

NOTICED_BYTES = 1 << 22
"""Growth that makes it look."""

BEHIND = 4
"""Factor by which more may be kept while whole messages wait: then the receiver is behind."""

NEARLY = 0.9
"""Share of the files which a process may have open, above which the log says that others will not get in."""

CUT = "connection_cut"
"""The kind by which connections that were cut are counted."""

SMALL_BYTES = 1 << 24
AMPLIFICATION = 3
GROWTH_BYTES = 1 << 29
"""Frames of no bytes arrive as 2 and take 64. So where more than `SMALL_BYTES` is kept, and the process has
grown by more than `AMPLIFICATION` times as much and `GROWTH_BYTES`, the peer that holds the most is cut."""

# What ZMTP adds to a frame at most: 9, and 33 for CURVE. Where it is less, the peer has the advantage.
_FRAME_BYTES = 42

_SLACK_BYTES = 1 << 18  # headers, and what ZMTP adds to 64 frames
_UNREAD_BYTES = 1 << 12
_LOG_PERIOD_S = 60.0
_SO_COOKIE = 57
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = slice(128, 136)  # tcpi_bytes_received, since Linux 4.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _Connection:
    """A TCP connection, or another socket of this process, which is not `watched`.

    `cookie` is the kernel's, and never used again, as the number of a file descriptor is.
    """

    cookie: bytes
    watched: bool
    given: int = 0
    kept: int = 0
    cut: bool = False


class Intake:
    """Receives from a bound socket, and cuts connections by which too much is kept. For one thread.

    Only TCP can be measured. Behind `ipc` the file system is the border.

    What is kept includes heartbeats, a few bytes a second, so that after months without another message a
    connection may be cut for nothing: ZeroMQ makes a new one, and clients that wait for an answer ask again.
    """

    def __init__(self, socket: Socket, message_bytes: int, of_all: int = 2) -> None:
        """Watch the connections of `socket`, whose messages have at most `message_bytes`.

        All of them together may be kept `of_all` times what one may.
        """
        self._socket = socket
        self._limit = message_bytes + _SLACK_BYTES
        self._of_all = of_all
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
        self._port = urlsplit(endpoint).port if endpoint.startswith("tcp://") else None
        self._given: Counter[int] = Counter()  # bytes by file descriptor since the last look
        self._connections: dict[int, _Connection] = {}
        self._due_s = self._due_anyway_s = 0.0
        self._memory = self._least = _anonymous_memory()
        self._throttle = Throttle(_LOG_PERIOD_S)

    @property
    def period_ms(self) -> float:
        """Wait no longer than this before `look` is called again."""
        return PERIOD_S * 1000 if self._port else math.inf

    def receive(self) -> list[zmq.Frame] | None:
        """Receive one message's frames without copying; None where none is waiting."""
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        if self._port:
            # What the sender's kernel counted includes ZMTP's headers, so they are added here as well.
            size = sum(map(len, frames[1:])) + _FRAME_BYTES * (len(frames) - 1)
            with contextlib.suppress(
                zmq.ZMQError
            ):  # ZMTP before 3.0 does not know, and is not served for ever
                self._given[int(frames[0].get(zmq.SRCFD))] += size
        return frames

    def look(self, counts: Counter[str]) -> None:
        """Cut what has to be cut, if it is time to look, and count it as `CUT`."""
        began_s = system.monotonic()
        if not self._port or began_s < self._due_s:
            return
        try:
            if not self._may_keep_more(began_s):
                self._due_s = began_s + PERIOD_S
                return
            self._measure()
        except OSError:  # not even to look is there a file left
            self._tell_if_few_are_left(open_files.limit())
            self._due_s = began_s + PERIOD_S
            return
        watched = [(fd, each) for fd, each in self._connections.items() if each.watched and not each.cut]
        # Largest last: that one is cut first, so that a peer who sends little is never cut for one who sends
        # much.
        watched.sort(key=lambda entry: entry[1].kept)
        # Asked after measuring: what was whole by then has been taken where none waits now.
        behind = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        limit = BEHIND * self._limit if behind else self._limit
        total = sum(each.kept for _, each in watched)
        while watched and (why := self._too_much(watched[-1][1].kept, total, limit)):
            fd, largest = watched.pop()
            total -= largest.kept
            counts[CUT] += self._cut(fd, largest, why)
        now_s = system.monotonic()
        self._due_s = now_s + max(PERIOD_S, 20 * (now_s - began_s))
        quiet_s = max(QUIET_PERIOD_S, 1000 * (now_s - began_s))
        self._due_anyway_s = now_s + min(quiet_s, MAX_QUIET_PERIOD_S)

    def _may_keep_more(self, now_s: float) -> bool:
        """Whether memory has grown since the last look, or that was long ago."""
        memory = _anonymous_memory()
        self._least = min(self._least, memory)
        if memory < self._least + NOTICED_BYTES and now_s < self._due_anyway_s:
            return False
        self._least = memory
        return True

    def _too_much(self, largest: int, total: int, limit: int) -> str:
        """Why the connection has to be cut by which most is kept; empty where none has to."""
        if largest > limit:
            return f"the limit for one connection is {limit / 1e6:.1f} MB"
        if total > self._of_all * limit:
            return (
                f"all connections have {total / 1e6:.1f} MB, with a limit of "
                f"{self._of_all * limit / 1e6:.1f} MB"
            )
        growth = self._amplified(total)
        return f"such small frames take {growth / 1e6:.1f} MB of memory" if growth else ""

    def _amplified(self, total: int) -> int:
        """By how much memory has grown, if by much more than the bytes that are kept; then begins anew."""
        memory = _anonymous_memory()
        growth = memory - self._memory
        if total < SMALL_BYTES:
            self._memory = memory
        elif growth > AMPLIFICATION * total + GROWTH_BYTES:
            self._memory = memory
            return growth
        return 0

    def _measure(self) -> None:
        """Bring up to date what is kept of every connection."""
        connections = {}
        # libzmq does not tell which descriptors are its connections; the local port does.
        names = os.listdir("/proc/self/fd")
        self._tell_if_few_are_left(len(names))
        for name in names:
            fd = int(name)
            with contextlib.suppress(OSError):  # no socket, or closed since
                connections[fd] = self._measured(fd)
        self._connections = connections
        self._given.clear()

    def _tell_if_few_are_left(self, open_now: int) -> None:
        """Say so before a connection can no longer be accepted, of which nobody else would tell."""
        most = open_files.limit()
        if open_now > NEARLY * most and self._throttle("files"):
            line = "%d of at most %d files of this process are open, and each member needs some: %s"
            _log.warning(line, open_now, most, open_files.advice(4 * most))

    def _measured(self, fd: int) -> _Connection:
        known = self._connections.get(fd)
        with _borrowed(fd) as each:
            cookie = each.getsockopt(tcp.SOL_SOCKET, _SO_COOKIE, 8)
            if known is None or known.cookie != cookie:
                # Younger than the last look, so that all it can have given was counted since.
                known = _Connection(cookie, _local_port(fd) == self._port)
            if known.watched:
                info = each.getsockopt(tcp.IPPROTO_TCP, tcp.TCP_INFO, _TCP_INFO_BYTES)
                received = int.from_bytes(info[_BYTES_RECEIVED], "little")
                # Never more than there was: else what an earlier connection with this number had waiting, or
                # frames that are smaller than they are counted, could be saved up.
                known.given = min(known.given + self._given[fd], received)
                known.kept = received - known.given
                if known.kept > _UNREAD_BYTES:  # it may be in the kernel, which bounds that itself
                    unread = array.array("i", [0])
                    fcntl.ioctl(fd, termios.FIONREAD, unread)
                    known.kept -= unread[0]
        return known

    def _cut(self, fd: int, connection: _Connection, why: str) -> bool:
        """Shut the connection down; libzmq notices, and frees what it has kept."""
        connection.cut = True
        with contextlib.suppress(OSError), tcp.socket(fileno=os.dup(fd)) as own:
            if own.getsockopt(tcp.SOL_SOCKET, _SO_COOKIE, 8) != connection.cookie:
                return False
            host = own.getpeername()[0]
            own.shutdown(tcp.SHUT_RDWR)
            if self._throttle(host):
                _log.warning(
                    "cut a connection from %s: %.1f MB of it were incomplete or waiting, and %s",
                    host,
                    connection.kept / 1e6,
                    why,
                )
            return True
        return False


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[tcp.socket]:
    """The socket of a descriptor that is libzmq's, to look at, not to close."""
    borrowed = tcp.socket(tcp.AF_INET, tcp.SOCK_STREAM, 0, fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _local_port(fd: int) -> int | None:
    with tcp.socket(fileno=os.dup(fd)) as own:
        return own.getsockname()[1] if own.family in (tcp.AF_INET, tcp.AF_INET6) else None


def _anonymous_memory() -> int:
    """Bytes of this process's memory that belong to no file."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * _PAGE_BYTES
