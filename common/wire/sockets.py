"""Sockets with every option set before they bind or connect, and sending and receiving without copies.

The defaults of libzmq suit a chat: unlimited messages, an infinite wait at close, silent drops. Each function
here replaces them by what a training run needs, so that no service sets an option itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import zmq

from troupe.common import system
from troupe.common.errors import ConfigError
from troupe.common.machine import is_loopback
from troupe.common.polling import readable
from troupe.common.wire.codec import DEFAULT, Buffer, Limits, Message, decode, encode
from troupe.common.wire.security import zap
from troupe.common.wire.security.handshakes import HandshakeWatch
from troupe.common.wire.security.keys import Keys

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

LINGER_MS = 2000
"""How long a closing socket may keep trying to send what is queued. Never -1: that is a hang at exit."""

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted: all members may come at once, after a restart. A
larger `net.core.somaxconn` than this changes nothing, a smaller one bounds it."""


@dataclass(frozen=True, slots=True)
class Security:
    """How a service's sockets are protected. Without keys, servers bind loopback and ipc addresses only.

    Attributes:
        insecure: allow any address without keys (a private network that the user vouches for).
        keys: with them every TCP socket uses CURVE, on loopback too. ipc and inproc never do: there the file
            system, or the process, is the border.
        server: role of the server that a client connects to, `learner` or `replay`.
    """

    insecure: bool = False
    keys: Keys | None = None
    server: str = ""

    def toward(self, server: str) -> Security:
        """The same, for a connection to a server of this role."""
        return replace(self, server=server)


def make_router(
    ctx: Context,
    endpoint: str,
    security: Security | None = None,
    *,
    max_message_bytes: int = 1 << 30,
    hwm: int = 1000,
) -> Socket:
    """Bind a ROUTER that reports unreachable peers instead of dropping their messages in silence."""
    socket = ctx.socket(zmq.ROUTER)
    _set_common(socket, max_message_bytes, hwm)
    # No connection may have to wait until it is read: where one is reset meanwhile, the PING that comes next,
    # from either side, fails an assertion of libzmq 4.3.5 (`!_io_error`), and so ends the process. What a
    # connection may keep here is bounded in bytes instead, by `Intake`.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # A peer that reconnects after a half-open connection must not be locked out by its own old identity.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    return _bind(ctx, socket, endpoint, security)


def make_dealer(
    ctx: Context,
    endpoint: str,
    identity: bytes | None = None,
    security: Security | None = None,
    *,
    max_message_bytes: int = 1 << 30,
    hwm: int = 1000,
    watch: HandshakeWatch | None = None,
) -> Socket:
    """Connect a DEALER on which nothing queues for a peer that is not there (a send would block instead).

    `identity` (1 to 255 bytes, not starting with a zero) must be new for every socket: use the peer's name,
    its incarnation, and a count of its sockets. None lets the server choose. `watch` (see `make_watch`) tells
    whether the server turns us away; close it before the socket.
    """
    socket = ctx.socket(zmq.DEALER)
    _set_common(socket, max_message_bytes, hwm)
    if identity is not None:
        # Chosen by us, so that logs name the peer, and a ROUTER's counts by peer mean something.
        socket.setsockopt(zmq.IDENTITY, identity)
    # Without it libzmq queues messages for a connection that may never come; with it a send fails at once,
    # and the caller decides what is still worth sending.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    if watch is not None:
        watch.attach(socket)
    return _connect(socket, endpoint, security)


def make_watch(endpoint: str, security: Security | None = None) -> HandshakeWatch:
    """A watch over the handshakes of one client socket, which says why keys are in its way."""
    keys = security.keys if security else None
    if security is None or keys is None or not endpoint.startswith("tcp://"):
        return HandshakeWatch(endpoint)
    return HandshakeWatch(endpoint, keys.public, str(keys.directory / f"{security.server}.public"))


