"""The client of a replay shard: inserts that arrive exactly once, pipelined samples, priorities, status."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from common.data.fields import Chunk, FieldSpec
from common.errors import AuthError, CheckpointError, ConfigError, PeerError, TroupeError
from common.runtime.logging import Throttle
from common.wire import messages, sockets
from common.wire.batch_reader import ArrayPool, BatchReader
from common.wire.codec import Buffer, Message, WireError, decode, encode
from common.wire.member import new_incarnation
from common.wire.replay_codec import SampleBatch, encode_insert, infer_specs

__all__ = ["ReplayClient", "ReplayRefusedError", "SampleBatch"]

_log = logging.getLogger(__name__)

PING_S = 0.5
SAMPLE_PATIENCE_S = 10.0
SNAPSHOT_PATIENCE_S = 60.0
"""To begin a snapshot, a server may be busy for some time."""
GARBAGE_LOG_PERIOD_S = 60.0
"""Seconds between two lines about bad messages of one kind."""


class ReplayRefusedError(TroupeError):
    """The server will never serve this request. ``kind`` is a word to branch on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"replay refused: {detail} ({kind})")
        self.kind = kind


@dataclass
class _Insert:
    """An insert that is not acknowledged: its frames after the header, and the ping that followed it."""

    message: Message
    sent_at_ping: int = -1  # -1: not sent on this connection yet


@dataclass
class _Request:
    """A sample request that is not answered."""

    shares: Mapping[str, int]  # rows by table
    number: int  # that the caller knows; messages may have later ones
    windows: bool = False  # not the places: those that were answered last had gone
    token: str = ""  # that it was sent with
    sent_s: float = 0.0  # 0: not sent yet


