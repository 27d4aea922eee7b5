"""Any order of messages, deaths and full disks: a shard does what a short model says, and nothing else."""

import errno
import os
import random
import shutil
import tempfile
from collections import deque
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import zmq
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import UNSET

from tests.harness import CHAOS
from tests.replay.model import Chunk, Model, ModelTable, Producer, Request
from tests.replay.storage.replays import open_tables
from troupe.common import system
from troupe.common.data.schema import FieldSpec
from troupe.common.wire import messages
from troupe.common.wire.codec import decode, encode
from troupe.common.wire.replay.codec import specs_to_wire
from troupe.services.replay.requests import PARK_S, RequestHandlers
from troupe.services.replay.storage.store import DISK_RETRY_S

STEPS = 3
"""Of the longest chunk; every step is an item."""
NOISE_BYTES = 1 << 17
"""Of a step: a few of them are more than a shard takes from the disk at once."""
EXAMPLES = 2000 if CHAOS else 60
SPECS = (FieldSpec("number", "int64", ()), FieldSpec("noise", "uint8", (NOISE_BYTES,)))
TABLES = {
    "default": ModelTable(capacity=8, min_items=2, ratio=2.0, error=8.0),
    "queue": ModelTable(capacity=4, queue=True),
}
TEXTS = (
    "default:capacity=8,min_items=2,samples_per_insert=2,samples_per_insert_error=8",
    "queue:limiter=queue,capacity=4",
)
PRIORITIES = st.sampled_from([0.0, 0.5, 1.0, 30.0])
PRODUCERS = st.sampled_from([101, 102])


class Sent:
    """Tells that ZeroMQ has sent a message."""

    done = True


class Outbox:
    """Stands where the ROUTER is: keeps what is sent to those that are there, in order."""

    def __init__(self):
        self.messages = deque()
        self.unsent = []
        self.gone = set()

    def send_multipart(self, parts, flags=0, copy=True, track=False):
        peer, *frames = parts
        if peer in self.gone:
            self.unsent.append(decode([zmq.Frame(bytes(frame)) for frame in frames]))
            raise zmq.ZMQError(errno.EHOSTUNREACH)
        self.messages.append((peer, decode([zmq.Frame(bytes(frame)) for frame in frames])))
        return Sent() if track else None


