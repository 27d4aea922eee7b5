"""What libzmq does not say: that a connection never became a peer, and whose fault it is.

Each end has its watch. A server counts and logs whom it has turned away; a client learns that it has been,
instead of waiting for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket as tcp
from collections import Counter
from typing import TypeAlias
from urllib.parse import urlsplit

import zmq
from zmq.utils.monitor import recv_monitor_message

from troupe.common.errors import AuthError
from troupe.common.runtime import Deadline
from troupe.common.runtime.logging import Throttle

Socket: TypeAlias = "zmq.Socket[bytes]"

_log = logging.getLogger(__name__)

_LOG_PERIOD_S = 60.0
# Broken-off handshakes in a row after which a client looks what is at the other end.
_SUSPICIOUS_FAILURES = 3

_PROBE_S = 2.0
# How a ZMTP 3.1 client with keys begins (RFC 37): signature, version, mechanism, not a server, filler.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

_MECHANISM = slice(12, 32)
_GREETING_WITHOUT_KEYS = _GREETING.replace(b"CURVE", b"NULL\0")
_WANTS_KEYS = "it requires keys (start this service with --keys)"
_numbers = itertools.count()


class HandshakeMonitor:
    """Counts connections to a bound socket that never became a ZeroMQ peer: port scans, HTTP, wrong keys.

    libzmq drops them in silence. Poll `socket` for reading, then call `drain`, which logs those that have
    to do with keys. A key that is not in the allow-list is logged where that is read (`zap`).
    """

    _KINDS = {  # noqa: RUF012
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "handshake",
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "handshake_protocol",
        zmq.EVENT_HANDSHAKE_FAILED_AUTH: "handshake_auth",
    }

    def __init__(self, watched: Socket) -> None:
        self._watched = watched
        self._throttle = Throttle(_LOG_PERIOD_S)
        self._secured = bool(watched.getsockopt(zmq.CURVE_SERVER))
        self.socket: Socket = _monitor(watched, *self._KINDS)

    def drain(self, counts: Counter[str]) -> None:
        """Add what has happened since the last call to `counts`."""
        while self.socket.poll(0):
            event = recv_monitor_message(self.socket)
            counts[self._KINDS.get(zmq.Event(event["event"]), "handshake")] += 1
            reason = self._reason(int(event["value"]))
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and reason and self._throttle(reason):
                where = event["endpoint"].decode("utf-8", "replace")
                _log.warning("turned away a peer at %s: %s", where, reason)

    def _reason(self, error: int) -> str:
        if error == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            if self._secured:
                return "it has no keys, and this service requires them (start it with --keys)"
            return "it requires keys, and this service has none (start both with --keys, or neither)"
        if error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "it has another public key for this service, or its key files are damaged"
        return ""

    def close(self) -> None:
        """Stop watching; to be called before the watched socket is closed."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class HandshakeWatch:
    """Notices that a server turns this client away. libzmq says nothing, and after a clear refusal gives up.

    Attach it before the socket connects: the refusal of a server near by comes at once, and only once.

    Attributes:
        succeeded: whether there has been a connection.
        refused: whether the server's key check has said no, or it wants keys where we have none.
    """

    def __init__(self, endpoint: str, own_key: bytes = b"", server_file: str = "") -> None:
        """Watch the way to `endpoint`, where we show `own_key` (empty: none) and expect the key in a file."""
        self.succeeded = False
        self.refused = False
        self._endpoint = endpoint
        self._own_key = own_key.decode()
        self._server_file = server_file
        self._failures = 0
        self._error = ""
        self._untold = False
        self._watched: Socket | None = None
        self._monitor: Socket | None = None

    def attach(self, socket: Socket) -> None:
        """Watch `socket` from now on."""
        self._watched = socket
        self._monitor = _monitor(
            socket,
            zmq.EVENT_HANDSHAKE_SUCCEEDED,
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
            zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        )

    def wait(self, timeout_s: float) -> None:
        """Wait for news, and take it in."""
        if self._monitor is not None:
            self._monitor.poll(int(timeout_s * 1000))
        self._drain()

    def check(self, *, probe: bool = True) -> None:
        """Raise `AuthError`, with one line, where keys are why there is no connection.

        With `probe` a server that keeps hanging up is asked whether it wants keys, and one with none where
        we have, or the other way round, is told so: two seconds at most.
        """
        self._drain()
        if probe and self._failures >= _SUSPICIOUS_FAILURES:
            self._failures = 0
            # A server that cannot read us hangs up, often before libzmq has read what it wants; but so does a
            # proxy whose server is not there yet.
            if greeted_by_curve(self._endpoint):
                self.refused = self._untold = not self._own_key
                self._error = (
                    f"its key is not that in {self._server_file}, or our own key files are damaged"
                    if self._own_key
                    else _WANTS_KEYS
                )
        if self._untold and probe:
            self._untold = False
            # libzmq hangs up once it has read the other's greeting, and may not have sent all of its own:
            # then the server does not know why nobody came.
            _answer(self._endpoint, _GREETING if self._own_key else _GREETING_WITHOUT_KEYS)
        if self._error:
            raise AuthError(f"no connection with {self._endpoint}: {self._error}")

    def close(self) -> None:
        """Stop watching; to be called before the watched socket is closed."""
        if self._watched is not None and self._monitor is not None:
            self._watched.disable_monitor()
            self._monitor.close(linger=0)
        self._watched = self._monitor = None

    def _drain(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._take(event["event"], int(event["value"]))

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.succeeded = True
            self._failures = 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._failures += 1
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refused = value == 400  # what the handler says where it has decided
            self._error = f"its allow-list does not have our key {self._own_key}"
            if not self.refused:
                self._error = f"its key check failed (status {value})"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            self.refused = self._untold = True
            self._error = _WANTS_KEYS
            if self._own_key:
                self._error = "it has no keys, and we have (start both with --keys, or neither)"
        elif value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            self._error = f"its messages are not made with the key in {self._server_file}"


def greeted_by_curve(endpoint: str) -> bool:
    """Whether something that speaks ZMTP with CURVE is at `tcp://HOST:PORT`. Takes two seconds at most."""
    # The mechanism stands in the greeting, in the clear, before any key is used.
    return _answer(endpoint, _GREETING)[_MECHANISM].rstrip(b"\0") == b"CURVE"


def _answer(endpoint: str, greeting: bytes) -> bytes:
    """The greeting that answers this one, or the part of it that came in two seconds; empty for none."""
    address, deadline = urlsplit(endpoint), Deadline(_PROBE_S)
    answer = b""
    with (
        contextlib.suppress(OSError, ValueError),
        tcp.create_connection((address.hostname or "", address.port or 0), _PROBE_S) as connection,
    ):
        connection.sendall(greeting)
        while len(answer) < len(greeting):
            # The deadline is for all of it: a server that sends a byte a second would never run into one for
            # each read.
            connection.settimeout(max(0.001, deadline.remaining_s))
            part = connection.recv(len(greeting))
            if not part:
                break
            answer += part
    return answer


def _monitor(watched: Socket, *kinds: int) -> Socket:
    events = 0
    for kind in kinds:
        events |= int(kind)
    return watched.get_monitor_socket(events, f"inproc://handshakes-{next(_numbers)}")
