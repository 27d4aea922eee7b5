"""What a resumed run begins with: items that replay has kept, or an empty table to fill again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq

from common.wire import messages, sockets
from common.wire.codec import WireError

_ASK_AGAIN_S = 5.0


class Refill:
    """Asks every shard once what it has restored. Nothing here waits: call `line` now and then.

    A shard answers when it serves, which is after it has joined the run and opened its folder.
    """

    def __init__(self, endpoints: Sequence[str], min_items: int) -> None:
        """Connect to the shards at `endpoints`; learning needs `min_items` over all of them."""
        self._min_items = min_items
        self._context: sockets.Context = zmq.Context()
        self._shards = [_Shard(self._context, endpoint) for endpoint in endpoints]

    def line(self) -> str | None:
        """Return the line for the user, once every shard has answered; None before."""
        restored = [shard.restored_items() for shard in self._shards]
        counts = [count for count in restored if count is not None]
        return refill_line(sum(counts), self._min_items) if len(counts) == len(restored) else None

    def close(self) -> None:
        """Close the connections."""
        self._context.destroy(linger=0)


class _Shard:
    """One shard, and its answer when it has come."""

    def __init__(self, context: sockets.Context, endpoint: str) -> None:
        self._socket = sockets.make_dealer(context, endpoint)
        self._ask_at = 0.0
        self._restored: int | None = None

    def restored_items(self) -> int | None:
        if self._restored is None:
            now = time.monotonic()
            if now >= self._ask_at and sockets.send(self._socket, messages.Status().message()):
                self._ask_at = now + _ASK_AGAIN_S  # it may be restarted before it answers
            try:
                answer = sockets.receive(self._socket)
                if answer is not None and answer.type == messages.STATUS_OK:
                    self._restored = int(messages.StatusOk.of(answer).values["restored_items"])
            except (WireError, KeyError, TypeError, ValueError):
                pass  # not what a shard says; asked again
        return self._restored


def refill_line(restored: int, min_items: int) -> str:
    """Say what is there, and what has to be stored before learning goes on."""
    if not restored:
        return f"replay starts empty, refills {min_items:,} items before learning goes on"
    line = f"replay: {restored:,} items restored"
    return line if restored >= min_items else f"{line}, learning goes on at {min_items:,}"