class Shard(RuleBasedStateMachine):
    """Sends to the handlers of a shard, and has the model follow what they answer."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="model-"))
        self.model = Model({name: ModelTable(**_limits(table)) for name, table in TABLES.items()})
        self.numbers = self.requests_made = self.session = 0
        self.now_s, self.disk_is_full, self.disk_was_full = 1000.0, False, False
        self.real = {name: getattr(system, name) for name in ("monotonic", "time", "random")}
        system.monotonic = system.time = lambda: self.now_s
        system.random = random.Random(7)
        self.allocate = os.posix_fallocate
        os.posix_fallocate = self._allocate
        self.written = {}
        self.outbox = Outbox()
        self._start()

    def _start(self):
        self.session += 1
        self.evicted_early = 0
        self.replay = open_tables(self.folder, *TEXTS, seed=self.session)
        self.handlers = RequestHandlers(self.replay, self.outbox, self.session, dict)

    def _allocate(self, *args):
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.allocate(*args)

    def teardown(self):
        os.posix_fallocate = self.allocate
        for name, value in self.real.items():
            setattr(system, name, value)
        self.replay.close()
        shutil.rmtree(self.folder)

    # ---------------------------------------------------------------- messages

    def say(self, peer, body, number=0):
        """One message, through the codec; then what the loop of the service does, and what came of it."""
        frames = [zmq.Frame(bytes(frame)) for frame in encode(body.message(number))]
        self.handlers.serve(peer, decode(frames, limits=messages.REPLAY_LIMITS))
        self.follow()
        self.handlers.advance()
        self.follow()
        self._leave_early()
        if not self.disk_was_full:
            self.model.check_nothing_is_due()

    def _leave_early(self):
        """On a full disk chunks may go, but not those of a queue; only then, and they stay gone."""
        table = self.model.tables["default"]
        there = first_numbers(self.replay, "default") if self.replay.store else {}
        before = len(table.items)
        table.items = deque(item for item in table.items if item.number in there)
        assert self.disk_was_full or len(table.items) == before, "an item left early"

    def follow(self):
        """Tell the model what was sent; an answer to one that has gone is none, and its batch is put back."""
        evicted_early = self.replay.counters.evicted_early_items
        if evicted_early > self.evicted_early:  # before the insert that they made room for, in tables as well
            self.evicted_early = evicted_early
            self._leave_early()
        for message in self.outbox.unsent:
            self.model.forget(b"learner", message.request_id)
        self.outbox.unsent.clear()
        while self.outbox.messages:
            peer, message = self.outbox.messages.popleft()
            if message.type == messages.Batch.TYPE:
                body = messages.Batch.of(message)
                self.model.batch(
                    peer, message.request_id, body.data["number"][:, 0].tolist(), body.ids.tolist()
                )
            elif message.type == messages.Wait.TYPE:
                self.model.wait(peer, message.request_id)
            elif message.type == messages.Inserted.TYPE:
                self.model.inserted(self.model.producers[int(peer)], message.request_id)
            elif message.type == messages.Error.TYPE:
                self._refusal(peer, messages.Error.of(message), message.request_id)
            else:
                assert message.type == messages.Credit.TYPE
                self.credit = messages.Credit.of(message)

    def _refusal(self, peer, error, number):
        assert error.about == messages.Insert.TYPE, error.detail
        producer = self.model.producers[int(peer)]
        if error.kind == "gap":
            expected = (producer.held[-1] if producer.held else producer.settled) + 1
            assert error.expected == expected < number
            self.gaps += 1
        else:
            assert error.kind in ("bad_items", "not_stored"), error.detail
            self.model.refused(producer, number)

    # ---------------------------------------------------------------- rules

    @rule(
        who=PRODUCERS,
        tables=st.sampled_from([("default",), ("queue",), ("default", "queue")]),
        steps=st.integers(1, STEPS),
        priority=PRIORITIES,
        bad=st.sampled_from([False, False, False, True]),
    )
    def insert(self, who, tables, steps, priority, bad):
        producer = self.model.producers.setdefault(who, Producer())
        items = [(self.numbers + i, priority) for i in range(steps)]
        self.numbers += steps
        sequence = max(producer.chunks, default=0) + 1
        producer.chunks[sequence] = Chunk(dict.fromkeys(tables, items), bad)
        self.send(who, sequence)

    @precondition(lambda self: self.model.producers)
    @rule(data=st.data())
    def send_again(self, data):
        """Any that was sent before: as a client does that has heard nothing, and as no client should."""
        who = data.draw(st.sampled_from(sorted(self.model.producers)))
        self.send(who, data.draw(st.sampled_from(sorted(self.model.producers[who].chunks))))

    def send(self, who, sequence):
        producer = self.model.producers[who]
        newest = producer.held[-1] if producer.held else producer.settled
        if sequence == newest + 1:
            producer.held.append(sequence)  # the answer takes it out, at once where there is room
        self.gaps = 0
        self.written.setdefault(who, set()).update(producer.chunks[sequence].items)
        self.say(str(who).encode(), _insert(who, producer.chunks[sequence]), sequence)
        assert self.gaps == (sequence > newest + 1)

    @rule(
        peer=st.sampled_from([b"learner", b"other"]),
        table=st.sampled_from(sorted(TABLES)),
        count=st.integers(1, 4),
    )
    def sample(self, peer, table, count):
        self.requests_made += 1
        self.model.waiting.append(Request(peer, self.requests_made, table, count))
        self.say(peer, messages.Sample(table=table, batch_size=count), self.requests_made)

    @rule(table=st.sampled_from(sorted(TABLES)), priority=PRIORITIES, data=st.data())
    def update(self, table, priority, data):
        """Of an item that is there, that was there, or that never was; or with what is no priority."""
        known = sorted(self.model.tables[table].ids) or [1]
        chosen = data.draw(st.one_of(st.sampled_from(known), st.integers(0, 2**64 - 1)))
        wrong = data.draw(st.sampled_from([None, None, float("nan"), -1.0, float("inf")]))
        value = priority if wrong is None else wrong
        body = messages.Priorities(
            table=table, ids=np.array([chosen], np.uint64), priorities=np.array([value], np.float64)
        )
        if wrong is None:
            self.model.tables[table].update(chosen, priority)
        self.say(b"learner", body)

    @rule(who=PRODUCERS)
    def ask_for_credit(self, who):
        """Credit is zero just where each table that this one writes to, or may, has its writers pause."""
        peer = str(who).encode()
        self.say(peer, messages.CreditQuestion(incarnation=who), 1)
        producer = self.model.producers.get(who, Producer())
        assert self.credit.session == self.session
        assert (producer.held[0] if producer.held else UNSET) == self.credit.held
        if not self.disk_is_full:
            pausing = {name for name, table in self.model.tables.items() if table.pauses()}
            written = self.written.get(who)
            expected = bool(pausing & written) if written else pausing == set(TABLES)
            assert (self.credit.credit == 0) == expected, self.credit.reason

    @rule(seconds=st.sampled_from([0.1, PARK_S, 10.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.handlers.advance()
        self.follow()
        if seconds >= PARK_S:
            assert not self.model.waiting, "a request was kept for longer than it may be"

    @rule()
    def die(self):
        """What was acknowledged is in the files; what waited is for those who sent it to send again."""
        self.replay.close()
        self.outbox = Outbox()
        self.model.restart()
        self.written = {}
        full, self.disk_is_full = self.disk_is_full, False  # what there is has its room
        self._start()
        self.disk_is_full = full

    @rule(gone=st.booleans())
    def lose_the_learner(self, gone):
        """What cannot be sent to it stays for others."""
        self.outbox.gone = {b"learner"} if gone else set()

    @rule(full=st.booleans())
    def fill_the_disk(self, full):
        self.disk_is_full = full
        self.disk_was_full |= full
        self.now_s += 2 * DISK_RETRY_S  # and where there is room again, it is seen by now
        self.handlers.advance()
        self.follow()
        self._leave_early()

    # ---------------------------------------------------------------- what is there

    @invariant()
    def the_tables_hold_what_the_model_holds(self):
        if self.replay.store is None:
            assert not any(table.items for table in self.model.tables.values())
            return
        for name, table in self.model.tables.items():
            there = first_numbers(self.replay, name)
            assert sorted(there) == sorted(item.number for item in table.items)
            for item in table.items:
                item_id, priority = there[item.number]
                assert item.item_id in (None, item_id)
                assert priority == item.priority
            limiter = self.replay.tables[name].limiter
            assert (limiter.inserted, limiter.sampled) == (table.inserted, table.sampled)


def _limits(table):
    return {name: getattr(table, name) for name in ("capacity", "queue", "min_items", "ratio", "error")}


def first_numbers(replay, name):
    """Number -> id and priority of every item of a table."""
    table = replay.tables[name]
    slots = table.filled()
    items = table.items(slots)
    if not len(slots):
        return {}
    places = (items[key].astype(np.int64) for key in ("row", "offset", "length"))
    numbers = replay.store.gather(*places)["number"][:, 0].tolist()
    told = zip(items["id"].tolist(), table.priorities(slots).tolist(), strict=True)
    return dict(zip(numbers, told, strict=True))


def _insert(who, chunk):
    """An INSERT whose steps tell their numbers."""
    tables = dict(chunk.items)
    first, priority = next(iter(tables.values()))[0]
    steps = len(next(iter(tables.values())))
    numbers, count = np.arange(first, first + steps), steps * len(tables)
    offsets = np.tile(np.arange(steps, dtype=np.int32), len(tables))
    return messages.Insert(
        incarnation=who,
        tables=[(name, steps) for name in tables],
        steps=steps,
        fields=specs_to_wire(SPECS),
        offsets=offsets + steps * chunk.bad,  # behind the end of the chunk
        lengths=np.ones(count, np.int32),
        priorities=np.full(count, priority),
        data={
            "number": numbers,
            "noise": np.repeat(numbers % 256, NOISE_BYTES).astype(np.uint8).reshape(steps, -1),
        },
        sizes={},
    )


Shard.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestShard = Shard.TestCase
