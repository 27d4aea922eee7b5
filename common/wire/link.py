"""A client's connection to one server: a socket, made anew when the server has been silent for too long."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from troupe.common import system
from troupe.common.errors import AuthError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire import sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import Buffer, Message, WireError, decode
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S

_log = logging.getLogger(__name__)

SILENT_S = 2.0
"""A server from which something is awaited counts as silent after this."""

RETRY_AUTH_S = 10.0
"""A client that tolerates refusals tries a refused key again after this."""

MESSAGES_PER_TURN = 256
"""Bounds the work of one poll, so that a flood of messages cannot starve the rest of the loop."""

# As plain numbers: operations on zmq's enumerations take longer than a look at a socket.
_IN, _IN_OR_OUT = int(zmq.POLLIN), int(zmq.POLLIN | zmq.POLLOUT)

# Of the sockets of this process: no two of them may have one identity.
_numbers = itertools.count(1)


def new_incarnation() -> int:
    """A random number to name a process by, positive and below 2^63."""
    # Below 2^63 for languages whose integers are signed, and odd so that it is never 0, which means none.
    return system.random.getrandbits(63) | 1


class Link:
    """One DEALER at a time, toward one server. All of it belongs to one thread.

    ZeroMQ's own reconnecting neither looks the host's name up again nor makes a restarted server known. So
    where something is awaited and nothing comes for `liveness_s`, a new socket is made, and given a little
    longer each time. A sign of life is a message that is whole and can be understood: neither the bytes of
    one that is on its way nor nonsense is any use to who waits.

    Attributes:
        endpoint: of the server.
        liveness_s: how much silence is borne.
        heard_s: monotonic time of the last sign of life, or of the present socket's making.
        connection: number of the present socket, from 1.
        silent: whether the server has not been heard for a while, though something is awaited of it.
        refusal: why keys are in the way, where the client tolerates that; or empty.
        bad_messages: how many could not be understood.
        backoff: how much longer than `liveness_s` the next socket is given.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        endpoint: str,
        server: str,
        *,
        name: str,
        incarnation: int,
        liveness_s: float,
        security: sockets.Security | None = None,
        retry_auth: bool = False,
        hwm: int = 1000,
    ) -> None:
        """Prepare; `connect` makes the first socket.

        Args:
            ctx: ZeroMQ context.
            endpoint: of the server.
            server: its role, `learner` or `replay`.
            name: of the client.
            incarnation: random number of the client's process.
            liveness_s: how much silence is borne.
            security: keys.
            retry_auth: where keys are in the way, note it and try again now and then, instead of AuthError.
            hwm: messages that may wait in the socket.
        """
        self.endpoint = endpoint
        self.liveness_s = liveness_s
        self.security = security.toward(server) if security else None
        self.heard_s = 0.0
        self.connection = 0
        self.silent = False
        self.refusal = ""
        self.bad_messages = 0
        self.backoff = sockets.Backoff()
        self._ctx = ctx
        self._server = server if server == "replay" else f"the {server}"
        self._name = name
        self._incarnation = incarnation
        self._retry_auth = retry_auth
        self._retry_s = 0.0
        self._hwm = hwm
        self._pause_s = 0.0
        self._awaited_s = 0.0
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
        self._wait_log = sockets.WaitLog()
        self._socket: sockets.Socket | None = None

    def __str__(self) -> str:
        """Say whom this connects to."""
        return f"{self._server} at {self.endpoint}"

    @property
    def socket(self) -> sockets.Socket:
        """The present socket."""
        assert self._socket is not None
        return self._socket

    def connect(self, endpoint: str = "") -> None:
        """Make a new socket, to `endpoint` if it has moved. Raises ConfigError for what is no address."""
        # No linger: what this socket still holds is sent again over the next one, and would then come twice.
        self.close(0)
        self.endpoint = endpoint or self.endpoint
        # New for every socket. A ROUTER tells peers apart by it, and could hand answers for the old
        # connection to the new one.
        identity = f"{self._name[:64]}-{self._incarnation:x}-{next(_numbers)}".encode()[-255:]
        self._watch = sockets.make_watch(self.endpoint, self.security)
        self._socket = sockets.make_dealer(
            self._ctx, self.endpoint, identity, self.security, hwm=self._hwm, watch=self._watch
        )
        self.connection += 1
        self.heard_s = system.monotonic()
        self.refusal = ""

    def close(self, linger_s: float) -> None:
        """Close the socket, if there is one; what was sent last still gets `linger_s` to leave."""
        if self._socket is not None:
            self._watch.close()
            self._socket.close(linger=int(linger_s * 1000))
            self._socket = None

    # -- messages --

    def send(self, body: Body, number: int = 0) -> bool:
        """Send a message with this request id if that is possible at once."""
        return sockets.send(self.socket, body.message(number))

    def send_frames(self, frames: list[Buffer]) -> bool:
        """The same, for an encoded message."""
        return sockets.send_frames(self.socket, frames)

    def wait(self, timeout_ms: float, *, writable: bool = False) -> bool:
        """Whether there is something to receive, after at most `timeout_ms`; `writable` ends the wait too."""
        return bool(self.socket.poll(int(timeout_ms), _IN_OR_OUT if writable else _IN) & _IN)

    def next(self) -> Message | None:
        """The next message, if one has come. Raises `WireError` for what cannot be understood."""
        frames = sockets.receive_frames(self.socket)
        if frames is None:
            return None
        # Decoded before it counts as a sign of life: garbage from something else on that port is none.
        message = decode(frames)
        self.heard_s = system.monotonic()
        self.silent = False
        self.refusal = ""
        return message

    def receive(self) -> Iterator[Message]:
        """The messages received, at most MESSAGES_PER_TURN; those that cannot be decoded are counted."""
        for _ in range(MESSAGES_PER_TURN):
            try:
                message = self.next()
            except WireError as error:
                self.bad(error)
                continue
            if message is None:
                return
            yield message

    def bad(self, error: WireError) -> None:
        """Count what could not be understood, and say so now and then."""
        self.bad_messages += 1
        if self._throttle(error.kind):
            count = self.bad_messages
            _log.warning("%s: bad message from %s: %s (%d so far)", self._name, self, error, count)

    # -- silence --

    @property
    def silent_s(self) -> float:
        """Seconds since the server was heard, counted while something is awaited of it."""
        return system.monotonic() - max(self.heard_s, self._awaited_s)

    def welcomed(self) -> None:
        """Note that the server serves us: the next silence is borne for `liveness_s` again."""
        self.backoff.reset()
        self._pause_s = 0.0
        self._wait_log = sockets.WaitLog()

    def lost(self, *, waiting: bool = True) -> bool:
        """Whether the present socket is of no use any more.

        To be called when everything that has come is received, for that is a sign of life however late it is
        read. Raises AuthError where keys are in the way.

        Args:
            waiting: something is awaited of the server; only then does silence mean anything.
        """
        self._check_keys()
        now_s = system.monotonic()
        # Silence is counted from when something is awaited. Otherwise an idle hour would end the connection
        # at the first question.
        if not waiting:
            self._awaited_s = now_s
        if self.refusal:
            # A socket that was refused does not try again by itself: libzmq gives up after a clear no.
            return now_s >= self._retry_s
        return waiting and self.silent_s > self.liveness_s + self._pause_s

    def maintain(self, *, waiting: bool) -> bool:
        """Make a new socket where `lost`; True where that was done, and all has to be sent again."""
        lost = self.lost(waiting=waiting)
        waiting |= bool(self.refusal)
        if lost:
            self.connect()
            # Longer each time, so that a server which is slow rather than gone is not buried under new
            # connections.
            self._pause_s = self.backoff.next_s()
        # A new connection is no sign of life.
        self.silent = waiting and (self.silent or lost or self.silent_s > SILENT_S or bool(self.refusal))
        if self.silent and self._wait_log.due():
            # The waiting side says so, and why: this is the same event.
            _log.debug("%s waits for %s, %.0f s so far", self._name, self, self._wait_log.waited_s)
        return lost

    def _check_keys(self) -> None:
        """Raise `AuthError` where keys are in the way; or note it, if this client tolerates that."""
        try:
            # A client that tolerates this may have other servers to talk to: this one may delay it only once.
            self._watch.check(probe=not self._retry_auth or self.connection == 1)
        except AuthError as error:
            if not self._retry_auth:
                raise
            if not self.refusal:
                self.refusal, self._retry_s = str(error), system.monotonic() + RETRY_AUTH_S
            if self._throttle("keys"):
                _log.warning("%s continues without %s: %s", self._name, self, error)


@dataclass
class Question:
    """A message that is sent until it is answered: its number has the server take it once.

    Attributes:
        message: with a request id.
        again_s: after this, it is sent again over the same connection as well.
        asked_s: monotonic time at which it was first asked.
    """

    message: Message
    again_s: float = math.inf
    asked_s: float = field(default_factory=lambda: system.monotonic())
    _connection: int = 0
    _sent_s: float = 0.0

    def send(self, link: Link) -> bool:
        """Send it if that is due; False where it is due and cannot be sent now."""
        now_s = system.monotonic()
        # With a new connection it is always sent: what went over the old one may have been lost with it.
        if self._connection == link.connection and now_s - self._sent_s <= self.again_s:
            return True
        if not sockets.send(link.socket, self.message):
            return False
        self._connection, self._sent_s = link.connection, now_s
        return True

    def repeat(self) -> None:
        """Have it sent again: what was sent went to another process."""
        self._connection = 0
