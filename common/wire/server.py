"""The loop of every server: poll, check the role, decode, dispatch, refuse, count."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import zmq

from troupe.common.errors import RefusedError, TornStateError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import DEFAULT, Limits, Message, WireError, decode
from troupe.common.wire.intake import Intake
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S, Rejections
from troupe.common.wire.security.handshakes import HandshakeMonitor

_log = logging.getLogger(__name__)


class Envelope(NamedTuple):
    """Whose message it is.

    Attributes:
        peer: routing identity of the sender.
        number: request id.
        key: what the sender has shown.
    """

    peer: bytes
    number: int = 0
    key: sockets.PeerKey = sockets.NO_KEY


Handler = Callable[[Envelope, Any], Body | None]
"""Serves one message; returns the answer, if there is one now. Raises RefusedError."""


class Server:
    """Serves one ROUTER, by one handler for each type of message. All of it belongs to one thread.

    Whatever a message causes ends as an ERROR to its sender: what is refused as its kind, memory that does
    not suffice as `memory`, and any unforeseen error as `internal`, with a trace in the log. But where
    state was left half changed (TornStateError) the server ends, for an answer could only be untrue.

    Attributes:
        rejections: messages that could not be served.
        handshakes: connections that never became a peer, by kind.
        unsent: answers to peers that were gone.
    """

    def __init__(
        self,
        name: str,
        socket: sockets.Socket,
        handlers: Mapping[type[Body], Handler],
        *,
        limits: Limits = DEFAULT,
        lock: contextlib.AbstractContextManager[Any] | None = None,
        heard: Callable[[Envelope, int], None] | None = None,
    ) -> None:
        """Prepare to serve.

        Args:
            name: for the log.
            socket: the ROUTER.
            handlers: by what they serve.
            limits: of messages.
            lock: held while a message is served, where other threads look at the same things.
            heard: called for every message, whatever it is, with the bytes of its header, before it is
                decoded, which takes time. May raise RefusedError.
        """
        self.rejections = Rejections(name)
        self.handshakes: Counter[str] = Counter()
        self.unsent = 0
        self.socket = socket
        self._name = name
        self._handlers = {body.TYPE: (body, handler) for body, handler in handlers.items()}
        self._limits = limits
        self._lock = lock or contextlib.nullcontext()
        self._heard = heard
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
        self._monitor: HandshakeMonitor | None = None
        self._intake: Intake | None = None
        self._poller = zmq.Poller()
        self._keyed = False

    def open(self, *readable: Any) -> None:
        """Begin to poll the socket, and what else should wake the loop."""
        self._keyed = bool(self.socket.getsockopt(zmq.CURVE_SERVER))
        self._intake = Intake(self.socket, self._limits.total_bytes)
        self._monitor = HandshakeMonitor(self.socket)
        for each in (self.socket, self._monitor.socket, *readable):
            self._poller.register(each, zmq.POLLIN)

    def close(self) -> None:
        """Stop watching the socket, which stays open."""
        if self._monitor is not None:
            self._monitor.close()

    def turn(self, timeout_s: float, most: int = 256, also: Iterable[sockets.Socket] = ()) -> int:
        """Wait for something to come, for at most `timeout_s`, and serve up to `most` messages; how many.

        `also` wakes it as well, this time.
        """
        assert self._monitor is not None
        assert self._intake is not None
        also = list(also)
        for each in also:
            self._poller.register(each, zmq.POLLIN)
        # Rounded up: rounded down, the last millisecond before a deadline would be spent in a busy loop.
        self._poller.poll(max(0, math.ceil(min(timeout_s * 1000, self._intake.period_ms))))
        for each in also:
            self._poller.unregister(each)
        served = 0
        while served < most and (frames := self._intake.receive()) is not None:
            served += 1
            with self._lock:
                self._take(frames)
        # After the messages, and every time: an event that nobody reads stays in memory.
        with self._lock:
            self._monitor.drain(self.handshakes)
            self._intake.look(self.rejections.by_kind)
        return served

    def serve(self, peer: bytes, message: Message, key: sockets.PeerKey = sockets.NO_KEY) -> None:
        """Serve one message that has come."""
        envelope = Envelope(peer, message.request_id, key)
        with self.guard(envelope, message.type):
            known = self._handlers.get(message.type)
            if known is None:
                raise WireError("bad_type", f"the {self._name} does not serve {message.type}")
            body, handler = known
            self._check_role(body, key)
            # Role before contents: who may not send it is not told what would have been wrong with it.
            answer = handler(envelope, body.of(message))
            if answer is not None:
                self.send(peer, answer, message.request_id)

    @contextlib.contextmanager
    def guard(self, envelope: Envelope, about: str) -> Iterator[None]:
        """Answer with ERROR, and count, whatever goes wrong in this block, which is about such a message."""
        try:
            yield
        except RefusedError as error:
            self.refuse(envelope, about, error)
        except MemoryError:
            detail = "there is not enough memory for this now: ask for less, or try again later"
            self.refuse(envelope, about, RefusedError(messages.NO_MEMORY, detail))
        except (zmq.ZMQError, TornStateError):
            raise  # the socket's, or the whole server's, not the message's
        # The one place where everything is caught: a defect in one handler must not end the service for all.
        # The trace is in the log, once a minute for each kind, since a peer may cause it as often as it
        # likes.
        except Exception as error:
            what = type(error).__name__
            if self._throttle((what, about)):
                _log.exception("%s could not serve %s of %r", self._name, about, envelope.peer[:80])
            self.refuse(envelope, about, RefusedError(messages.INTERNAL, f"{what}: {error}"))

    def refuse(self, envelope: Envelope, about: str, error: RefusedError) -> None:
        """Answer with ERROR, and count."""
        self.rejections.count(envelope.peer, error.kind, error.detail)
        body = messages.Error(kind=error.kind, detail=error.detail, about=about, **error.extra)  # type: ignore[arg-type]
        self.send(envelope.peer, body, envelope.number)

    def send(self, peer: bytes, body: Body, number: int = 0) -> bool:
        """Send to a peer; False where it has gone, or does not read."""
        sent = sockets.send(self.socket, body.message(number), peer)
        self.unsent += not sent
        return sent

    def _take(self, frames: list[zmq.Frame]) -> None:
        # Without keys there is none to ask for, and libzmq takes long to say so.
        key = sockets.peer_key(frames[0]) if self._keyed else sockets.NO_KEY
        envelope = Envelope(frames[0].bytes, 0, key)
        with self.guard(envelope, ""):
            if self._heard is not None:
                self._heard(envelope, len(frames[1]) if len(frames) > 1 else 0)
            try:
                message = decode(frames[1:], limits=self._limits)
            except WireError as error:
                self.refuse(envelope._replace(number=error.request_id), error.about, error)
                return
            self.serve(envelope.peer, message, envelope.key)

    def _check_role(self, body: type[Body], key: sockets.PeerKey) -> None:
        """Refuse a message to a key of another role than those that may send it."""
        # Without keys everybody may; then only the address protects the port.
        roles = messages.MAY_SEND[body.TYPE]
        if self._keyed and key.role not in roles:
            detail = f"{body.TYPE} needs a key for {' or '.join(roles)}, and this one is for {key.role}"
            raise RefusedError(messages.REFUSED_KEY, detail)
