"""What a replay shard answers to each message."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from common.data.replay import GapError, RefusedError, Replay
from common.wire import messages, sockets
from common.wire.codec import Message, WireError
from common.wire.replay_codec import decode_insert, encode_batch, specs_to_wire
from common.wire.replay_files import SharedFiles

PEER_CREDIT = 64
"""Inserts that one peer may have unacknowledged."""

PARK_S = 0.5
"""How long a request that the limiter blocks is kept before it is answered with WAIT."""

MAX_PARKED = 4096
MAX_PEERS = 4096
MAX_BATCH = 1 << 20


@dataclass
class Parked:
    """A SAMPLE that waits for the limiter."""

    peer: bytes
    message: Message
    deadline_s: float


class Requests:
    """Serves one message at a time and never waits.

    Attributes:
        paused: why writers pause now, empty where they do not.
        rejected: messages that could not be served, by kind.
        blocked_inserts_s: seconds that writers had to pause.
        waits: requests answered with WAIT.
        unsent: answers to peers that were gone.
    """

    def __init__(
        self, replay: Replay, socket: sockets.Socket, session: int, status: Callable[[], dict]
    ) -> None:
        self.paused = ""
        self.rejected: Counter[str] = Counter()
        self.blocked_inserts_s = 0.0
        self.waits = 0
        self.unsent = 0
        self._replay = replay
        self._socket = socket
        self._session = session
        self._status = status
        self._files = SharedFiles(replay.folder)
        self._parked: deque[Parked] = deque()
        self._writers: OrderedDict[bytes, None] = OrderedDict()  # the one heard last is last
        self._paused_since_s = 0.0
        self._handlers = {
            messages.INSERT: self._insert,
            messages.SAMPLE: self._sample,
            messages.PRIORITIES: self._priorities,
            messages.CREDIT: self._credit,
            messages.STATUS: self._on_status,
        }

    def serve(self, peer: bytes, message: Message) -> None:
        """Do what ``message`` says. Raises WireError for what is no proper request."""
        handler = self._handlers.get(message.type)
        if handler is None:
            raise WireError("bad_type", f"replay does not serve {message.type}")
        try:
            handler(peer, message)
        except RefusedError as error:
            self.refuse(peer, message, error.kind, error.detail)

    def refuse(self, peer: bytes, message: Message, kind: str, detail: str) -> None:
        """Answer with ERROR, and count."""
        self.rejected[kind] += 1
        fields = {"kind": kind, "detail": detail[:1000], "about": message.type}
        self._send(peer, Message(messages.ERROR, fields, {}, message.request_id))

    # ---------------------------------------------------------------- between messages

    @property
    def parked(self) -> int:
        """Requests that wait for the limiter."""
        return len(self._parked)

    def serve_parked(self) -> None:
        """Answer parked requests that can be served now, in order, and those that have waited too long."""
        now_s = time.monotonic()
        blocked: dict[tuple[str, int], str] = {}
        for _ in range(len(self._parked)):
            parked = self._parked.popleft()
            message = parked.message
            key = (message.fields["table"], message.fields["batch_size"])
            reason = blocked.get(key)
            if reason is None:
                reason = self._try(parked.peer, message)
                if reason is None:
                    continue
                blocked[key] = reason
            if now_s < parked.deadline_s:
                self._parked.append(parked)
            else:
                self.waits += 1
                self._send(parked.peer, Message(messages.WAIT, {"reason": reason}, {}, message.request_id))

    def grant_credit(self) -> None:
        """Tell the writers when they should pause, and when they may go on."""
        reason = self._replay.insert_blocked() or ""
        if bool(reason) == bool(self.paused):
            self.paused = reason
            return
        now_s = time.monotonic()
        if reason:
            self._paused_since_s = now_s
        else:
            self.blocked_inserts_s += now_s - self._paused_since_s
        self.paused = reason
        for peer in list(self._writers):
            if not self._send(peer, self._grant(0)):
                self._writers.pop(peer, None)

    # ---------------------------------------------------------------- one message type each

    def _insert(self, peer: bytes, message: Message) -> None:
        self._note_writer(peer)
        try:
            self._replay.insert(decode_insert(message))
        except GapError as gap:
            fields = {"kind": "gap", "detail": str(gap), "about": message.type, "expected": gap.expected}
            self._send(peer, Message(messages.ERROR, fields, {}, message.request_id))
            return
        fields = {"credit": 0 if self.paused else PEER_CREDIT}
        self._send(peer, Message(messages.INSERTED, fields, {}, message.request_id))

    def _sample(self, peer: bytes, message: Message) -> None:
        message.fields = {
            "table": message.text("table", "default", max_chars=64),
            "batch_size": message.integer("batch_size", low=1, high=MAX_BATCH),
            "plain": message.boolean("plain", False),
            "token": message.text("token", "", max_chars=64),
        }
        if self._parked or self._try(peer, message) is not None:
            if len(self._parked) >= MAX_PARKED:
                raise RefusedError("too_many", f"{MAX_PARKED} requests wait already")
            self._parked.append(Parked(peer, message, time.monotonic() + PARK_S))

    def _try(self, peer: bytes, message: Message) -> str | None:
        """Serve a SAMPLE, or return why it has to wait."""
        fields = message.fields
        table, batch_size = fields["table"], fields["batch_size"]
        mapped = self._files.proven(fields["token"])
        try:
            sample = self._replay.sample(table, batch_size, plain=fields["plain"], places_only=mapped)
        except RefusedError as error:
            self.refuse(peer, message, error.kind, error.detail)
            return None
        if isinstance(sample, str):
            return sample
        specs = self._replay.specs or ()
        self._send(peer, encode_batch(table, sample, specs, message.request_id))
        return None

    def _priorities(self, peer: bytes, message: Message) -> None:
        ids, priorities = message.array("ids", "uint64", 1), message.array("priorities", "float64", 1)
        if len(ids) != len(priorities):
            raise WireError("bad_field", "ids and priorities differ in length")
        self._replay.update(message.text("table", "default", max_chars=64), ids, priorities)

    def _credit(self, peer: bytes, message: Message) -> None:
        self._note_writer(peer)
        answer = self._grant(message.request_id)
        if self._replay.specs:
            answer.fields["fields"] = specs_to_wire(self._replay.specs)
        if self._files.offer:
            answer.fields["files"] = self._files.offer
        self._send(peer, answer)

    def _on_status(self, peer: bytes, message: Message) -> None:
        self._send(peer, Message(messages.STATUS_OK, self._status(), {}, message.request_id))

    # ---------------------------------------------------------------- helpers

    def _grant(self, request_id: int) -> Message:
        fields = {
            "credit": 0 if self.paused else PEER_CREDIT,
            "reason": self.paused,
            "session": self._session,
        }
        return Message(messages.CREDIT, fields, {}, request_id)

    def _note_writer(self, peer: bytes) -> None:
        self._writers[peer] = None
        self._writers.move_to_end(peer)
        if len(self._writers) > MAX_PEERS:
            self._writers.popitem(last=False)

    def _send(self, peer: bytes, message: Message) -> bool:
        sent = sockets.send(self._socket, message, peer)
        self.unsent += not sent
        return sent
