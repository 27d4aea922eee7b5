"""The HTTP server of the board, with a deadline for requests: uvicorn waits for the rest of one forever."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 20.0
"""A connection on which a request is not complete after this is closed."""


class Connection(H11Protocol):
    """Closes itself where a request, its body included, takes too long to arrive."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        self._end_watch()

    def data_received(self, data: bytes) -> None:
        """Read on, and wait for what is missing."""
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._end_watch()  # the rest is the server's to do
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.close)

    def _end_watch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def web_server(app: Any) -> uvicorn.Server:
    """A server of `app`, to be run in a thread."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,  # addresses may have the token in them
            http=Connection,
            ws="none",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=3,  # pages that watch go within a moment
            limit_concurrency=512,
        )
    )
