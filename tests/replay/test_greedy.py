"""Peers that ask for more than their share: it is they who wait."""

import functools

import numpy as np
import pytest

from tests.harness import PATIENCE_S, until
from tests.replay.stepped import SteppedShard
from tests.replay.storage.replays import make_insert, open_replay
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message
from troupe.common.wire.server import Envelope
from troupe.services.replay import requests, unread
from troupe.services.replay.storage import producers
from troupe.services.replay.unread import UnreadBatches


@pytest.fixture
def shard(tmp_path, context):
    shard = SteppedShard(tmp_path / "data", context, "tcp://127.0.0.1:*")
    yield shard
    shard.close()


@pytest.fixture
def stranger(context, shard):
    """A function that makes sockets, of peers that need not behave."""
    made = []

    def make(name, **options):
        made.append(sockets.make_dealer(context, sockets.bound_endpoint(shard.router), name, **options))
        return made[-1]

    yield make
    for each in made:
        each.close(0)


def ask(shard, socket, count, **fields):
    """Send requests, and serve what comes."""
    for number in range(count):
        message = Message(messages.Sample.TYPE, {"batch_size": 1} | fields, {}, number + 1)
        until(functools.partial(sockets.send, socket, message), step=shard.serve_all)


def answers(shard, socket, count):
    """The next answers."""
    found = []

    def serve():
        shard.serve_all()
        if socket.poll(5):
            found.append(sockets.receive(socket))

    until(lambda: len(found) >= count, step=serve, why=lambda: found)
    return found


def test_a_flood_of_requests_is_refused_to_the_one_who_floods(shard, stranger, client, monkeypatch):
    monkeypatch.setattr(requests, "PARK_S", PATIENCE_S)
    monkeypatch.setattr(requests, "MAX_PARKED", 100)
    flooder = stranger(b"flooder")
    ask(shard, flooder, 300)
    refused = answers(shard, flooder, 300 - requests.MAX_PARKED_PER_PEER)
    assert {answer.fields["kind"] for answer in refused} == {"too_many"}
    learner = client(sockets.bound_endpoint(shard.router), liveness_s=PATIENCE_S)
    learner.request_sample(1)
    shard.serve_until(learner, lambda: shard.requests.parked == requests.MAX_PARKED_PER_PEER + 1)
    shard.fill(9)
    answers(shard, flooder, 9)
    shard.serve_until(learner, lambda: shard.requests.parked == requests.MAX_PARKED_PER_PEER - 8)
    ask(shard, flooder, 9)  # what was served makes room for others
    shard.serve_until(learner, lambda: shard.requests.parked == requests.MAX_PARKED_PER_PEER + 1)


def test_a_client_that_is_refused_asks_again_later(shard, client, monkeypatch):
    monkeypatch.setattr(requests, "MAX_PARKED_PER_PEER", 2)
    monkeypatch.setattr(requests, "PARK_S", PATIENCE_S)
    learner = client(sockets.bound_endpoint(shard.router), liveness_s=PATIENCE_S)
    for _ in range(5):
        learner.request_sample(1)
    shard.serve_until(learner, lambda: "of your requests" in learner.wait_reason)
    assert learner.outstanding_samples == 5
    shard.fill(5)
    assert sorted(shard.versions(learner, 5)) == [0, 1, 2, 3, 4]
    assert learner.outstanding_samples == 0


def test_credit_says_why_the_inserts_of_a_new_producer_wait(tmp_path, context, monkeypatch):
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 1)
    shard = SteppedShard(tmp_path / "one", context, "tcp://127.0.0.1:*")
    shard.fill(1)
    late = make_insert(1, 0, 4, [0], [4], [1.0], incarnation=8)
    assert not shard.requests._store(b"late", late)
    shard.requests.held.add(b"late", late)
    for incarnation, reason in ((8, "too many producers within a short time"), (9, "")):
        answer = shard.requests._credit(Envelope(b"late"), messages.CreditQuestion(incarnation=incarnation))
        assert answer.credit > 0
        assert answer.reason == reason
    shard.close()


def test_who_does_not_read_gets_no_more_and_others_do(tmp_path, context, shard, stranger, monkeypatch):
    monkeypatch.setattr(unread, "MAX_UNREAD_BYTES", 1 << 23)
    monkeypatch.setattr(requests, "PARK_S", 0.05)
    replay = open_replay(tmp_path / "large", 100)
    shard.requests = requests.RequestHandlers(replay, shard.router, 1, dict)
    replay.insert(make_insert(1, 0, 4, range(4), [1] * 4, np.ones(4)))
    asked, rows = 60, 1 << 16
    lazy, eager = stranger(b"lazy", hwm=1), stranger(b"eager")
    ask(shard, eager, 1, batch_size=rows)
    size = sum(array.nbytes for array in answers(shard, eager, 1)[0].arrays.values())
    ask(shard, lazy, asked, batch_size=rows)
    until(lambda: shard.requests.waits >= 10, step=shard.serve_all, why=lambda: "everything was sent")
    assert shard.requests._unread._bytes[b"lazy"] <= (1 << 23) + size
    assert replay.counters.sampled_batches < asked
    ask(shard, eager, 1, batch_size=rows)
    assert answers(shard, eager, 1)[0].type == messages.Batch.TYPE
    kinds = [answer.type for answer in answers(shard, lazy, asked)]
    assert set(kinds) == {messages.Batch.TYPE, messages.Wait.TYPE}
    ask(shard, lazy, 1, batch_size=rows)
    assert answers(shard, lazy, 1)[0].type == messages.Batch.TYPE, "who reads is served again"
    replay.close()


def test_what_all_together_do_not_read_is_limited_and_what_is_read_forgotten(monkeypatch):
    class Held:
        done = False

    monkeypatch.setattr(unread, "MAX_UNREAD_BYTES", 100)
    monkeypatch.setattr(unread, "MAX_UNREAD_BYTES_OF_ALL", 250)
    batches, held = UnreadBatches(), [Held() for _ in range(3)]
    batches.add(b"a", held[0], 100)
    assert batches.blocked(b"a")
    assert batches.blocked(b"b") is None
    batches.add(b"b", held[1], 90)
    assert batches.blocked(b"b") is None
    batches.add(b"b", held[2], 90)
    assert "all peers" in batches.blocked(b"c")
    held[0].done = True
    assert batches.blocked(b"c") is None
    assert batches.bytes == 180
    held[2].done = True  # out of order: counted until the one before it has gone too
    assert batches.blocked(b"b")
    held[1].done = True
    assert batches.blocked(b"b") is None
    assert batches.bytes == 0
