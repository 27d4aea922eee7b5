"""What a replay shard answers to each message."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from common.data.inserts import GapError, HeldError, Insert, RefusedError
from common.data.replay import Replay
from common.wire import messages, sockets
from common.wire.codec import Message, WireError
from common.wire.replay_codec import decode_insert, decode_shares, encode_batch, specs_to_wire
from common.wire.replay_files import SharedFiles
from services.replay.held import HeldInserts
from services.replay.rejections import Rejections
from services.replay.snapshots import Snapshots
from services.replay.statistics import Statistics
from services.replay.unread import UnreadBatches

PEER_CREDIT = 64
"""Inserts that one peer may have unacknowledged."""

QUEUE_CREDIT = 2
"""The same for a peer that writes to a queue: what waits for room there is getting old."""

PARK_S = 0.5
"""How long a request that the limiter blocks is kept before it is answered with WAIT."""

MAX_PARKED = 4096
MAX_PARKED_PER_PEER = 64
"""So many of one peer's requests may wait for the limiter; one that asks for more harms itself only."""

MAX_PEERS = 4096


@dataclass
class Parked:
    """A SAMPLE that waits for the limiter."""

    peer: bytes
    message: Message
    deadline_s: float


class Requests:
    """Serves one message at a time and never waits.

    Attributes:
        paused: by table, why its writers pause now; only the tables whose writers do.
        rejections: messages that could not be served.
        held: inserts that wait for room in a queue.
        statistics: what inserts and batches were like.
        snapshots: those that were asked for.
        waits: requests answered with WAIT.
        unsent: answers to peers that were gone.
    """

    def __init__(
        self,
        replay: Replay,
        socket: sockets.Socket,
        session: int,
        status: Callable[[], dict],
        snapshots: Snapshots | None = None,
    ) -> None:
        self.paused: dict[str, str] = {}
        self.rejections = Rejections()
        self.held = HeldInserts()
        self.statistics = Statistics(replay)
        self.snapshots = snapshots or Snapshots(replay)
        self.waits = 0
        self.unsent = 0
        self._replay = replay
        self._socket = socket
        self._session = session
        self._status = status
        self._files = SharedFiles(replay.folder)
        self._parked: deque[Parked] = deque()
        self._parked_by_peer: Counter[bytes] = Counter()
        self._unread = UnreadBatches()
        # The tables that each has inserted into. The one heard last is last.
        self._writers: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._tables = frozenset(replay.tables)
        self._queues = frozenset(name for name, table in replay.tables.items() if table.config.is_queue)
        self._paused_since_s: dict[str, float] = {}
        self._blocked_s = dict.fromkeys(replay.tables, 0.0)
        self._handlers = {
            messages.INSERT: self._insert,
            messages.SAMPLE: self._sample,
            messages.PRIORITIES: self._priorities,
            messages.CREDIT: self._credit,
            messages.STATUS: self._on_status,
            messages.SNAPSHOT: self._on_snapshot,
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
        self.rejections.count(peer, kind)
        fields = {"kind": kind, "detail": detail[:1000], "about": message.type}
        self._send(peer, Message(messages.ERROR, fields, {}, message.request_id))

    # ---------------------------------------------------------------- between messages

    @property
    def parked(self) -> int:
        """Requests that wait for the limiter."""
        return len(self._parked)

    def advance(self) -> None:
        """Do what waits, as far as it can be done now, and tell writers whether to go on."""
        self.serve_parked()
        while len(self.held) and self.held.serve(self._store):
            self.serve_parked()
        self.grant_credit()

    def serve_parked(self) -> None:
        """Answer parked requests that can be served now, in order, and those that have waited too long."""
        self._replay.expire_leases()
        now_s = time.monotonic()
        blocked: dict[tuple[tuple[str, int], ...], str] = {}
        for _ in range(len(self._parked)):
            parked = self._parked.popleft()
            message = parked.message
            key = tuple(message.fields["shares"].items())
            reason = self._unread.blocked(parked.peer) or blocked.get(key)
            if reason is None:
                reason = self._try(parked.peer, message)
                if reason is None:
                    self._leave(parked.peer)
                    continue
                blocked[key] = reason
            if now_s < parked.deadline_s:
                self._parked.append(parked)
            else:
                self.waits += 1
                self._leave(parked.peer)
                self._send(parked.peer, Message(messages.WAIT, {"reason": reason}, {}, message.request_id))

    def _leave(self, peer: bytes) -> None:
        """Count one parked request of ``peer`` less."""
        self._parked_by_peer[peer] -= 1
        if not self._parked_by_peer[peer]:
            del self._parked_by_peer[peer]

    def grant_credit(self) -> None:
        """Tell the writers when they should pause, and when they may go on."""
        before, self.paused = self.paused, self._replay.insert_blocked()
        changed = before.keys() ^ self.paused.keys()
        if not changed:
            return
        now_s = time.monotonic()
        for name in changed:
            if name in self.paused:
                self._paused_since_s[name] = now_s
            else:
                self._blocked_s[name] += now_s - self._paused_since_s.pop(name)
        for peer, tables in list(self._writers.items()):
            concerned = not changed.isdisjoint(tables or self._tables)
            if concerned and not self._send(peer, self._grant(peer, 0)):
                self._writers.pop(peer, None)

    def blocked_s(self, table: str) -> float:
        """Seconds that the writers of ``table`` had to pause, until now."""
        since_s = self._paused_since_s.get(table)
        return self._blocked_s[table] + (time.monotonic() - since_s if since_s is not None else 0.0)

    # ---------------------------------------------------------------- one message type each

    def _insert(self, peer: bytes, message: Message) -> None:
        insert = decode_insert(message)
        self._note_writer(peer, self._tables & insert.items.keys())
        held = self.held.first(insert.incarnation)
        try:
            if (held is not None and insert.sequence >= held) or not self._store(peer, insert):
                self.held.add(peer, insert)
        except GapError as gap:
            self._send_gap(peer, insert, gap)

    def _store(self, peer: bytes, insert: Insert) -> bool:
        """Store an insert and answer; False while a queue has no room for it."""
        try:
            self._replay.insert(insert)
        except HeldError:
            return False
        except GapError as gap:
            self._send_gap(peer, insert, gap)
        except RefusedError as error:
            self.refuse(peer, Message(messages.INSERT, request_id=insert.sequence), error.kind, error.detail)
        else:
            self.statistics.inserted(insert.version)
            fields = {"credit": self._credit_of(peer)}
            self._send(peer, Message(messages.INSERTED, fields, {}, insert.sequence))
        return True

    def _send_gap(self, peer: bytes, insert: Insert, gap: GapError) -> None:
        fields = {"kind": "gap", "detail": str(gap), "about": messages.INSERT, "expected": gap.expected}
        self._send(peer, Message(messages.ERROR, fields, {}, insert.sequence))

    def _sample(self, peer: bytes, message: Message) -> None:
        message.fields = {
            "shares": decode_shares(message),
            "plain": message.boolean("plain", False),
            "token": message.text("token", "", max_chars=64),
        }
        if self._parked or self._unread.blocked(peer) or self._try(peer, message) is not None:
            if self._parked_by_peer[peer] >= MAX_PARKED_PER_PEER:
                raise RefusedError("too_many", f"{MAX_PARKED_PER_PEER} requests of yours wait already")
            if len(self._parked) >= MAX_PARKED:
                raise RefusedError("too_many", f"{MAX_PARKED} requests wait already")
            self._parked_by_peer[peer] += 1
            self._parked.append(Parked(peer, message, time.monotonic() + PARK_S))

    def _try(self, peer: bytes, message: Message) -> str | None:
        """Serve a SAMPLE, or return why it has to wait."""
        fields = message.fields
        mapped = self._files.proven(fields["token"])
        try:
            sample = self._replay.draw(fields["shares"], plain=fields["plain"], places=mapped)
        except RefusedError as error:
            self.refuse(peer, message, error.kind, error.detail)
            return None
        if isinstance(sample, str):
            return sample
        specs = self._replay.specs or ()
        batch = encode_batch(sample, specs, message.request_id)
        if mapped and sample.arrays:
            batch.fields["consumed"] = True
        tracker = sockets.send_tracked(self._socket, batch, peer)
        self.unsent += tracker is None
        if tracker is not None:  # or else the peer has gone, and what a queue holds is for another
            self._unread.add(peer, tracker, sum(array.nbytes for array in batch.arrays.values()))
            self._replay.count_sampled(sample)
            self.statistics.sampled(sample)
        return None

    def _priorities(self, peer: bytes, message: Message) -> None:
        ids, priorities = message.array("ids", "uint64", 1), message.array("priorities", "float64", 1)
        if len(ids) != len(priorities):
            raise WireError("bad_field", "ids and priorities differ in length")
        self._replay.update(message.text("table", "default", max_chars=64), ids, priorities)

    def _credit(self, peer: bytes, message: Message) -> None:
        self._note_writer(peer, frozenset())
        answer = self._grant(peer, message.request_id)
        held = self.held.first(message.integer("incarnation", 0))
        if held is not None:
            answer.fields["held"] = held
        parked = [each.message.request_id for each in self._parked if each.peer == peer]
        if parked:
            answer.fields["parked"] = parked
        if self._replay.specs:
            answer.fields["fields"] = specs_to_wire(self._replay.specs)
        if self._files.offer:
            answer.fields["files"] = self._files.offer
        self._send(peer, answer)

    def _on_status(self, peer: bytes, message: Message) -> None:
        self._send(peer, Message(messages.STATUS_OK, self._status(), {}, message.request_id))

    def _on_snapshot(self, peer: bytes, message: Message) -> None:
        destination = message.text("destination", "", max_chars=1024)
        fields = self.snapshots.request(destination, message.text("token", "", max_chars=64))
        self._send(peer, Message(messages.SNAPSHOT_OK, fields, {}, message.request_id))

    # ---------------------------------------------------------------- helpers

    def _grant(self, peer: bytes, request_id: int) -> Message:
        fields = {
            "credit": self._credit_of(peer),
            "reason": self._pause_of(peer),
            "session": self._session,
        }
        return Message(messages.CREDIT, fields, {}, request_id)

    def _pause_of(self, peer: bytes) -> str:
        """Why this writer should pause; empty where it need not. One that has not written may yet, to all."""
        tables = self._writers.get(peer) or self._tables
        return next((reason for name, reason in self.paused.items() if name in tables), "")

    def _credit_of(self, peer: bytes) -> int:
        if self._pause_of(peer):
            return 0
        tables = self._writers.get(peer) or self._tables
        return PEER_CREDIT if self._queues.isdisjoint(tables) else QUEUE_CREDIT

    def _note_writer(self, peer: bytes, tables: frozenset[str]) -> None:
        self._writers[peer] = self._writers.get(peer, frozenset()) | tables
        self._writers.move_to_end(peer)
        if len(self._writers) > MAX_PEERS:
            self._writers.popitem(last=False)

    def _send(self, peer: bytes, message: Message) -> bool:
        sent = sockets.send(self._socket, message, peer)
        self.unsent += not sent
        return sent
