"""Control servers for the doctor to ask."""

from tests.membership import _closed_peers, connect, ctx, serve

__all__ = ["_closed_peers", "connect", "ctx", "serve"]
