"""Dynamic batching: many callers' small requests become a few large calls.

A batch is made as soon as `min_batch` rows wait, or the oldest request has waited for `timeout_s`, whichever
comes first: it never waits for exactly full. Nothing here knows a network, torch or a socket.

`BatchQueue` is the rule by itself, for a loop that does its own waiting (a socket loop, say). `Batcher` is a
thread around it: callers block or hold a future while one function is called with concatenated arrays.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from common.errors import TroupeError

Payload = TypeVar("Payload")
Arrays = Mapping[str, np.ndarray]


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

    Callers take turns: one that asks a lot cannot keep others waiting for longer than a turn of everybody.

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
        clock: Callable[[], float] = time.monotonic,
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
        """Adds a request. Raises BatchError for one that could never be part of a batch."""
        if not 0 < rows <= self._max:
            raise BatchError(f"a request of {rows} rows, a batch takes from 1 to {self._max}")
        self._callers.setdefault(caller, deque()).append(Request(caller, rows, payload, self._clock()))
        self.rows += rows

    def drop(self, caller: Hashable) -> list[Request[Payload]]:
        """Forgets what a caller wanted, for it has gone; returns it."""
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


class Batcher:
    """Calls `function` for many callers at once, from one thread of its own.

    The first request that is served settles names, dtypes and shapes; others are refused. Where a call
    with several requests fails, each is tried alone, so that only who caused it gets the error; `function`
    therefore must not keep anything of a call that failed.

    Args:
      function: arrays `[N, ...]` by name to arrays `[N, ...]` by name.
      min_batch: see `BatchQueue`.
      max_batch: likewise.
      timeout_s: likewise.
    """

    def __init__(
        self, function: Callable[[Arrays], Arrays], min_batch: int, max_batch: int, timeout_s: float
    ) -> None:
        self._function = function
        self._queue: BatchQueue[tuple[dict[str, np.ndarray], Future[Arrays]]] = BatchQueue(
            min_batch, max_batch, timeout_s
        )
        self._signature: dict[str, tuple[str, tuple[int, ...]]] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self.calls_total = 0
        self.rows_total = 0
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, arrays: Arrays, caller: Hashable = None) -> Future[Arrays]:
        """Asks for the results of `arrays`, each `[n, ...]` with the same n. Raises BatchError.

        The arrays must not change before the future is done. Without a `caller` the thread is the caller.
        """
        given = {name: np.asarray(array) for name, array in arrays.items()}
        rows = _rows_of(given)
        future: Future[Arrays] = Future()
        with self._changed:
            if self._closed:
                raise BatchError("the batcher is closed")
            self._check(given)
            self._queue.put(threading.get_ident() if caller is None else caller, rows, (given, future))
            self._changed.notify()
        return future

    def __call__(self, arrays: Arrays, timeout_s: float = 60.0, caller: Hashable = None) -> Arrays:
        """The results of `arrays`. Raises what `function` raised, or BatchError after `timeout_s`."""
        future = self.submit(arrays, caller)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():  # the function's own
                raise
            future.cancel()
            raise BatchError(f"no result within {timeout_s:g} s") from None

    def drop(self, caller: Hashable) -> None:
        """Forgets the requests of a caller that has gone; its futures are cancelled."""
        with self._changed:
            dropped = self._queue.drop(caller)
        for request in dropped:
            request.payload[1].cancel()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the running call; requests that wait get a BatchError."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _check(self, arrays: dict[str, np.ndarray]) -> None:
        signature = _signature_of(arrays)
        if self._signature is not None and signature != self._signature:
            wrong = sorted(
                name
                for name in {*signature, *self._signature}
                if signature.get(name) != self._signature.get(name)
            )
            raise BatchError(f"{', '.join(wrong)}: other names, dtypes or shapes than other callers'")

    def _run(self) -> None:
        while (batch := self._next()) is not None:
            # Who gave up waiting costs nothing any more.
            live = [request for request in batch if request.payload[1].set_running_or_notify_cancel()]
            if live:
                self._serve(live)
        for request in self._queue_emptied():
            if request.payload[1].set_running_or_notify_cancel():
                request.payload[1].set_exception(BatchError("the batcher is closed"))

    def _next(self) -> list[Request[Any]] | None:
        with self._changed:
            while not self._closed:
                wait_s = self._queue.due_in_s()
                if wait_s == 0.0:
                    return self._queue.take_now()
                # Without requests there is nothing to be late for; looking up once a second costs nothing.
                self._changed.wait(1.0 if wait_s is None else wait_s)
            return None

    def _queue_emptied(self) -> list[Request[Any]]:
        with self._changed:
            requests = []
            while len(self._queue):
                requests += self._queue.take_now()
            return requests

    def _serve(self, batch: list[Request[Any]]) -> None:
        try:
            self._call(batch)
        except Exception as error:
            if len(batch) == 1:
                batch[0].payload[1].set_exception(error)
                return
            for request in batch:
                self._serve([request])

    def _call(self, batch: list[Request[Any]]) -> None:
        first = batch[0].payload[0]
        joined = {name: np.concatenate([request.payload[0][name] for request in batch]) for name in first}
        rows = sum(request.rows for request in batch)
        results = self._function(joined)
        wrong = [name for name, array in results.items() if len(array) != rows]
        if wrong:
            raise BatchError(
                f"the batched function gave other than {rows} rows of {', '.join(sorted(wrong))}"
            )
        if self._signature is None:
            self._signature = _signature_of(first)
        self.calls_total += 1
        self.rows_total += rows
        start = 0
        for request in batch:
            part = slice(start, start + request.rows)
            request.payload[1].set_result({name: array[part] for name, array in results.items()})
            start += request.rows


def _signature_of(arrays: dict[str, np.ndarray]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (array.dtype.str, array.shape[1:]) for name, array in arrays.items()}


def _rows_of(arrays: dict[str, np.ndarray]) -> int:
    if not arrays or any(array.ndim == 0 for array in arrays.values()):
        raise BatchError("a request is one or more arrays with rows")
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1:
        raise BatchError(f"the arrays of a request have {', '.join(map(str, sorted(rows)))} rows")
    return rows.pop()
