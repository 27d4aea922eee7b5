"""A ZMTP 3.1 peer without libzmq (RFC 37), by which messages can be sent that never end."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
PATIENCE_S = 20.0
OPENED: list[RawPeer] = []
"""All of this process, to be closed after the test."""


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """The bytes of one frame."""
    flags = more | command << 2
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return struct.pack(">BQ", flags | 2, len(body)) + body


class RawPeer:
    """A connection without keys that has shaken hands."""

    def __init__(self, endpoint: str, kind: bytes = b"DEALER") -> None:
        """Connect to `tcp://HOST:PORT` as a socket of this kind."""
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self.tcp = socket.create_connection((host, int(port)), PATIENCE_S)
        OPENED.append(self)
        ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
        self.tcp.sendall(GREETING + frame(ready, command=True))
        self._read(64)
        self._read(self._read(2)[1])  # its READY
        self.sent = 0

    def send(self, data: bytes) -> None:
        """Send bytes as they are. Raises OSError where the connection has been cut."""
        self.tcp.sendall(data)
        self.sent += len(data)

    def flood(self, part: bytes, max_bytes: int, enough: Callable[[], bool] = lambda: False) -> bool:
        """Send this frame again and again; whether the connection was cut before so many bytes were sent.

        Or before there were `enough`.
        """
        burst = part * max(1, (1 << 18) // len(part))
        try:
            while self.sent < max_bytes and not enough():
                self.send(burst)
        except OSError:
            return True
        return self.is_cut(0.0)

    def is_cut(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether the other end has closed the connection, or does so soon. What it says is thrown away."""
        self.tcp.settimeout(timeout_s)
        try:
            while self.tcp.recv(1 << 16):
                pass
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Leave."""
        self.tcp.close()

    def reset(self) -> None:
        """Leave as who is cut off: the other end is told of an error (RST), not of an end."""
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.tcp.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.tcp.recv(size - len(data))
            if not part:
                raise ConnectionError("closed in the handshake")
            data += part
        return data
