"""Queues and several tables over the wire."""

import numpy as np
import pytest

from tests.harness import insert, until
from tests.replay import processes
from tests.replay.rollouts import rollout
from troupe.common.data.schema import Items
from troupe.common.wire import messages
from troupe.common.wire.codec import Message, encode
from troupe.common.wire.replay.client import ReplayRefusedError

QUEUE = ("--table", "rollouts:limiter=queue,capacity=1")


def test_every_rollout_passes_once_and_in_order(server, client):
    endpoint = server(*QUEUE)
    actors = [client(endpoint, name=f"actor-{i}") for i in range(3)]
    learner = client(endpoint, name="learner")
    learner.status(120)
    made, seen = [0] * 3, []

    def turn():
        for i, actor in enumerate(actors):
            if actor.insert(rollout(made[i], i), "rollouts"):
                made[i] += 1
            actor.poll(0)
            assert actor.outstanding <= 2 or not seen, "few wait for room"
        if not learner.outstanding_samples:
            learner.request_sample(1, "rollouts")
        batch = learner.receive(0.02)
        if batch is not None:
            seen.append((int(batch.fields["producer"][0, 0]), int(batch.versions[0])))
            assert batch.fields["action"].shape == (1, 10)

    def passed(i):
        return sum(producer == i for producer, _ in seen)

    def share():
        return min(map(passed, range(3)))

    # Each has its turns, however the machine divides its time among them.
    until(lambda: share() > 15 and share() * 10 > len(seen), 200, step=turn, why=lambda: learner.wait_reason)
    for i in range(3):
        numbers = [number for producer, number in seen if producer == i]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) * 10 > len(seen), "producers take turns"
        assert made[i] - len(numbers) <= 4, "what is in flight is few"
    assert sum(actor.counters["resends"] for actor in actors) == 0, "what waits for room is not lost"
    status = learner.status()
    assert status["tables"]["rollouts"]["items"] <= 1
    assert status["insert_blocked_s"] > 0


def test_what_waits_for_room_survives_the_death_of_the_server(server, client):
    endpoint = server("--table", "rollouts:limiter=queue,capacity=4")
    # The learner is patient: a batch on its way over a connection that it gives up is lost, as specified.
    actor, learner = client(endpoint, liveness_s=1.0), client(endpoint, liveness_s=30.0)
    learner.status(120)
    for made in range(5):  # with credit for two at a time, the last of which has to wait for room
        insert(actor, rollout(made), "rollouts")
        if made == 2:
            assert actor.flush(60)
    until(
        lambda: "queue is full" in actor.blocked_reason,
        step=lambda: actor.poll(10),
        why=lambda: actor.blocked_reason,
    )
    assert actor.outstanding == 1
    processes.kill(server.process)
    server("--table", "rollouts:limiter=queue,capacity=4")
    seen = []
    for _ in range(5):
        learner.request_sample(1, "rollouts")
        batch = until(
            lambda: learner.receive(0.01),
            step=lambda: actor.poll(0),
            why=lambda: (seen, learner.wait_reason),
        )
        seen.append(int(batch.versions[0]))
    assert seen == list(range(5))
    assert actor.flush(60)


def test_one_insert_for_several_tables_and_one_batch_from_several(server, client):
    endpoint = server("--table", "default:capacity=1000", "--table", "rollouts:limiter=queue,capacity=50")
    one = client(endpoint)
    chunk = processes.chunk(0)
    chunk.more["rollouts"] = Items(np.zeros(1, np.int32), np.full(1, 10, np.int32), np.ones(1))
    for number in range(8):
        chunk = processes.chunk(number)
        chunk.more["rollouts"] = Items(np.zeros(1, np.int32), np.full(1, 10, np.int32), np.ones(1))
        insert(one, chunk)
    assert one.flush(60)
    status = one.status()
    assert {name: table["items"] for name, table in status["tables"].items()} == {
        "default": 80,
        "rollouts": 8,
    }
    assert status["chunks"] == 8
    batch = one.sample({"rollouts": 3, "default": 20})
    assert batch.rows() == {"rollouts": slice(0, 3), "default": slice(3, 23)}
    assert batch.lengths.tolist() == [10] * 3 + [1] * 20
    assert batch.fields["action"][:3].tolist() == [list(range(10 * i, 10 * i + 10)) for i in range(3)]
    assert [(share.table_items, share.count) for share in batch.shares] == [(8, 3), (80, 20)]
    assert np.allclose(batch.probabilities[3:], 1 / 80)
    # Priorities go to the table of each row.
    one.update(batch, np.concatenate([np.ones(3), np.full(20, 5.0)]))
    updated = len(np.unique(batch.ids[3:]))
    weights = updated * 5**0.6 + (80 - updated)
    assert np.isclose(one.sample(4).total_priority, weights)
    assert one.status()["unknown_priorities"] == 3, "the rollouts are gone"
    one.update(batch, np.full(23, 5.0), ["default"])
    assert one.status()["unknown_priorities"] == 3, "and nobody was told of them again"
    with pytest.raises(ReplayRefusedError, match="no_table"):
        one.sample({"rollouts": 1, "other": 2}, timeout_s=60)


@pytest.mark.parametrize(
    "shares",
    [
        [],
        [["default"]],
        [["default", 0]],
        [["default", 2], ["default", 3]],
        [["default", True]],
        "default",
        [[1, 2]],
    ],
)
def test_bad_shares_are_refused(server, client, shares):
    one = client(server())
    one.status(120)
    message = Message(messages.Sample.TYPE, {"shares": shares}, {}, 9)
    one.socket.send_multipart([bytes(frame) for frame in encode(message)])
    with pytest.raises(ReplayRefusedError, match="bad_field"):
        one.receive(60)


def test_a_full_queue_stops_its_own_writers_only(server, client):
    endpoint = server("--table", "default:capacity=1000", *QUEUE)
    actor, other = client(endpoint, name="actor"), client(endpoint, name="other")
    other.status(120)
    made = 0

    def write():
        nonlocal made
        made += actor.insert(rollout(made), "rollouts")
        actor.poll(10)

    until(lambda: "queue is full" in actor.blocked_reason, step=write, why=lambda: actor.blocked_reason)
    for number in range(20):  # with the queue full, from the first on
        processes.insert(other, number)
    assert other.flush(60)
    assert other.credit > 2, "it is known by now that it writes to no queue"
    fresh = client(endpoint, name="fresh")
    until(lambda: fresh.credit, step=lambda: fresh.poll(10), why=lambda: fresh.blocked_reason)
    assert actor.credit == 0
    assert fresh.status()["tables"]["default"]["items"] == 200


def test_writers_never_wait_for_a_queue_that_drops(server, client):
    endpoint = server("--table", "rollouts:limiter=queue,capacity=4,when_full=keep_latest")
    actor = client(endpoint)
    for number in range(20):
        insert(actor, rollout(number), "rollouts")
    assert actor.flush(60)
    assert actor.status()["tables"]["rollouts"]["dropped_total"] == 16
    assert actor.sample(4, "rollouts").versions.tolist() == [16, 17, 18, 19]
