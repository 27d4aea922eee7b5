"""What AWS has in every VPC, for machines that are network namespaces: metadata, DNS, a way to its API."""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
A_RECORD, INTERNET = 1, 1
NO_SUCH_NAME = 3


def bound(address: str, port: int, *, stream: bool = True) -> socket.socket:
    """A socket bound here; a stream listens."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    if stream:
        sock.listen(64)
    return sock


def bound_in(namespace: str, address: str, port: int, *, stream: bool = True) -> socket.socket:
    """A socket bound in another network namespace, where it stays; this process stays where it is."""

    def bind() -> socket.socket:
        with Path("/run/netns", namespace).open() as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
        return bound(address, port, stream=stream)

    with ThreadPoolExecutor(1) as thread:  # a thread of its own: it does not come back
        return thread.submit(bind).result(30)


class Metadata:
    """A metadata service of version 2: without a token it answers nothing.

    Attributes:
        values: what it answers, by path below `/latest/meta-data/`; may change at any time.
        url: its address.
    """

    def __init__(self, sock: socket.socket, values: dict[str, str]) -> None:
        self.values = values

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                asked = (
                    self.path == "/latest/api/token"
                    and "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
                )
                self._answer(200 if asked else 400, "token" if asked else "")

            def do_GET(self) -> None:
                path = self.path.removeprefix("/latest/meta-data/")
                if self.headers.get("X-aws-ec2-metadata-token") != "token":
                    self._answer(401, "")
                elif path in values:
                    self._answer(200, values[path])
                else:
                    self._answer(404, "")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                # botocore looks for the lifetime of the token that it was given
                self.send_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # who asked has been stopped meanwhile
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        address, port = sock.getsockname()
        self.url = f"http://{address}:{port}"
        self._server = ThreadingHTTPServer((address, port), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = sock
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


def instance_metadata(instance: str, address: str, profile: str) -> dict[str, str]:
    """The values of a machine, with credentials of its instance profile."""
    role = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": "ASIA0123456789ABCDEF",
        "SecretAccessKey": "secret",
        "Token": "token",
        "LastUpdated": "2026-01-01T00:00:00Z",
        "Expiration": "2099-01-01T00:00:00Z",
    }
    credentials = "iam/security-credentials/"
    return {
        "instance-id": instance,
        "local-ipv4": address,
        credentials: profile,
        credentials + profile: json.dumps(role),
    }


class Resolver:
    """The VPC's DNS server: IPv4 addresses of a private zone, nothing else.

    `find` says a name's address, None where there is none; it is called from a thread of this object.
    """

    def __init__(self, sock: socket.socket, find: Callable[[str], str | None]) -> None:
        self._sock, self._find = sock, find
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        _close(self._sock)

    def _serve(self) -> None:
        while True:
            try:
                query, sender = self._sock.recvfrom(4096)
                self._sock.sendto(self._answer(query), sender)
            except (IndexError, ValueError, struct.error):
                continue  # no question
            except OSError:
                return

    def _answer(self, query: bytes) -> bytes:
        labels, place = [], 12
        while length := query[place]:
            labels.append(query[place + 1 : place + 1 + length].decode())
            place += 1 + length
        kind, _ = struct.unpack("!HH", query[place + 1 : place + 5])
        question = query[12 : place + 5]
        address = self._find(".".join(labels).lower())
        answers = b""
        if address and kind == A_RECORD:
            # the name is a pointer to the question's; it may be kept for a second
            answers = struct.pack("!HHHIH", 0xC00C, A_RECORD, INTERNET, 1, 4) + socket.inet_aton(address)
        flags = 0x8180 | (0 if address else NO_SUCH_NAME)
        return query[:2] + struct.pack("!HHHHH", flags, 1, bool(answers), 0, 0) + question + answers


class Relay:
    """Passes every connection to a socket on to `target`, which is in this process's namespace."""

    def __init__(self, sock: socket.socket, target: tuple[str, int]) -> None:
        self._sock, self._target = sock, target
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        _close(self._sock)

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._sock.accept()
            except OSError:
                return
            threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with (
            near,
            contextlib.suppress(OSError),
            socket.create_connection(self._target, timeout=30) as far,
        ):
            far.settimeout(None)
            back = threading.Thread(target=_pump, args=(far, near), daemon=True)
            back.start()
            _pump(near, far)
            back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass
    finally:
        with contextlib.suppress(OSError):  # the other side may be faster
            sink.shutdown(socket.SHUT_WR)


def _close(sock: socket.socket) -> None:
    """Close a socket that a thread waits for: shutting it down wakes the thread."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
