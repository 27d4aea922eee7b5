"""What a resumed run begins with: items that replay has kept, or an empty table to fill again."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from troupe.common.data.table_config import TableConfig
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import WireError
from troupe.common.wire.link import Link, Question, new_incarnation

_ASK_AGAIN_S = 5.0
"""A shard may be restarted before it answers."""


class Refill:
    """Asks every shard once what it has restored. Nothing here waits: call `line` now and then.

    A shard answers when it serves, which is after it has joined the run and opened its folder.
    """

    def __init__(self, endpoints: Sequence[str], min_items: int) -> None:
        """Connect to the shards at `endpoints`; learning needs `min_items` over all of them."""
        self._min_items = min_items
        self._context: sockets.Context = zmq.Context()
        self._asked = {
            self._connect(endpoint): Question(messages.Status().message(1), _ASK_AGAIN_S)
            for endpoint in endpoints
        }
        self._restored: dict[Link, int] = {}

    def _connect(self, endpoint: str) -> Link:
        link = Link(
            *(self._context, endpoint, "replay"),
            name="launcher",
            incarnation=new_incarnation(),
            liveness_s=4 * _ASK_AGAIN_S,
            retry_auth=True,
        )
        link.connect()
        return link

    def line(self) -> str | None:
        """Return the line for the user, once every shard has answered; None before."""
        for link, question in self._asked.items():
            if link not in self._restored:
                link.maintain(waiting=True)
                question.send(link)
                self._receive(link)
        if len(self._restored) < len(self._asked):
            return None
        return refill_line(sum(self._restored.values()), self._min_items)

    def _receive(self, link: Link) -> None:
        for message in link.receive():
            try:
                if message.type == messages.STATUS_OK:
                    self._restored[link] = int(messages.StatusOk.of(message).values["restored_items"])
            except (ArithmeticError, KeyError, TypeError, ValueError):
                link.bad(WireError("bad_field", "STATUS_OK without restored_items"))  # asked again

    def close(self) -> None:
        """Close the connections."""
        for link in self._asked:
            link.close(0)
        self._context.destroy(linger=0)


def refill_line(restored: int, min_items: int) -> str:
    """Say what is there, and what has to be stored before learning goes on."""
    if not restored:
        return f"replay starts empty, refills {min_items:,} items before learning goes on"
    line = f"replay: {restored:,} items restored"
    return line if restored >= min_items else f"{line}, learning goes on at {min_items:,}"


def items_before_learning(tables: Sequence[TableConfig]) -> int:
    """Return how many items all `tables` of a run hold together when its first batch can be drawn.

    A queue by itself hands on what comes: there is nothing to fill, nor to fill again.
    """
    if all(table.is_queue for table in tables):
        return 0
    most = max(table.min_items for table in tables)  # whatever is inserted goes into all of them
    return sum(min(table.capacity, most) for table in tables)
