"""Dynamic batching: many callers' small requests become a few large calls.

A batch is made as soon as `min_batch` rows wait, or the oldest request has waited for `timeout_s`, whichever
comes first: it never waits for exactly full. Nothing here waits, or knows a network, torch or a socket: that
is up to the loop that asks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from troupe.common import system
from troupe.common.errors import TroupeError

Payload = TypeVar("Payload")


class BatchError(TroupeError):
    """A request that cannot be served, in one line."""


@dataclass(frozen=True)
class Request(Generic[Payload]):
    """What one caller wants: `rows` rows of a batch."""

    caller: Hashable
    rows: int
    payload: Payload
    since_s: float
    """When it came, on the queue's clock."""


class BatchQueue(Generic[Payload]):
    """Requests that wait, and which of them make the next batch. Not for several threads at once.

    Callers take turns: one that asks a lot cannot keep others waiting for longer than one turn of all.

    Args:
        min_batch: rows that are worth a call at once.
        max_batch: most rows of a call.
        timeout_s: longest wait of a request before a call is made for fewer rows.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        min_batch: int,
        max_batch: int,
        timeout_s: float,
        clock: Callable[[], float] = lambda: system.monotonic(),
    ) -> None:
        if not 1 <= min_batch <= max_batch or timeout_s < 0:
            raise ValueError("1 <= min_batch <= max_batch and 0 <= timeout_s are needed")
        self._min = min_batch
        self._max = max_batch
        self._timeout_s = timeout_s
        self._clock = clock
        # The next caller whose turn it is comes first; every caller's own requests stay in order.
        self._callers: OrderedDict[Hashable, deque[Request[Payload]]] = OrderedDict()
        self.rows = 0

    def __len__(self) -> int:
        return sum(len(waiting) for waiting in self._callers.values())

    def put(self, caller: Hashable, rows: int, payload: Payload) -> None:
        """Add a request. Raises BatchError for one that could never be part of a batch."""
        if not 0 < rows <= self._max:
            raise BatchError(f"a request of {rows} rows, a batch takes from 1 to {self._max}")
        self._callers.setdefault(caller, deque()).append(Request(caller, rows, payload, self._clock()))
        self.rows += rows

    def drop(self, caller: Hashable) -> list[Request[Payload]]:
        """Forget what a caller wanted, who has gone, and return it."""
        dropped = list(self._callers.pop(caller, ()))
        self.rows -= sum(request.rows for request in dropped)
        return dropped

    def due_in_s(self) -> float | None:
        """Seconds until `take` will give a batch if nothing else comes: 0 for now, None without requests."""
        if not self._callers:
            return None
        if self.rows >= self._min:
            return 0.0
        oldest = min(waiting[0].since_s for waiting in self._callers.values())
        return max(0.0, oldest + self._timeout_s - self._clock())

    def take(self) -> list[Request[Payload]]:
        """The next batch, of at most `max_batch` rows; empty while none is due."""
        return self.take_now() if self.due_in_s() == 0.0 else []

    def take_now(self) -> list[Request[Payload]]:
        """The next batch, due or not."""
        batch: list[Request[Payload]] = []
        room = self._max
        # The request that has waited for longest always comes along: large ones are not passed over for ever.
        if self._callers:
            oldest = min(self._callers, key=lambda caller: self._callers[caller][0].since_s)
            self._callers.move_to_end(oldest, last=False)
        took = True
        while took and room:
            took = False
            for caller in list(self._callers):
                waiting = self._callers[caller]
                # Passed over, not waited for: smaller ones behind it may still fit into this batch.
                if waiting[0].rows > room:
                    continue
                request = waiting.popleft()
                batch.append(request)
                room -= request.rows
                took = True
                del self._callers[caller]
                if waiting:
                    self._callers[caller] = waiting  # behind all others
        self.rows -= self._max - room
        return batch
