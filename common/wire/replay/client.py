"""The client of a replay shard: inserts that arrive exactly once, pipelined samples, priorities, status."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from msgspec import UNSET
from numpy.typing import ArrayLike

from troupe.common import system
from troupe.common.data.arena import DamagedChunksError
from troupe.common.data.packing import Packer
from troupe.common.data.schema import Chunk, FieldSpec, with_arrays
from troupe.common.errors import CheckpointError, ConfigError, PeerError, TroupeError
from troupe.common.runtime.logging import Throttle
from troupe.common.wire import messages, sockets
from troupe.common.wire.body import Body
from troupe.common.wire.codec import Buffer, Message, WireError, encode
from troupe.common.wire.link import Link, Question, new_incarnation
from troupe.common.wire.rejections import GARBAGE_LOG_PERIOD_S
from troupe.common.wire.replay.batch_reader import AHEAD, ArrayPool, BatchReader, Reading
from troupe.common.wire.replay.codec import SampleBatch, encode_insert, infer_specs
from troupe.common.wire.replay.pending import (
    Inserts,
    Pings,
    ReplayRefusedError,
    SampleRequest,
    SampleRequests,
    refusal,
)
from troupe.common.wire.replay.sampler import Sampler

__all__ = ["ReplayClient", "ReplayRefusedError", "SampleBatch"]

_log = logging.getLogger(__name__)

COUNTERS = (
    *("inserts", "resends", "batches", "mapped_batches", "gone_batches", "damaged_batches", "waits"),
    *("reconnects", "bad_messages", "lost_updates"),
    *("entry_bytes", "block_bytes", "pack_us", "unpack_us", "received_bytes"),
)
SAMPLE_PATIENCE_S = 5.0
"""The server answers a request within a second: after this it is asked whether the request got lost."""
SNAPSHOT_PATIENCE_S = 60.0
"""To begin a snapshot, a server may be busy for some time."""
ASK_AGAIN_S = 1.0
"""What was asked too often for the server is asked again after this."""
REFUSED_PAUSE_S = 0.5
"""What came as nonsense, or was too much for the server, is asked for again after this."""


@dataclass
class _Arrived:
    """A BATCH, what it answers, and the reading of it, where a thread has begun with that."""

    message: Message
    request: SampleRequest
    started: Reading | None = None


class ReplayClient(Sampler):
    """One connection to one replay shard, for use by one thread.

    Nothing blocks but `flush`, `receive`, `sample` and `status`, each for as long as it is told. Call
    `poll` now and then (inserting and receiving do it too): it handles what the server sent, sends again
    what got lost, and makes a new connection when the server has been silent for `liveness_s`.

    Attributes:
        endpoint: address of the server.
        incarnation: number that names this client's inserts.
        blocked_reason: why the next insert would be refused, empty where it would not.
        wait_reason: why the server had nothing to sample lately, empty where it had.
        fault: what the server did wrong since the last batch, empty where nothing.
        specs: the fields of the chunks to insert, once they are known.
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
        retry_samples: bool = True,
        tolerate_refusals: bool = False,
        expected: Sequence[FieldSpec] | None = None,
    ) -> None:
        """Prepare a connection; nothing has to be there yet.

        Args:
            endpoint: `tcp://HOST:PORT` or `ipc://PATH`.
            ctx: ZeroMQ context, the process's own by default.
            name: for logs.
            incarnation: random number of this process (see `new_incarnation`), chosen by default.
            specs: the fields of the chunks to insert; by default inferred from the first chunk.
            max_outstanding: most inserts sent and not acknowledged.
            liveness_s: silence after which a new connection is made.
            security: keys.
            map_files: read the server's files where it is on the same host, instead of having windows sent.
            pool: where batches get their arrays from, if several clients should share them.
            retry_samples: ask again where there is no batch yet; or else leave that to `take_turned_down`.
            tolerate_refusals: where keys are in the way, or a sample is refused, log it and try again now
                and then, instead of raising an error.
            expected: the fields that batches have; by default those that the server says.
        """
        self.endpoint = endpoint
        self.incarnation = incarnation or new_incarnation()
        self.blocked_reason = "no answer yet"
        self.wait_reason = ""
        self.fault = ""
        self.batch_bytes = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._name = name
        self.specs = tuple(specs) if specs else None
        # A packer for each field: it remembers whether the field's entries shrink at all.
        self._packers: dict[str, Packer] = defaultdict(Packer)
        self._max_outstanding = max_outstanding
        self._credit = 0
        self._credit_reason = ""
        self._session: int | None = None
        self._inserts = Inserts()
        self._requests = SampleRequests(retry_samples=retry_samples)
        # Unpacked only in `receive`: `poll` may be called from within an insert, where decompression would be
        # a surprise.
        self._batches: deque[_Arrived] = deque()
        self._tolerate_refusals = tolerate_refusals
        self._reader = BatchReader(pool, map_files=map_files, expected=expected)
        # Bounded: priorities age, and while a shard is away the newest are worth most.
        self._updates: deque[list[Buffer]] = deque(maxlen=64)
        self._questions = self._question = 0  # those asked, and the one that is not answered
        self._answer: Message | None = None
        self._inserts_put_off = False
        # Kept until `poll` raises it: messages are handled in the midst of other work, where nobody expects
        # an error.
        self._failure: TroupeError | None = None
        self._throttle = Throttle(GARBAGE_LOG_PERIOD_S)
        self._pings = Pings(name, self.incarnation)
        self._link = Link(
            ctx or zmq.Context.instance(),
            endpoint,
            "replay",
            name=name,
            incarnation=self.incarnation,
            liveness_s=liveness_s,
            security=security,
            retry_auth=tolerate_refusals,
        )
        self._link.connect()

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
        """Send `chunk`; False, with `blocked_reason`, where it has to wait: keep it and try again.

        Its own items go to `table`, those of `chunk.more` to theirs; its arrays may be reused at once,
        and may be lists. Raises ConfigError for a chunk that does not fit the `specs`.
        """
        if self.outstanding >= min(self._credit, self._max_outstanding):
            # The answer that gives credit may have come already.
            self.poll(0)
            if self.outstanding >= min(self._credit, self._max_outstanding):
                return False
        chunk = with_arrays(chunk, self.specs)
        if self.specs is None:
            self.specs = infer_specs(chunk)
        insert = encode_insert(
            chunk, self.specs, table, self._packers, incarnation=self.incarnation, name=self._name
        )
        self._inserts.add(insert)
        self.counters["inserts"] += 1
        self._count_packed()
        self._send_pending()
        self._explain_block()
        return True

    def _count_packed(self) -> None:
        packers, counters = self._packers.values(), self.counters
        counters["entry_bytes"] = sum(packer.entry_bytes for packer in packers)
        counters["block_bytes"] = sum(packer.block_bytes for packer in packers)
        counters["pack_us"] = round(sum(packer.seconds for packer in packers) * 1e6)

    def flush(self, timeout_s: float) -> bool:
        """Wait until every insert is acknowledged; False where some are not after `timeout_s`."""
        return self._wait_until(lambda: not self._inserts, timeout_s)

    # ---------------------------------------------------------------- sampling

    @property
    def outstanding_samples(self) -> int:
        """Batches requested and not received."""
        return len(self._requests) + len(self._batches)

    @property
    def no_batch_reason(self) -> str:
        """Why no batch comes, for an error."""
        return f"no batch from {self._link}: {self.wait_reason or 'no answer'}"

    def request_sample(self, batch_size: int | Mapping[str, int], table: str = "default") -> int:
        """Ask for a batch; any number of requests may be on their way. Returns the request's number.

        `batch_size` may say how many rows to take from each of several tables, in their order.
        """
        shares = {table: batch_size} if isinstance(batch_size, int) else dict(batch_size)
        number = self._requests.add(shares)
        self._send_pending()
        return number

    def receive(self, timeout_s: float) -> SampleBatch | None:
        """The next batch that was requested, unpacked; None after `timeout_s` (see `wait_reason`)."""
        deadline_s = system.monotonic() + timeout_s
        while self._wait_until(lambda: bool(self._batches), deadline_s - system.monotonic()):
            self._read_ahead()
            arrived = self._batches.popleft()
            message, request = arrived.message, arrived.request
            began_s = system.perf_counter()
            try:
                batch = self._reader.read(message, request.shares, arrived.started)
            except DamagedChunksError as damaged:  # for the shard to look at, and to leave out
                self.counters["damaged_batches"] += 1
                self._requests.ask_for_windows(message.request_id, request.shares, damaged.rows)
                self._send_pending()
                continue
            except (WireError, MemoryError) as error:
                wrong = error if isinstance(error, WireError) else WireError("memory", "no memory for it")
                self._link.bad(wrong)
                self._note_bad(wrong.detail)
                self._requests.turn_down(message.request_id, request, REFUSED_PAUSE_S)
                continue
            windows = "rows" not in message.arrays and not message.fields.get("consumed", False)
            # We asked for places and got data: the token was another process's, on another host or after a
            # restart.
            if request.token and windows and self._reader.refused(request.token):
                self._pings.soon()  # another process, it seems: let it introduce itself
            if batch is None:  # overwritten before it was read: have it sent this time
                self.counters["gone_batches"] += 1
                self._requests.ask_for_windows(message.request_id, request.shares)
                self._send_pending()
                continue
            self.counters["batches"] += 1
            self.counters["mapped_batches"] += "rows" in message.arrays
            self.batch_bytes = sum(array.nbytes for array in message.arrays.values())
            self.counters["received_bytes"] += self.batch_bytes
            self.counters["unpack_us"] += round((system.perf_counter() - began_s) * 1e6)
            self.wait_reason = self.fault = ""
            batch.request_id = message.request_id
            return batch
        return None

    def _read_ahead(self) -> None:
        """Have the next batches read, while the first of them is used."""
        for arrived in itertools.islice(self._batches, AHEAD):
            if arrived.started is None:
                arrived.started = self._reader.start(arrived.message, arrived.request.shares)

    def recycle(self, batch: SampleBatch) -> None:
        """Let a later batch use the arrays of this one, which has no fields any more.

        Optional, and worth it: fresh memory costs as much as what is written to it.
        """
        self._reader.recycle(batch)

    def cancel_samples(self) -> None:
        """Forget the batches that were requested and not received."""
        self._requests.clear()
        self._batches.clear()

    def take_turned_down(self) -> list[int]:
        """Numbers of the requests that a client that does not insist has given up since the last call."""
        return self._requests.take_turned_down()

    def update_priorities(
        self, ids: ArrayLike, priorities: ArrayLike, table: str = "default", *, chosen: bool = False
    ) -> None:
        """Set the raw priorities of items. Not acknowledged: an update may get lost with a connection.

        `chosen`: these were candidates, and are learned from.
        """
        arrays = {"ids": np.array(ids, np.uint64), "priorities": np.array(priorities, np.float64)}
        if arrays["ids"].shape != arrays["priorities"].shape or arrays["ids"].ndim != 1:
            shapes = [array.shape for array in arrays.values()]
            raise ConfigError("ids of the shape {} and priorities of the shape {}".format(*shapes))
        # Counted, since the deque drops the oldest without a word.
        if len(self._updates) == self._updates.maxlen:
            self.counters["lost_updates"] += 1
        self._updates.append(encode(messages.Priorities(table=table, chosen=chosen, **arrays).message()))
        self._send_pending()

    def update(
        self,
        batch: SampleBatch,
        priorities: ArrayLike,
        tables: Collection[str] | None = None,
        *,
        chosen: bool = False,
    ) -> None:
        """`update_priorities` of every row of `batch`, each in the table that it comes from.

        Only those of `tables`, where these are given: what came from a queue has left it.
        """
        values = np.asarray(priorities, np.float64)
        if values.shape != batch.ids.shape:
            raise ConfigError(f"priorities of the shape {values.shape} for a batch of {len(batch.ids)}")
        for table, rows in batch.rows().items():
            if tables is None or table in tables:
                self.update_priorities(batch.ids[rows], values[rows], table, chosen=chosen)

    def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """Sizes, rates and counters of the server. Raises PeerError after `timeout_s`."""
        return messages.StatusOk.of(self._ask(messages.Status(), timeout_s)).values

    def snapshot(self, destination: str, timeout_s: float = 3600.0) -> dict[str, Any]:
        """Have the server copy what it holds to `destination`, and wait until that is done.

        Args:
            destination: absolute path on the server's host, or address such as `s3://BUCKET/PATH`; new.
            timeout_s: until PeerError is raised. The server goes on with it.

        Returns:
            The fields of SNAPSHOT_OK. Raises CheckpointError where the copy could not be written.
        """
        deadline_s = system.monotonic() + timeout_s
        question = messages.SnapshotRequest(destination=destination, token=system.random.randbytes(8).hex())
        while True:
            answer = self._ask(question, min(timeout_s, SNAPSHOT_PATIENCE_S))
            progress = messages.SnapshotOk.of(answer)
            if progress.state == "failed":
                raise CheckpointError(f"no snapshot in {destination}: {progress.detail}")
            if progress.state == "done":
                return answer.fields
            if system.monotonic() > deadline_s:
                raise PeerError(f"the snapshot in {destination} is not complete after {timeout_s:g} s")
            # A pause in which the connection is still looked after.
            self._wait_until(lambda: False, 0.2)

    def _ask(self, question: Body, timeout_s: float) -> Message:
        """The answer. Raises PeerError after `timeout_s`."""
        self._questions += 1
        self._question = self._questions
        self._answer = None
        deadline_s = system.monotonic() + timeout_s
        pending, session = Question(question.message(self._question), again_s=ASK_AGAIN_S), self._session
        try:
            while self._answer is None and system.monotonic() < deadline_s:
                if session != self._session:  # a new process: the question went with the old one
                    session = self._session
                    pending.repeat()
                pending.send(self._link)
                self.poll(50)
        finally:
            self._question = 0
        if self._answer is None:
            raise PeerError(f"{self._link} does not answer")
        return self._answer

    # ---------------------------------------------------------------- the connection

    def poll(self, timeout_ms: float = 0) -> None:
        """Handle what the server has sent, waiting for at most `timeout_ms`, and send what has to be sent.

        Raises ReplayRefusedError where the server will not serve something that was asked of it, and
        AuthError where it turns us away for our keys.
        """
        heard = self._receive()
        self._look_after()
        self._send_pending()
        if self._link.wait(0 if heard else timeout_ms):
            self._receive()
            self._send_pending()
        self._explain_block()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @property
    def socket(self) -> sockets.Socket:
        """The present socket, to be polled for reading together with others."""
        return self._link.socket

    @property
    def silent_s(self) -> float:
        """Seconds since the server was heard, counted while something is awaited of it."""
        return self._link.silent_s

    @property
    def silence(self) -> str:
        """That the server does not answer, where something has been awaited of it for a while; or empty."""
        if self._link.refusal:
            return self._link.refusal
        return f"{self._link} does not answer" if self._link.silent else ""

    def close(self, linger_s: float = 1.0) -> None:
        """Close the connection; what was sent last still gets `linger_s` to leave. Does not `flush`."""
        self._link.close(linger_s)

    def _wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = system.monotonic() + timeout_s
        while not condition():
            left_s = deadline_s - system.monotonic()
            if left_s <= 0:
                self.poll(0)
                return condition()
            self.poll(min(left_s * 1000 + 1, 200))
        return True

    def _receive(self) -> bool:
        """Handle everything that has come; False where nothing has."""
        heard = False
        for message in self._link.receive():
            heard = True
            try:
                self._handle(message)
            except WireError as error:
                self._link.bad(error)
        if self._link.bad_messages > self.counters["bad_messages"]:
            self._note_bad("no message")
        return heard

    def _look_after(self) -> None:
        """Have the connection kept alive, and everything that is pending sent again over a new one."""
        pending = len(self._inserts) + len(self._requests) + self._question
        # Without credit the server owes us the news that there is some, so silence means something then too.
        waiting = pending > 0 or self._session is None or not self._credit
        # And pings are answered at once. The one that is sent now does not count: the caller may have been
        # away for longer than silence is borne.
        waiting = waiting or self._pings.unanswered(self._link)
        asking = not self._credit or self._inserts_put_off or self._requests.overdue(SAMPLE_PATIENCE_S)
        self._pings.send(self._link, asking=asking)
        if self._link.maintain(waiting=waiting):
            self.counters["reconnects"] += 1
            self._pings.soon()
            self.counters["resends"] += self._inserts.repeat()
            self._requests.repeat()

    def _send_pending(self) -> None:
        """Send what has not been sent: inserts in order, requests, priorities."""
        self._inserts.send(self._link.send, self._pings.sent)
        self._requests.send(
            self._link.send,
            self._pings.sent,
            lambda request: "" if request.windows else self._reader.files.token,
        )
        while self._updates and self._link.send_frames(self._updates[0]):
            self._updates.popleft()

    # ---------------------------------------------------------------- what the server says

    def _handle(self, message: Message) -> None:
        kind, number = message.type, message.request_id
        if kind == messages.Batch.TYPE:
            request = self._requests.answered(number)
            if request is not None:
                self._batches.append(_Arrived(message, request))
        elif kind == messages.Inserted.TYPE:
            self._inserts.answered(number)
            self._credit = messages.Inserted.of(message).credit
            self._credit_reason = "" if self._credit else self._credit_reason
        elif kind == messages.Credit.TYPE:
            self._on_credit(messages.Credit.of(message), number)
        elif kind == messages.Wait.TYPE:
            self.counters["waits"] += 1
            self.wait_reason = messages.Wait.of(message).reason
            self._requests.turn_down(number)
        elif kind in (messages.StatusOk.TYPE, messages.SnapshotOk.TYPE):
            if number == self._question:
                self._answer = message
        elif kind == messages.Error.TYPE:
            self._on_error(messages.Error.of(message), number)
        else:
            raise WireError("bad_type", f"a replay server does not send {kind}")

    def _on_credit(self, body: messages.Credit, ping: int) -> None:
        self._credit, self._credit_reason = body.credit, body.reason
        if body.session != self._session:
            if self._session is not None:
                if self._throttle("restarted"):
                    _log.info("%s: %s has been restarted", self._name, self._link)
                self._pings.soon()  # the answer tells what got lost with the old process
            self._session = body.session
            # Another process may have other files, even at the same address.
            self._reader.connected(body)
        self._link.welcomed()
        self._inserts_put_off = False
        self._requests.ping_answered(ping, [] if body.parked is UNSET else body.parked)
        held = 2**64 - 1 if body.held is UNSET else body.held
        self.counters["resends"] += self._inserts.ping_answered(ping, held)

    def _on_error(self, body: messages.Error, number: int) -> None:
        if body.kind == "gap" and body.expected is not UNSET:
            self.counters["resends"] += self._inserts.repeat(body.expected)
            return
        if body.kind in messages.ASK_AGAIN_KINDS:
            self.wait_reason = body.detail
            if body.about == messages.Insert.TYPE:
                self._credit_reason = body.detail
                self._inserts_put_off = True  # the answer to the next ping has it sent again
            elif body.about not in (messages.Status.TYPE, messages.SnapshotRequest.TYPE):  # with own numbers
                self._requests.turn_down(number, pause_s=REFUSED_PAUSE_S)
            return
        failure = refusal(self.endpoint, body.kind, body.detail)
        inserted = body.about == messages.Insert.TYPE and self._inserts.answered(number)
        asked = body.about in (messages.Status.TYPE, messages.SnapshotRequest.TYPE)
        if asked and number != self._question:
            return  # the answer to a question that was sent twice
        if self._tolerate_refusals and not (inserted or asked):
            self.fault = self.wait_reason = str(failure)
            self._requests.turn_down(number, pause_s=REFUSED_PAUSE_S)
            return
        if body.about == messages.Sample.TYPE:
            self._requests.answered(number)
        self._failure = failure

    def _explain_block(self) -> None:
        if self._session is None or self._link.silent:
            self.blocked_reason = self.silence or f"{self._link} does not answer"
        elif self._credit == 0:
            self.blocked_reason = self._credit_reason or "no credit"
        elif self.outstanding >= min(self._credit, self._max_outstanding):
            self.blocked_reason = self._credit_reason or "inserts are not acknowledged yet"
        else:
            self.blocked_reason = ""

    def _note_bad(self, detail: str) -> None:
        """Note that the server has sent what cannot be used."""
        self.counters["bad_messages"] = self._link.bad_messages
        self.fault = self.wait_reason = f"it sends unusable data: {detail}"
