"""What a replay shard answers to each message."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import UNSET

from troupe.common import system
from troupe.common.data.inserts import GapError, HeldError, Insert
from troupe.common.errors import RefusedError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message
from troupe.common.wire.replay.codec import decode_insert, encode_batch, specs_to_wire
from troupe.common.wire.replay.files import SharedFiles
from troupe.common.wire.security import claims
from troupe.common.wire.server import Envelope, Server
from troupe.services.replay.held import HeldInserts
from troupe.services.replay.snapshots import Snapshots
from troupe.services.replay.statistics import Statistics
from troupe.services.replay.storage.group_commit import GroupCommit
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.unread import UnreadBatches

PEER_CREDIT = 64
"""Inserts that one peer may have unacknowledged."""

QUEUE_CREDIT = 2
"""Lower limit for queue writers: a long backlog would make the data stale."""

PARK_S = 0.5
"""How long a request that the limiter blocks is kept before it is answered with WAIT."""

MAX_PARKED = 4096
MAX_PARKED_PER_PEER = 64
"""Requests of one peer that may wait for the limiter; one that asks for more harms itself only."""

MAX_PEERS = 4096

WAITS_FOR = ("items", "ratio", "reader")
"""What requests wait for: inserts, the samples per insert, or a peer that does not read what it was sent."""


@dataclass
class Parked:
    """A SAMPLE that waits for the limiter, and the rows of each table that it asks for."""

    envelope: Envelope
    body: messages.Sample
    shares: dict[str, int]
    deadline_s: float


class RequestHandlers:
    """Serves one message at a time and never waits.

    Attributes:
        paused: by table, why its writers pause now; only the tables whose writers do.
        server: the socket's; counts what could not be served.
        held: inserts that wait for room in a queue.
        statistics: what inserts and batches were like.
        snapshots: those that were asked for.
        waits: requests answered with WAIT.
        waited_s: how long the first request for a batch has waited in all, by what for, one of `WAITS_FOR`.
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
        self.held = HeldInserts()
        self.statistics = Statistics(replay)
        self.snapshots = snapshots or Snapshots(replay)
        self.waits = 0
        self.waited_s = dict.fromkeys(WAITS_FOR, 0.0)
        self._waits_for = ""
        self._waits_since_s = 0.0
        self._replay = replay
        self._session = session
        self._status = status
        self._files = SharedFiles(replay.folder)
        self._commit = GroupCommit(replay.sync) if replay.durable == "power" else None
        self._stored: deque[tuple[int, bytes, int, int]] = deque()  # by the sync that each waits for
        self._status_of: dict[str, claims.Allowance] = {}
        self._parked: deque[Parked] = deque()
        self._parked_by_peer: Counter[bytes] = Counter()
        # Batches that nobody reads stay in ZeroMQ's memory: to be counted, or a silent learner would fill
        # this process.
        self._unread = UnreadBatches()
        # The tables that each has inserted into. The one heard last is last.
        self._writers: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._tables = frozenset(replay.tables)
        self._queues = frozenset(name for name, table in replay.tables.items() if table.config.holds_writers)
        self._paused_since_s: dict[str, float] = {}
        self._blocked_s = dict.fromkeys(replay.tables, 0.0)
        self.server = Server(
            "replay",
            socket,
            {
                messages.Insert: self._insert,
                messages.Sample: self._sample,
                messages.Priorities: self._priorities,
                messages.CreditQuestion: self._credit,
                messages.Status: self._on_status,
                messages.SnapshotRequest: self._on_snapshot,
            },
            limits=messages.REPLAY_LIMITS,
        )

    def serve(self, peer: bytes, message: Message) -> None:
        """Do what `message` says."""
        self.server.serve(peer, message)

    # ---------------------------------------------------------------- between messages

    def wakers(self) -> list[int]:
        """What is readable when `advance` has something to do."""
        return [] if self._commit is None else [self._commit.fileno()]

    @property
    def parked(self) -> int:
        """Requests that wait for the limiter."""
        return len(self._parked)

    def advance(self) -> None:
        """Do what waits, as far as it can be done now, and tell writers whether to go on.

        Raises SyncFailedError.
        """
        if self._commit is not None:
            self._acknowledge_synced(self._commit.check())
        self.serve_parked()
        # Each round may make room for the next: an insert that is stored fills a batch, which empties a
        # queue.
        while len(self.held) and self.held.serve(self._store):
            self.serve_parked()
        self.grant_credit()

    def serve_parked(self) -> None:
        """Answer parked requests that can be served now, in order, and those that have waited too long."""
        self._replay.expire_leases()
        now_s = system.monotonic()
        if self._waits_for:
            self.waited_s[self._waits_for] += now_s - self._waits_since_s
        self._waits_for, self._waits_since_s = "", now_s
        # Requests of one kind wait for the same thing: once one has to, the others need not be tried.
        blocked: dict[tuple[tuple[str, int], ...], str] = {}
        for _ in range(len(self._parked)):
            parked = self._parked.popleft()
            peer, key = parked.envelope.peer, tuple(parked.shares.items())
            unread = self._unread.blocked(peer)
            reason = unread or blocked.get(key)
            if reason is None:
                reason = self._try(parked)
                if reason is None:
                    self._leave(peer)
                    continue
                blocked[key] = reason
            if now_s < parked.deadline_s:
                self._parked.append(parked)
                ratio = "ratio" if reason.startswith("samples per insert") else "items"
                self._waits_for = self._waits_for or ("reader" if unread else ratio)
            else:
                self.waits += 1
                self._leave(peer)
                self.server.send(peer, messages.Wait(reason=reason), parked.envelope.number)

    def _leave(self, peer: bytes) -> None:
        """Count one parked request of `peer` less."""
        self._parked_by_peer[peer] -= 1
        if not self._parked_by_peer[peer]:
            del self._parked_by_peer[peer]

    def grant_credit(self) -> None:
        """Tell the writers when they should pause, and when they may go on."""
        before, self.paused = self.paused, self._replay.insert_blocked()
        changed = before.keys() ^ self.paused.keys()
        if not changed:
            return
        now_s = system.monotonic()
        for name in changed:
            if name in self.paused:
                self._paused_since_s[name] = now_s
            else:
                self._blocked_s[name] += now_s - self._paused_since_s.pop(name)
        for peer, tables in list(self._writers.items()):
            concerned = not changed.isdisjoint(tables or self._tables)
            # Only on a change, and only to those whom it concerns; a lost one is made up for by the next
            # ping.
            if concerned and not self.server.send(peer, self._grant(peer)):
                self._writers.pop(peer, None)

    def blocked_s(self, table: str) -> float:
        """Seconds that the writers of `table` had to pause, until now."""
        since_s = self._paused_since_s.get(table)
        return self._blocked_s[table] + (system.monotonic() - since_s if since_s is not None else 0.0)

    # ---------------------------------------------------------------- one message type each

    def _insert(self, envelope: Envelope, body: messages.Insert) -> None:
        insert, peer = decode_insert(body, envelope.number), envelope.peer
        insert.owner = envelope.key.public or peer.hex()
        self._note_writer(peer, self._tables & insert.items.keys())
        held = self.held.first(insert.incarnation)
        try:
            if (held is not None and insert.sequence >= held) or not self._store(peer, insert):
                self.held.add(peer, insert)
        except GapError as gap:
            self._send_gap(peer, insert, gap)

    def _store(self, peer: bytes, insert: Insert) -> bool:
        """Store an insert and answer; False while a queue has no room for it."""
        with self.server.guard(Envelope(peer, insert.sequence), messages.Insert.TYPE):
            try:
                self._replay.insert(insert)
            except HeldError as error:
                insert.waits_for = str(error)
                return False
            except GapError as gap:
                self._send_gap(peer, insert, gap)
            else:
                self.statistics.inserted(insert.version)
                self._acknowledge(peer, insert.incarnation, insert.sequence)
        return True

    def _acknowledge(self, peer: bytes, incarnation: int, sequence: int) -> None:
        """Say that an insert is stored: at once, or when the disk has it."""
        if self._commit is None:
            self.server.send(peer, messages.Inserted(credit=self._credit_of(peer)), sequence)
        else:
            self._stored.append((self._commit.begin(), peer, incarnation, sequence))

    def _acknowledge_synced(self, done: int) -> None:
        while self._stored and self._stored[0][0] <= done:
            _, peer, incarnation, sequence = self._stored.popleft()
            self._replay.acknowledged(incarnation, sequence)
            self.server.send(peer, messages.Inserted(credit=self._credit_of(peer)), sequence)

    @property
    def unsynced(self) -> int:
        """Inserts that are stored and wait for the disk to be acknowledged."""
        return len(self._stored)

    def close(self) -> None:
        """Acknowledge what the disk still takes, and end."""
        if self._commit is not None:
            self._acknowledge_synced(self._commit.finish())
            self._commit.close()

    def _send_gap(self, peer: bytes, insert: Insert, gap: GapError) -> None:
        error = messages.Error(kind="gap", detail=str(gap), about=messages.Insert.TYPE, expected=gap.expected)
        self.server.send(peer, error, insert.sequence)

    def _sample(self, envelope: Envelope, body: messages.Sample) -> None:
        parked = Parked(envelope, body, body.counts(), system.monotonic() + PARK_S)
        peer = envelope.peer
        # Those that wait come first: a new request that is served at once would starve a larger one.
        if self._parked or self._unread.blocked(peer) or self._try(parked) is not None:
            # Before the limit for all, so that one peer cannot use it up.
            if self._parked_by_peer[peer] >= MAX_PARKED_PER_PEER:
                raise RefusedError(
                    messages.TOO_MANY, f"{MAX_PARKED_PER_PEER} of your requests are waiting already"
                )
            if len(self._parked) >= MAX_PARKED:
                raise RefusedError(messages.TOO_MANY, f"{MAX_PARKED} requests are waiting already")
            self._parked_by_peer[peer] += 1
            self._parked.append(parked)

    def _try(self, parked: Parked) -> str | None:
        """Serve a SAMPLE, or return why it has to wait."""
        with self.server.guard(parked.envelope, messages.Sample.TYPE):
            return self._draw(parked.envelope, parked.body, parked.shares)
        return None

    def _draw(self, envelope: Envelope, body: messages.Sample, shares: dict[str, int]) -> str | None:
        for row in () if body.suspects is UNSET else body.suspects:
            self._replay.check(row)
        mapped = self._files.is_same_host("" if body.token is UNSET else body.token)
        sample = self._replay.draw(shares, plain=body.plain, places=mapped)
        if isinstance(sample, str):
            return sample
        windows = bool(sample.arrays)
        batch = encode_batch(sample, self._replay.specs or (), consumed=mapped and windows)
        message = batch.message(envelope.number)
        self._replay.take(sample)  # first: if we die right after it is sent, nobody must get it again
        try:
            tracker = sockets.send_tracked(self.server.socket, message, envelope.peer)
        except BaseException:
            self._replay.put_back(sample)
            raise
        if tracker is None:  # the peer has gone, and what a queue holds is for another
            self.server.unsent += 1
            self._replay.put_back(sample)
        else:
            size = sum(array.nbytes for array in message.arrays.values())
            self._unread.add(envelope.peer, tracker, size)
            self._replay.count_sampled(sample)
            self.statistics.sampled(sample)
        return None

    def _priorities(self, envelope: Envelope, body: messages.Priorities) -> None:
        self._replay.update(body.table, body.ids, body.priorities, chosen=body.chosen)

    def _credit(self, envelope: Envelope, body: messages.CreditQuestion) -> messages.Credit:
        peer = envelope.peer
        self._note_writer(peer, frozenset())
        answer = self._grant(peer)
        # So that the client does not send again what only waits, for room or for the disk.
        unsynced = (number for _, _, incarnation, number in self._stored if incarnation == body.incarnation)
        held = next(unsynced, self.held.first(body.incarnation))
        parked = [each.envelope.number for each in self._parked if each.envelope.peer == peer]
        answer.held = UNSET if held is None else held
        answer.reason = answer.reason or self.held.reason(body.incarnation)
        answer.parked = parked or UNSET
        answer.fields = specs_to_wire(self._replay.specs) if self._replay.specs else UNSET
        answer.files = dict(self._files.offer) or UNSET
        return answer

    def _on_status(self, envelope: Envelope, body: messages.Status) -> messages.StatusOk:
        key = envelope.key.public
        if key and not self._status_of.setdefault(key, claims.status()).take():
            raise RefusedError(messages.TOO_MANY, "too many STATUS requests with one key")
        return messages.StatusOk(values=self._status())

    def _on_snapshot(self, envelope: Envelope, body: messages.SnapshotRequest) -> messages.SnapshotOk:
        return messages.SnapshotOk(**self.snapshots.request(body.destination, body.token))

    # ---------------------------------------------------------------- helpers

    def _grant(self, peer: bytes) -> messages.Credit:
        credit, reason = self._credit_of(peer), self._pause_of(peer)
        return messages.Credit(credit=credit, reason=reason, session=self._session)

    def _pause_of(self, peer: bytes) -> str:
        """Why this writer should pause; empty where it need not.

        One that has not written yet may write to any table, so it pauses only where all tables do.
        """
        tables = self._writers.get(peer)
        if not tables and len(self.paused) < len(self._tables):
            return ""
        return next((reason for name, reason in self.paused.items() if not tables or name in tables), "")

    def _credit_of(self, peer: bytes) -> int:
        if self._pause_of(peer):
            return 0
        tables = self._writers.get(peer)
        few = not self._queues.isdisjoint(tables) if tables else bool(self._queues or self.paused)
        return QUEUE_CREDIT if few else PEER_CREDIT

    def _note_writer(self, peer: bytes, tables: frozenset[str]) -> None:
        self._writers[peer] = self._writers.get(peer, frozenset()) | tables
        self._writers.move_to_end(peer)
        if len(self._writers) > MAX_PEERS:
            # The one not heard for longest; if it still writes, its next ping puts it back.
            self._writers.popitem(last=False)