def make_pub(ctx: Context, endpoint: str, security: Security | None = None) -> Socket:
    """Bind a PUB. It may lose any message for a slow subscriber: repeat what must not be lost."""
    socket = ctx.socket(zmq.PUB)
    # What comes in are handshakes and subscriptions, which take fifty times their bytes.
    _set_common(socket, 1 << 12, 100)
    socket.setsockopt(zmq.LINGER, 200)  # what it says is said again elsewhere
    return _bind(ctx, socket, endpoint, security)


def make_sub(ctx: Context, endpoint: str, security: Security | None = None) -> Socket:
    """Connect a SUB that keeps the newest message only (CONFLATE): every message must be a single frame.

    Polling takes a message out of the queue, so that one older message may precede the newest.
    """
    socket = ctx.socket(zmq.SUB)
    _set_common(socket, 1 << 20, 100)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CONFLATE, 1)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    return _connect(socket, endpoint, security)


def bound_endpoint(socket: Socket) -> str:
    """The address a socket is bound to, with the port that a wildcard (`tcp://127.0.0.1:*`) became."""
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]


def reachable_endpoint(advertised: str, via: str) -> str:
    """Put the host of `via`, an address that works, in place of a wildcard host in `advertised`."""
    if not advertised.startswith("tcp://") or not via.startswith("tcp://"):
        return advertised
    host, _, port = advertised[6:].rpartition(":")
    if host in ("0.0.0.0", "*", "[::]", "::"):
        return f"tcp://{via[6:].rpartition(':')[0]}:{port}"
    return advertised


def send(socket: Socket, message: Message, to: bytes | None = None) -> bool:
    """Send without copying or waiting; False where the peer is absent or its queue is full."""
    return send_frames(socket, encode(message), to)


def send_frames(socket: Socket, frames: Sequence[Buffer], to: bytes | None = None) -> bool:
    """Send encoded frames, to the peer `to` where the socket is a ROUTER; False as for `send`."""
    parts: list[Buffer] = [to, *frames] if to is not None else list(frames)
    try:
        # NOBLOCK, always: a full queue is a slow peer, and one slow peer must not stop a loop that serves
        # all.
        socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        # ROUTER_MANDATORY reports it, where the default would drop the message without a word.
        if error.errno == errno.EHOSTUNREACH:
            return False
        raise
    return True


def send_tracked(socket: Socket, message: Message, to: bytes) -> zmq.MessageTracker | None:
    """Send to the peer `to` of a ROUTER, as `send` does; returns what tells whether ZeroMQ still holds it."""
    try:
        return socket.send_multipart([to, *encode(message)], zmq.NOBLOCK, copy=False, track=True)
    except zmq.Again:
        return None
    except zmq.ZMQError as error:
        if error.errno == errno.EHOSTUNREACH:
            return None
        raise


