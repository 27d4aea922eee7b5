"""Who may connect: the answering end of ZAP, and the proof at start that it turns strangers away.

libzmq asks one handler per context, at `inproc://zeromq.zap.01`, about every CURVE handshake (ZeroMQ RFC 27).
Without a handler it lets everybody in, unless told otherwise, and it never says whom it has turned away. Here
every server is told otherwise, refusals are logged, and `prove` tries strangers on the bound socket.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TypeAlias

import zmq
from zmq.utils import z85

from troupe.common.errors import AuthError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire.security.handshakes import HandshakeWatch
from troupe.common.wire.security.keys import AllowList, Keys

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"

_log = logging.getLogger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"
PROOF_S = 10.0
_LOG_PERIOD_S = 60.0
_handlers: dict[int, _Handler] = {}
_handlers_lock = threading.Lock()


def protect(ctx: Context, socket: Socket, keys: Keys) -> None:
    """Make `socket`, before it binds, a CURVE server that lets in who is in the allow-list of `keys`."""
    domain = _handler_of(ctx).domain_of(keys.allow_list())
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no handler, no entry


def prove(ctx: Context, bound: Socket, keys: Keys) -> None:
    """Try to connect to a bound socket with an unknown key, and without any.

    Raises `AuthError` where either is let in, or no decision comes within `PROOF_S`.
    """
    endpoint = bound.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]
    # Other types than this pair would be turned away for that, which proves nothing.
    kind = zmq.SUB if bound.getsockopt(zmq.TYPE) == zmq.PUB else zmq.DEALER
    public, secret = zmq.curve_keypair()
    handler = _handler_of(ctx)
    handler.expect_stranger(public)
    try:
        for pair, what in (((public, secret), "with a wrong key"), (None, "without a key")):
            if not turned_away(ctx, kind, _own_address(endpoint), pair, keys.public):
                raise AuthError(f"will not serve at {endpoint}: the key check lets in a client {what}")
    finally:
        handler.expect_stranger(b"")


def turned_away(
    ctx: Context, kind: int, endpoint: str, pair: tuple[bytes, bytes] | None, server_key: bytes
) -> bool:
    """Whether a client of this type, with this pair, is refused. Raises `AuthError` after `PROOF_S`."""
    socket = ctx.socket(kind)
    watch = HandshakeWatch(endpoint)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        if pair is not None:
            apply_pair(socket, *pair, server_key)
        watch.attach(socket)
        socket.connect(endpoint)
        deadline_s = time.monotonic() + PROOF_S
        while time.monotonic() < deadline_s:
            watch.wait(0.1)
            if watch.succeeded or watch.refused:
                return watch.refused and not watch.succeeded
        raise AuthError(f"will not serve at {endpoint}: the key check did not decide within {PROOF_S:.0f} s")
    finally:
        watch.close()
        socket.close(linger=0)


def apply_pair(socket: Socket, public: bytes, secret: bytes, server_key: bytes) -> None:
    """Make `socket`, before it connects, a CURVE client."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_key)


def _own_address(endpoint: str) -> str:
    """How this process reaches what it has bound."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def _handler_of(ctx: Context) -> _Handler:
    with _handlers_lock:
        number = int(ctx.underlying)
        handler = _handlers.get(number)
        if handler is None or handler.closed.is_set():  # a new context may have the address of an old one
            handler = _handlers[number] = _Handler(ctx)
            handler.start()
        return handler


class _Handler(threading.Thread):
    """Answers ZAP requests of one context until that ends."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(name="zap", daemon=True)
        self.closed = threading.Event()
        # A shadow, so that `destroy` of the context leaves this socket to its thread, which ends then.
        self._ctx: Context = zmq.Context.shadow(ctx.underlying)
        self._socket = self._ctx.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._lists: dict[bytes, AllowList] = {}
        self._stranger = b""
        self._throttle = Throttle(_LOG_PERIOD_S)

    def domain_of(self, allowed: AllowList) -> bytes:
        """The name under which libzmq asks about servers that use this list."""
        # ZAP's domain has room for 255 bytes; the end of a path tells more of it than the beginning.
        domain = str(allowed.path.absolute()).encode()[-255:]
        self._lists[domain] = allowed
        return domain

    def expect_stranger(self, key: bytes) -> None:
        """Turn this key away without a word: it is that of `prove`."""
        self._stranger = key

    def run(self) -> None:
        """Answer, one request after the other."""
        try:
            while True:
                request = self._socket.recv_multipart()
                try:
                    status, user = self._decide(request)
                except Exception:
                    _log.exception("the key check fails")
                    # An answer in any case: libzmq waits for one, and the connection would hang.
                    status, user = b"500", b""
                with suppress(IndexError):
                    self._socket.send_multipart([b"1.0", request[1], status, b"", user, b""])
        except zmq.ContextTerminated:
            pass
        finally:
            self.closed.set()
            self._socket.close(linger=0)

    def _decide(self, request: list[bytes]) -> tuple[bytes, bytes]:
        """The status and, for a key in the list, `ROLE KEY` as the name of the user."""
        version, _, domain, address, _, mechanism, *credentials = request
        allowed = self._lists.get(domain)
        # Whatever is not exactly a CURVE question about a list of ours is refused, never let through.
        if version != b"1.0" or mechanism != b"CURVE" or len(credentials) != 1 or allowed is None:
            return b"400", b""
        key = z85.encode(credentials[0])
        role = allowed.role_of(key)
        if role:
            return b"200", f"{role} {key.decode()}".encode()
        if key != self._stranger and self._throttle(key):
            where = address.decode("utf-8", "replace")
            _log.warning(
                "turned away a peer at %s: its key %s is not in %s", where, key.decode(), allowed.path
            )
        return b"400", b""
