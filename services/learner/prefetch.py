"""Keeps sampled batches ready: one thread that talks to every replay shard."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import zmq

from common.wire.replay_client import ReplayClient, SampleBatch

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.01


@dataclass(frozen=True)
class ReadyBatch:
    """A batch and where it came from."""

    shard: str
    sample: SampleBatch
    shards: int
    """Live shards when it was drawn: each is asked for as many batches as any other."""


class Prefetcher:
    """Requests batches ahead of the learner, unpacks them, and returns priorities.

    `depth` batches are requested or ready at any time, shared evenly between the shards. All sockets belong
    to the thread; the learner sees two queues.
    """

    def __init__(
        self,
        context: zmq.Context,
        shards: Callable[[], list[str]],
        *,
        batch_size: int,
        depth: int,
        incarnation: int,
    ) -> None:
        self._context = context
        self._shards = shards
        self._batch_size = batch_size
        self._depth = depth
        self._incarnation = incarnation
        self._ready: queue.Queue[ReadyBatch] = queue.Queue()
        self._priorities: queue.Queue[tuple[str, np.ndarray, np.ndarray]] = queue.Queue()
        self._clients: dict[str, ReplayClient] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._failure: BaseException | None = None
        self.wait_reason = "no replay shard has joined"
        self.waited_s = 0.0

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Sends what priorities are left and ends the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def get(self, timeout_s: float) -> ReadyBatch | None:
        """The next batch, or None after `timeout_s`; `wait_reason` then says what is missing."""
        if self._failure is not None:
            raise self._failure
        began = time.monotonic()
        try:
            return self._ready.get(timeout=timeout_s)
        except queue.Empty:
            return None
        finally:
            self.waited_s += time.monotonic() - began

    def put_priorities(self, batch: ReadyBatch, priorities: np.ndarray) -> None:
        """Sends new priorities `[B]` float64 of a batch's items back to its shard; never blocks."""
        self._priorities.put((batch.shard, batch.sample.ids, priorities))

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._follow_shards()
                self._send_priorities()
                self._request()
                self._receive()
            self._send_priorities()
        except (
            BaseException
        ) as error:  # handed to the learner's loop: a silent death would look like starvation
            self._failure = error
        finally:
            for client in self._clients.values():
                client.close()

    def _follow_shards(self) -> None:
        live = self._shards()
        for endpoint in live:
            if endpoint not in self._clients:
                log.info("sampling from replay at %s", endpoint)
                self._clients[endpoint] = ReplayClient(
                    endpoint, ctx=self._context, name="learner", incarnation=self._incarnation
                )
        for endpoint in [known for known in self._clients if known not in live]:
            log.warning("replay at %s is gone", endpoint)
            self._clients.pop(endpoint).close()
        if not self._clients:
            self.wait_reason = "no replay shard has joined"
            self._stop.wait(0.1)

    def _send_priorities(self) -> None:
        while True:
            try:
                shard, ids, priorities = self._priorities.get_nowait()
            except queue.Empty:
                return
            if shard in self._clients:
                self._clients[shard].update_priorities(ids, priorities)

    def _request(self) -> None:
        if not self._clients:
            return
        wanted = self._depth - self._ready.qsize()
        share = -(-max(0, wanted) // len(self._clients))
        for client in self._clients.values():
            for _ in range(share - client.outstanding_samples):
                client.request_sample(self._batch_size)

    def _receive(self) -> None:
        for endpoint, client in self._clients.items():
            sample = client.receive(IDLE_POLL_S / len(self._clients))
            if sample is None:
                self.wait_reason = client.wait_reason or f"replay at {endpoint} does not answer"
            else:
                self._ready.put(ReadyBatch(endpoint, sample, len(self._clients)))
