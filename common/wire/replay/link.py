"""The connection of a replay client: a socket, made anew when the server has been silent for too long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import zmq

from common.errors import AuthError
from common.runtime.logging import Throttle
from common.wire import messages, sockets
from common.wire.body import Body
from common.wire.codec import Buffer

_log = logging.getLogger(__name__)

PING_S = 0.5
SILENT_S = 2.0
"""A server from which something is awaited counts as silent after this."""

RETRY_AUTH_S = 10.0
"""A client that outlasts a wrong key tries again after this."""


class ReplayLink:
    """Sends and receives, asks for signs of life, and reconnects.

    Attributes:
        socket: the present one.
        pings: questions for the credit that were sent, numbered from 1 over all sockets.
        silent: whether the server has not been heard for a while, though something is awaited of it.
        refusal: why keys are in the way, where the client outlasts that; or empty.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        endpoint: str,
        *,
        name: str,
        incarnation: int,
        liveness_s: float,
        security: sockets.Security | None,
        retry_auth: bool = False,
    ) -> None:
        """Prepare a connection; see `ReplayClient` for what the arguments mean."""
        self.pings = 0
        self.silent = False
        self.refusal = ""
        self._retry_auth = retry_auth
        self._retry_s = 0.0
        self._throttle = Throttle(60.0)
        self._endpoint = endpoint
        self._ctx = ctx
        self._name = name
        self._incarnation = incarnation
        self._liveness_s = self._patience_s = liveness_s
        self._security = security
        self._sockets_made = 0
        self._backoff = sockets.Backoff(0.2, 5.0)
        self._wait_log = sockets.WaitLog()
        self.socket = self._connect()

    @property
    def silent_s(self) -> float:
        """Seconds since the server was heard, counted while something is awaited of it."""
        return time.monotonic() - self._heard_s

    def send(self, body: Body, number: int) -> bool:
        """Send a message with this request id if that is possible at once."""
        return sockets.send(self.socket, body.message(number))

    def send_frames(self, frames: list[Buffer]) -> bool:
        """The same, for an encoded message."""
        return sockets.send_frames(self.socket, frames)

    def wait(self, timeout_ms: float) -> bool:
        """Whether there is something to receive, after at most ``timeout_ms``."""
        return bool(self.socket.poll(int(timeout_ms)))

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """The frames of every message that has come."""
        while (frames := sockets.receive_frames(self.socket)) is not None:
            self._heard_s = time.monotonic()
            self.silent = False
            self.refusal = ""
            yield frames

    def welcomed(self) -> None:
        """Note that the server has answered to a ping."""
        self._backoff.reset()
        self._wait_log = sockets.WaitLog()

    def ping_soon(self) -> None:
        """Ask for the credit at the next opportunity."""
        self._ping_s = 0.0

    def look_after(self, *, waiting: bool, asking: bool) -> bool:
        """Ping a silent server, and give up a dead connection; True where there is a new one.

        To be called when everything that has come is received, for that is a sign of life however late it is
        read.

        Args:
            waiting: something is awaited of the server; only then is a connection given up.
            asking: ping even if the server is not silent.
        """
        self._check_keys()
        now_s = time.monotonic()
        if now_s - self._ping_s >= PING_S and (asking or not self._ping_s or self.silent_s >= PING_S):
            self._ping(now_s)
        if not waiting:  # then silence means nothing
            self._heard_s = max(self._heard_s, now_s - PING_S)
        dead = waiting and self.silent_s > self._patience_s
        if self.refusal:
            waiting, dead = True, now_s >= self._retry_s
        if dead:
            self.close(0)
            self.socket = self._connect()
            self._patience_s = self._liveness_s + self._backoff.next_s()
        # A new connection is no sign of life.
        self.silent = waiting and (self.silent or dead or self.silent_s > SILENT_S or bool(self.refusal))
        if self.silent and self._wait_log.due():
            # Whoever waits says so, and why: this is the same event.
            waited_s = self._wait_log.waited_s
            _log.debug("%s waits for replay at %s since %.0f s", self._name, self._endpoint, waited_s)
        return dead

    def _check_keys(self) -> None:
        """Raise `AuthError` where keys are in the way; or note it, if this client outlasts that."""
        try:
            # Who outlasts it may have other servers to talk with, so this one may keep it waiting only once.
            self._watch.check(probe=not self._retry_auth or self._sockets_made == 1)
        except AuthError as error:
            if not self._retry_auth:
                raise
            if not self.refusal:
                self.refusal, self._retry_s = str(error), time.monotonic() + RETRY_AUTH_S
            if self._throttle():
                _log.warning("%s does without the shard at %s: %s", self._name, self._endpoint, error)

    def close(self, linger_s: float) -> None:
        """Close the socket; what was sent last still gets ``linger_s`` to leave."""
        self._watch.close()
        self.socket.close(linger=int(linger_s * 1000))

    def _connect(self) -> sockets.Socket:
        self._sockets_made += 1
        identity = f"{self._name[:64]}-{self._incarnation:x}-{id(self) & 0xFFFFFF:x}-{self._sockets_made}"
        self._watch = sockets.make_watch(self._endpoint, self._security)
        self._heard_s = time.monotonic()
        self._ping_s = 0.0
        self.refusal = ""
        return sockets.make_dealer(
            self._ctx, self._endpoint, identity.encode(), self._security, watch=self._watch
        )

    def _ping(self, now_s: float) -> None:
        """Ask for the credit. The answer overtakes nothing, so it tells what got lost."""
        self._ping_s = now_s
        question = messages.CreditQuestion(incarnation=self._incarnation, name=self._name)
        if self.send(question, self.pings + 1):
            self.pings += 1
