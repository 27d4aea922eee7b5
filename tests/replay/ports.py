"""Ports that nobody uses."""

import itertools
import secrets
import socket

_PORTS = itertools.count(20_000 + secrets.randbelow(10_000))
"""Below those that the kernel gives to who asks for any, as other tests do before one of these is bound."""


def free_port():
    for port in _PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