def receive_frames(socket: Socket) -> list[zmq.Frame] | None:
    """Receive one message's frames without copying; None where none is waiting."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


class PeerKey(NamedTuple):
    """The role of the key that a peer has shown, and the key (Z85); both empty on a socket without keys."""

    role: str = ""
    public: str = ""


NO_KEY = PeerKey()


def peer_key(frame: zmq.Frame) -> PeerKey:
    """The key that the sender of this frame has shown."""
    try:
        role, _, public = str(frame.get("User-Id")).partition(" ")
    except zmq.ZMQError:
        return NO_KEY
    return PeerKey(role, public)


def receive(socket: Socket, limits: Limits = DEFAULT) -> Message | None:
    """Receive and decode one message on a DEALER or SUB; None where none is waiting. Raises `WireError`."""
    frames = receive_frames(socket)
    return None if frames is None else decode(frames, limits=limits)


class Backoff:
    """Pauses that double from `first_s` to `last_s`, each with a quarter of jitter, until `reset`."""

    def __init__(self, first_s: float = 0.1, last_s: float = 5.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The next pause, in seconds."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._last_s)
        # Jitter keeps a hundred actors from knocking on a restarted learner's door at one instant.
        return pause_s * system.random.uniform(0.75, 1.25)

    def reset(self) -> None:
        """Start again from the first pause, after a success."""
        self._next_s = self._first_s


class WaitLog:
    """Says who waits for whom, and since when: not in the first moment, then every `period_s`."""

    def __init__(self, period_s: float = 10.0, first_s: float = 2.0) -> None:
        self._period_s = period_s
        self._start_s = system.monotonic()
        self._due_s = self._start_s + min(first_s, period_s)

    @property
    def waited_s(self) -> float:
        """Seconds since this wait began."""
        return system.monotonic() - self._start_s

    def due(self) -> bool:
        """Whether it is time for another line."""
        now_s = system.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._period_s
        return True


class Waker:
    """Wakes a thread that polls sockets, from any other thread. Poll `fd` for reading, then `clear`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        # Both ends: a writer must not wait for a thread that is not reading, as at its end.
        os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        """Make `fd` readable. Harmless after `close`, and any number of times."""
        # Errors: the pipe is full, so the thread is awake already; or it is closed.
        with self._lock, contextlib.suppress(OSError):
            os.write(self._write_fd, b"!")

    def clear(self) -> None:
        """Forget the wake-ups so far."""
        with contextlib.suppress(OSError):
            while os.read(self.fd, 4096):
                pass

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken, for at most `timeout_s`."""
        readable(self.fd, timeout_s)
        self.clear()

    def close(self) -> None:
        """Close both ends of the pipe."""
        with self._lock:  # a number that is closed under a writer may already be somebody else's file
            for fd in (self.fd, self._write_fd):
                with contextlib.suppress(OSError):
                    os.close(fd)
            self.fd = self._write_fd = -1


def _set_common(socket: Socket, max_message_bytes: int, hwm: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)  # of each frame
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    # The kernel notices a peer that is gone without a word. So would ZeroMQ's own heartbeats
    # (`ZMQ_HEARTBEAT_IVL`), but they end the process where a peer is reset of which nothing is read:
    # see `make_router`.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.TCP_MAXRT, 60_000)  # the same for what was sent and is not acknowledged


def _check_endpoint(endpoint: str) -> None:
    """Be strict where libzmq is not: it takes port 99999 for 34463."""
    if endpoint.startswith(("ipc://", "inproc://")) and not endpoint.endswith("://"):
        return
    match = re.fullmatch(r"tcp://([^/:\s]+|\[[0-9a-fA-F:.]+\]):(\d{1,5}|\*)", endpoint)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(
            f"{endpoint!r} is not an address: use tcp://HOST:PORT with a port up to 65535, or ipc://PATH"
        )


def _bind(ctx: Context, socket: Socket, endpoint: str, security: Security | None) -> Socket:
    keys = security.keys if security and endpoint.startswith("tcp://") else None
    try:
        _check_endpoint(endpoint)
        if keys is not None:
            zap.protect(ctx, socket, keys)
        elif not _is_local(endpoint) and not (security and security.insecure):
            raise ConfigError(
                f"will not bind {endpoint} without keys: --keys DIR (`troupe keys new DIR` makes them), "
                "a loopback address, or --insecure"
            )
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.bind(endpoint)
        if keys is not None:
            zap.prove(ctx, socket, keys)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        hint = (
            "another process has it; stop that one or choose another port"
            if error.errno == errno.EADDRINUSE
            else ""
        )
        raise ConfigError(f"cannot bind {endpoint}: {hint or os.strerror(error.errno or 0)}") from error
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _connect(socket: Socket, endpoint: str, security: Security | None) -> Socket:
    try:
        _check_endpoint(endpoint)
        if security and security.keys is not None and endpoint.startswith("tcp://"):
            keys = security.keys
            zap.apply_pair(socket, keys.public, keys.secret, keys.servers[security.server])
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ConfigError(f"cannot connect to {endpoint}: {os.strerror(error.errno or 0)}") from error
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _is_local(endpoint: str) -> bool:
    if endpoint.startswith(("ipc://", "inproc://")):
        return True
    return is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0])