class ReplayClient:
    """One connection to one replay shard, for use by one thread.

    Nothing blocks but ``flush``, ``receive``, ``sample`` and ``status``, each for as long as it is told. Call
    ``poll`` now and then (inserting and receiving do it too): it handles what the server sent, sends again
    what got lost, and makes a new connection when the server has been silent for ``liveness_s``.

    Attributes:
        endpoint: address of the server.
        incarnation: number that names this client's inserts.
        blocked_reason: why the next insert would be refused, empty where it would not.
        wait_reason: why the server had nothing to sample lately, empty where it had.
        batch_bytes: bytes of the arrays of the batch received last, as they were on the wire.
        counters: what happened, by name.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        ctx: sockets.Context | None = None,
        name: str = "client",
        incarnation: int | None = None,
        specs: Sequence[FieldSpec] | None = None,
        max_outstanding: int = 64,
        liveness_s: float = 10.0,
        security: sockets.Security | None = None,
        map_files: bool = True,
        pool: ArrayPool | None = None,
    ) -> None:
        """Prepare a connection; nothing has to be there yet.

        Args:
            endpoint: ``tcp://HOST:PORT`` or ``ipc://PATH``.
            ctx: ZeroMQ context, the process's own by default.
            name: for logs.
            incarnation: random number of this process (see ``new_incarnation``), chosen by default.
            specs: the fields of the chunks to insert; by default inferred from the first chunk.
            max_outstanding: most inserts sent and not acknowledged.
            liveness_s: silence after which a new connection is made.
            security: keys.
            map_files: read the server's files where it is on the same host, instead of having windows sent.
            pool: where batches get their arrays from, if several clients should share them.
        """
        self.endpoint = endpoint
        self.incarnation = incarnation or new_incarnation()
        self.blocked_reason = "no answer yet"
        self.wait_reason = ""
        self.batch_bytes = 0
        self.counters = dict.fromkeys(
            (
                *("inserts", "resends", "batches", "mapped_batches", "gone_batches", "waits"),
                *("reconnects", "bad_messages", "lost_updates"),
            ),
            0,
        )
        self._ctx: sockets.Context = ctx or zmq.Context.instance()
        self._name = name
        self._specs = tuple(specs) if specs else None
        self._max_outstanding = max_outstanding
        self._liveness_s = liveness_s
        self._security = security.toward("replay") if security else None
        self._credit = 0
        self._credit_reason = ""
        self._session: int | None = None
        self._sequence = 0
        self._requests_made = 0
        self._pings = 0
        self._inserts: OrderedDict[int, _Insert] = OrderedDict()
        self._unsent: deque[int] = deque()
        self._samples: OrderedDict[int, _Request] = OrderedDict()
        self._batches: deque[tuple[Message, _Request]] = deque()
        self._reader = BatchReader(pool, map_files=map_files)
        self._updates: deque[list[Buffer]] = deque(maxlen=64)
        self._answer: dict[str, Any] | None = None
        self._failure: TroupeError | None = None
        self._sockets_made = 0
        self._backoff = sockets.Backoff(0.2, 5.0)
        self._wait_log = sockets.WaitLog()
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
        self._socket = self._connect()

    # ---------------------------------------------------------------- inserting

    @property
    def outstanding(self) -> int:
        """Inserts that are not acknowledged yet."""
        return len(self._inserts)

    @property
    def credit(self) -> int:
        """Inserts that the server lets this client have unacknowledged; zero while it wants a pause."""
        return self._credit

    @property
    def paused(self) -> bool:
        """Whether the server answers, and wants no inserts at present."""
        return self._session is not None and self._credit == 0

    def insert(self, chunk: Chunk, table: str = "default") -> bool:
        """Send ``chunk``; False, with ``blocked_reason``, where it has to wait: keep it and try again.

        Its own items go to ``table``, those of ``chunk.more`` to theirs; its arrays may be reused at once.
        """
        if self.outstanding >= min(self._credit, self._max_outstanding):
            self.poll(0)
            if self.outstanding >= min(self._credit, self._max_outstanding):
                return False
        if self._specs is None:
            self._specs = infer_specs(chunk)
        message = encode_insert(chunk, self._specs, table)
        self._sequence += 1
        message.request_id = self._sequence
        message.fields["incarnation"] = self.incarnation
        message.fields["name"] = self._name
        self._inserts[self._sequence] = _Insert(message)
        self._unsent.append(self._sequence)
        self.counters["inserts"] += 1
        self._send_pending()
        self._explain_block()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until every insert is acknowledged; False where some are not after ``timeout_s``."""
        return self._wait_until(lambda: not self._inserts, timeout_s)

    # ---------------------------------------------------------------- sampling

    @property
    def outstanding_samples(self) -> int:
        """Batches requested and not received."""
        return len(self._samples) + len(self._batches)

    def request_sample(self, batch_size: int | Mapping[str, int], table: str = "default") -> int:
        """Ask for a batch; any number of requests may be on their way. Returns the request's number.

        ``batch_size`` may say how many rows to take from each of several tables, in their order.
        """
        shares = {table: batch_size} if isinstance(batch_size, int) else dict(batch_size)
        number = self._add_request(shares)
        self._send_pending()
        return number

    def receive(self, timeout_s: float) -> SampleBatch | None:
        """The next batch that was requested, unpacked; None after ``timeout_s`` (see ``wait_reason``)."""
        deadline_s = time.monotonic() + timeout_s
        while self._wait_until(lambda: bool(self._batches), deadline_s - time.monotonic()):
            message, request = self._batches.popleft()
            try:
                batch = self._reader.read(message)
            except WireError as error:
                self._count_bad(error)
                continue
            windows = "rows" not in message.arrays and not message.boolean("consumed", False)
            if request.token and windows and self._reader.refused(request.token):
                self._ping_s = 0.0  # another process, it seems: let it introduce itself
            if batch is None:  # overwritten before it was read: have it sent this time
                self.counters["gone_batches"] += 1
                self._add_request(request.shares, request.number, windows=True)
                self._send_pending()
                continue
            self.counters["batches"] += 1
            self.counters["mapped_batches"] += "rows" in message.arrays
            self.batch_bytes = sum(array.nbytes for array in message.arrays.values())
            self.wait_reason = ""
            batch.request_id = request.number
            return batch
        return None

    def recycle(self, batch: SampleBatch) -> None:
        """Let a later batch use the arrays of this one, which has no fields any more.

        Optional, and worth it: fresh memory costs as much as what is written to it.
        """
        self._reader.recycle(batch)

    def cancel_samples(self) -> None:
        """Forget the batches that were requested and have not come."""
        self._samples.clear()

    def sample(
        self, batch_size: int | Mapping[str, int], table: str = "default", timeout_s: float = 60.0
    ) -> SampleBatch:
        """Request one batch and wait for it. Raises PeerError after ``timeout_s``."""
        self.request_sample(batch_size, table)
        batch = self.receive(timeout_s)
        if batch is None:
            self.cancel_samples()
            raise PeerError(f"no batch from replay at {self.endpoint}: {self.wait_reason or 'no answer'}")
        return batch

    def update_priorities(
        self, ids: NDArray[np.uint64], priorities: NDArray[np.float64], table: str = "default"
    ) -> None:
        """Set the raw priorities of items. Not acknowledged: an update may get lost with a connection."""
        arrays = {
            "ids": np.array(ids, np.uint64),
            "priorities": np.array(priorities, np.float64),
        }
        if len(self._updates) == self._updates.maxlen:
            self.counters["lost_updates"] += 1
        self._updates.append(encode(Message(messages.PRIORITIES, {"table": table}, arrays)))
        self._send_pending()

    def update(self, batch: SampleBatch, priorities: NDArray[np.float64]) -> None:
        """``update_priorities`` of every row of ``batch``, each in the table that it comes from."""
        for table, rows in batch.rows().items():
            self.update_priorities(batch.ids[rows], priorities[rows], table)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Sizes, rates and counters of the server. Raises PeerError after ``timeout_s``."""
        return self._ask(Message(messages.STATUS), timeout_s)

    def snapshot(self, destination: str, timeout_s: float = 3600.0) -> dict[str, Any]:
        """Have the server copy what it holds to ``destination``, and wait until that is done.

        Args:
            destination: absolute path on the server's host, or address such as ``s3://BUCKET/PATH``; new.
            timeout_s: until PeerError is raised. The server goes on with it.

        Returns:
            The fields of SNAPSHOT_OK. Raises CheckpointError where the copy could not be written.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            progress = self._ask(
                Message(messages.SNAPSHOT, {"destination": destination}), min(timeout_s, SNAPSHOT_PATIENCE_S)
            )
            if progress["state"] == "failed":
                raise CheckpointError(f"no snapshot in {destination}: {progress['detail']}")
            if progress["state"] == "done":
                return progress
            if time.monotonic() > deadline_s:
                raise PeerError(f"the snapshot in {destination} is not complete after {timeout_s:g} s")
            self._wait_until(lambda: False, 0.2)

    def _ask(self, question: Message, timeout_s: float) -> dict[str, Any]:
        """The fields of the answer. Raises PeerError after ``timeout_s``."""
        self._answer = None
        deadline_s = time.monotonic() + timeout_s
        sent = False
        while self._answer is None and time.monotonic() < deadline_s:
            sent = sent or sockets.send(self._socket, question)
            self.poll(50)
        if self._answer is None:
            raise PeerError(f"replay at {self.endpoint} does not answer")
        return self._answer

    # ---------------------------------------------------------------- the connection

    def poll(self, timeout_ms: float = 0) -> None:
        """Handle what the server has sent, waiting for at most ``timeout_ms``, and send what has to be sent.

        Raises ReplayRefusedError where the server will not serve something that was asked of it, and
        AuthError where it turns us away for our keys.
        """
        self._send_pending()
        self._look_after()
        if self._socket.poll(int(timeout_ms)):
            while (frames := sockets.receive_frames(self._socket)) is not None:
                self._heard_s = time.monotonic()
                try:
                    self._handle(decode(frames))
                except WireError as error:
                    self._count_bad(error)
            self._send_pending()
        self._explain_block()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def socket(self) -> sockets.Socket:
        """The present socket, to be polled for reading together with others."""
        return self._socket

    @property
    def silent_s(self) -> float:
        """Seconds since the server was heard, counted while something is awaited of it."""
        return time.monotonic() - self._heard_s

    def close(self, linger_s: float = 1.0) -> None:
        """Close the connection; what was sent last still gets ``linger_s`` to leave. Does not ``flush``."""
        self._watch.close()
        self._socket.close(linger=int(linger_s * 1000))

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self.poll(0)
                return condition()
            self.poll(min(left_s * 1000 + 1, 200))
        return True

    def _connect(self) -> sockets.Socket:
        """A fresh socket, with everything that is unanswered to be sent again."""
        self._sockets_made += 1
        identity = (
            f"{self._name[:64]}-{self.incarnation:x}-{id(self) & 0xFFFFFF:x}-{self._sockets_made}".encode()
        )
        self._watch = sockets.make_watch(self.endpoint, self._security)
        socket = sockets.make_dealer(self._ctx, self.endpoint, identity, self._security, watch=self._watch)
        self._heard_s = time.monotonic()
        self._ping_s = 0.0
        self._patience_s = self._liveness_s
        self._send_again()
        return socket

    def _send_again(self) -> None:
        """Mark everything that is unanswered as not sent."""
        self.counters["resends"] += sum(insert.sent_at_ping >= 0 for insert in self._inserts.values())
        for insert in self._inserts.values():
            insert.sent_at_ping = -1
        self._unsent = deque(self._inserts)
        for number, request in list(self._samples.items()):
            if request.sent_s:
                self._renew(number)

    def _look_after(self) -> None:
        """Ping a silent server while something is awaited of it, and give up a dead connection."""
        self._watch.check()
        now_s = time.monotonic()
        if now_s - self._ping_s >= PING_S and (
            now_s - self._heard_s >= PING_S or not self._ping_s or not self._credit
        ):
            self._ping(now_s)
        waiting = bool(self._inserts or self._samples) or self._session is None or not self._credit
        if not waiting:
            self._heard_s = max(self._heard_s, now_s - PING_S)
            return
        if now_s - self._heard_s > self._patience_s:
            self.counters["reconnects"] += 1
            self._watch.close()
            self._socket.close(linger=0)
            self._socket = self._connect()
            self._patience_s = self._liveness_s + self._backoff.next_s()
        if now_s - self._heard_s > 2.0:
            self.blocked_reason = f"replay at {self.endpoint} does not answer"
            if self._wait_log.due():
                _log.info(
                    "%s waits for replay at %s since %.0f s",
                    self._name,
                    self.endpoint,
                    self._wait_log.waited_s,
                )
        for number, request in list(self._samples.items()):
            # Parked requests are answered within a second: this one, or its answer, got lost.
            if (
                request.sent_s
                and now_s - request.sent_s > SAMPLE_PATIENCE_S
                and now_s - self._heard_s < PING_S
            ):
                self._renew(number)

    def _ping(self, now_s: float) -> None:
        """Ask for the credit. The answer overtakes nothing, so it tells which inserts got lost."""
        self._ping_s = now_s
        fields = {"incarnation": self.incarnation, "name": self._name}
        if sockets.send(self._socket, Message(messages.CREDIT, fields, {}, self._pings + 1)):
            self._pings += 1

    def _send_pending(self) -> None:
        """Send what has not been sent: inserts in order, requests, priorities."""
        while self._unsent:
            insert = self._inserts.get(self._unsent[0])
            if insert is not None:
                insert.message.fields["oldest"] = next(iter(self._inserts))
                if not sockets.send(self._socket, insert.message):
                    break
                insert.sent_at_ping = self._pings
            self._unsent.popleft()
        for number, request in self._samples.items():
            if request.sent_s:
                continue
            fields: dict[str, Any] = {"shares": [list(share) for share in request.shares.items()]}
            if len(request.shares) == 1:
                table, count = next(iter(request.shares.items()))
                fields = {"table": table, "batch_size": count}
            fields |= self._reader.request_fields(windows=request.windows)
            request.token = str(fields.get("token", ""))
            if not sockets.send(self._socket, Message(messages.SAMPLE, fields, {}, number)):
                break
            request.sent_s = time.monotonic()
        while self._updates and sockets.send_frames(self._socket, self._updates[0]):
            self._updates.popleft()

    def _renew(self, number: int) -> None:
        """Ask again for a batch, under a new number so that a late answer to the old one is told apart."""
        old = self._samples.pop(number)
        self._add_request(old.shares, old.number, windows=old.windows)

    def _add_request(self, shares: Mapping[str, int], number: int = 0, *, windows: bool = False) -> int:
        """A new request, or another one for the batch that the caller knows by ``number``."""
        self._requests_made += 1
        number = number or self._requests_made
        self._samples[self._requests_made] = _Request(shares, number, windows)
        return number

    # ---------------------------------------------------------------- what the server says

    def _handle(self, message: Message) -> None:
        kind = message.type
        if kind == messages.BATCH:
            request = self._samples.pop(message.request_id, None)
            if request is not None:
                self._batches.append((message, request))
        elif kind == messages.INSERTED:
            self._inserts.pop(message.request_id, None)
            self._credit = message.integer("credit", high=2**31)
        elif kind == messages.CREDIT:
            self._on_credit(message)
        elif kind == messages.WAIT:
            self.counters["waits"] += 1
            self.wait_reason = message.text("reason", "")
            if message.request_id in self._samples:
                self._renew(message.request_id)
        elif kind in (messages.STATUS_OK, messages.SNAPSHOT_OK):
            self._answer = message.fields
        elif kind == messages.ERROR:
            self._on_error(message)
        else:
            raise WireError("bad_type", f"a replay server does not send {kind}")

    def _on_credit(self, message: Message) -> None:
        self._credit = message.integer("credit", high=2**31)
        self._credit_reason = message.text("reason", "")
        session = message.integer("session")
        if self._session is not None and session != self._session:
            _log.info("%s: replay at %s has been restarted", self._name, self.endpoint)
            self._send_again()
        if session != self._session:
            self._reader.connected(message)
        self._session = session
        self._backoff.reset()
        self._wait_log = sockets.WaitLog()
        held = message.integer("held", 2**64 - 1)  # from here on inserts wait for room
        lost = [
            n
            for n, insert in self._inserts.items()
            if 0 <= insert.sent_at_ping < message.request_id and n < held
        ]
        if lost:  # acknowledgements come in order, so these would be here by now
            self._send_from(lost[0])

    def _send_from(self, number: int) -> None:
        """Send ``number`` and what follows it again: the server takes inserts in order only."""
        for sequence, insert in self._inserts.items():
            if sequence >= number and insert.sent_at_ping >= 0:
                self.counters["resends"] += 1
                insert.sent_at_ping = -1
        self._unsent = deque(n for n, insert in self._inserts.items() if insert.sent_at_ping < 0)

    def _on_error(self, message: Message) -> None:
        kind, detail = message.text("kind", ""), message.text("detail", "")
        if kind == "gap":
            self._send_from(message.integer("expected"))
            return
        about_insert = message.text("about", "") == messages.INSERT
        if about_insert:
            self._inserts.pop(message.request_id, None)
        else:
            self._samples.pop(message.request_id, None)
        error = {"signature": ConfigError, messages.REFUSED_KEY: AuthError}.get(kind)
        text = f"replay at {self.endpoint} refused: {detail}"
        self._failure = error(text) if error else ReplayRefusedError(kind, detail)

    def _explain_block(self) -> None:
        if self._session is None:
            self.blocked_reason = f"replay at {self.endpoint} does not answer"
        elif self._credit == 0:
            self.blocked_reason = self._credit_reason or "no credit"
        elif self.outstanding >= min(self._credit, self._max_outstanding):
            self.blocked_reason = "inserts are not acknowledged yet"
        else:
            self.blocked_reason = ""

    def _count_bad(self, error: WireError) -> None:
        self.counters["bad_messages"] += 1
        if self._throttle(error.kind):
            count = self.counters["bad_messages"]
            _log.warning(
                "%s: bad message from replay at %s: %s (%d so far)", self._name, self.endpoint, error, count
            )
