"""`troupe board [DIR ...]`."""

from __future__ import annotations

import argparse
import errno
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime import StopSignal
from troupe.common.runtime.parser import Parser, integer
from troupe.services.board.access import MIN_TOKEN_CHARS, is_loopback
from troupe.services.board.library import Library

TOKEN = "TROUPE_BOARD_TOKEN"
PORT = 6007
_PORTS_TRIED = 20


def board_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser(
        prog="troupe board",
        description="Serve one web page for runs: all runs and their differences, returns with bands "
        "over seeds, any metric, notes. The only thing that it changes in a run is its note. Needs the "
        "extra `board`.",
    )
    parser.add_argument(
        "directories",
        metavar="DIR",
        type=Path,
        nargs="*",
        help="run directories, or directories that have runs in them (default: runs)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s); an address that others can reach needs "
        f"the printed token, or your own in the environment variable {TOKEN}",
    )
    parser.add_argument(
        "--port",
        type=integer(0, 65535),
        default=PORT,
        help="port, or the next free one (default: %(default)s); 0 for any",
    )
    parser.add_argument(
        "--published",
        metavar="HOST:PORT",
        type=_published,
        help="address under which browsers reach it, where it is not this one, as with the published port of "
        "a container (default: that of --host and --port); it decides whether a token is needed",
    )
    parser.add_argument(
        "--export", metavar="PAGE", type=Path, help="write the page as one HTML file instead of serving it"
    )
    return parser


def board(words: Sequence[str]) -> int:
    """Serve until a signal comes."""
    options = board_parser().parse_args(words)
    library = Library(options.directories or [Path("runs")])
    if options.export is not None:
        from troupe.services.board import export

        export.write(library, options.export)
        print(options.export)
    else:
        listener = listen(options.host, options.port)
        serve(library, options.published or Address(options.host, listener.getsockname()[1]), listener)
    return 0


class Address(NamedTuple):
    """Where browsers reach the page; `name` is shown for a host that stands for all addresses."""

    host: str
    port: int
    name: str = ""


def _published(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"{text!r} should be HOST:PORT, such as 127.0.0.1:{PORT}")
    # The name of this machine may be that of a container, which nobody else knows.
    return Address(host.strip("[]"), int(port), "localhost")


def serve(library: Library, published: Address, listener: socket.socket, *, is_logged: bool = False) -> None:
    """Serve at a socket until a signal comes, after the address is printed.

    Args:
        library: the runs.
        published: where browsers reach it.
        listener: the socket that it serves at.
        is_logged: what is printed goes into a log, so that a token must not be in it.
    """
    # At once: without the extra this is what says so.
    from troupe.services.board.app import Board
    from troupe.services.board.watching import Watch
    from troupe.services.board.web import web_server

    token = _token(published.host)
    watch = Watch(library)
    server = web_server(Board(library, watch).app(token))
    stop = StopSignal().install()
    # In a thread of its own: in the main one it would handle the signals, and end by them.
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    watch.start()
    thread.start()
    print(_url(published, "" if is_logged else token), flush=True)
    try:
        while thread.is_alive() and not stop.requested:
            stop.wait(1.0)
    finally:
        watch.stop()
        server.should_exit = True
        thread.join(10.0)
        listener.close()
    if not stop.requested:
        raise TroupeError("the server of the page has exited: see its output above")


def _token(host: str) -> str:
    """What a browser has to show; "" where only this machine can ask.

    Raises:
        ConfigError: that of the environment is too short.
    """
    token = os.environ.get(TOKEN, "")
    if token and (len(token) < MIN_TOKEN_CHARS or not (token.isascii() and token.isprintable())):
        raise ConfigError(f"{TOKEN} should be at least {MIN_TOKEN_CHARS} printable ASCII characters")
    return token or ("" if is_loopback(host) else secrets.token_urlsafe(24))


def listen(host: str, port: int, tried: int = _PORTS_TRIED) -> socket.socket:
    """A socket that listens at the port, or at one of the `tried` after it that is free.

    Raises:
        ConfigError: there is none, or no such address here.
    """
    last = min(port + tried, 65535) if port else 0
    for number in range(port, last + 1):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(128)
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or error
                raise ConfigError(
                    f"cannot listen at {host}, port {number} ({why}): choose another"
                ) from error
    raise ConfigError(f"ports {port} to {last} of {host} are in use: choose another with --port")


def _url(address: Address, token: str) -> str:
    """What to open in a browser."""
    host = address.host
    shown = f"[{host}]" if ":" in host else "localhost" if is_loopback(host) else host
    if host in ("0.0.0.0", "::"):
        shown = address.name or socket.gethostname()
    return f"http://{shown}:{address.port}/" + (f"?token={quote(token)}" if token else "")
