"""The client against a shard in this process, whose every step the test decides."""

import logging
import time

import numpy as np
import pytest

from tests.harness import PATIENCE_S, until
from tests.replay import processes
from tests.replay.stepped import SteppedShard
from troupe.common import system
from troupe.common.errors import AuthError, ConfigError, TornStateError
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import Message
from troupe.common.wire.replay.client import ReplayRefusedError
from troupe.common.wire.replay.codec import encode_insert, infer_specs
from troupe.common.wire.replay.pending import Inserts, refusal


@pytest.fixture
def shard(tmp_path, context):
    shard = SteppedShard(tmp_path / "data", context, f"ipc://{tmp_path}/shard")
    yield shard
    shard.close()


@pytest.fixture
def learner(tmp_path, shard, client):
    """A client that the shard has answered to."""
    learner = client(f"ipc://{tmp_path}/shard", name="learner", liveness_s=PATIENCE_S)
    shard.serve_until(learner, lambda: learner.credit)
    return learner


def test_a_request_that_a_restarted_server_has_is_not_made_twice(shard, learner):
    """What one of the two were answered with would leave the queue and reach nobody."""
    learner.request_sample(1)
    shard.take(learner, messages.Sample.TYPE)  # lost with the old process
    shard.restart(2)
    ping = shard.take(learner, messages.Credit.TYPE)
    learner.request_sample(1)  # to the new process, before the news of it
    request = shard.take(learner, messages.Sample.TYPE)
    shard.requests.serve(*ping)
    shard.requests.serve(*request)
    shard.serve_until(learner, lambda: shard.requests.parked == 2)
    shard.fill(4)
    assert sorted(shard.versions(learner, 2)) == [0, 1]
    learner.request_sample(1)
    assert shard.versions(learner, 1) == [2]
    assert learner.outstanding_samples == 0


def test_a_request_that_waits_at_the_server_is_not_taken_for_lost(shard, learner):
    number = learner.request_sample(1)
    peer, request = shard.take(learner, messages.Sample.TYPE)
    shard.requests.serve(peer, request)
    for _ in range(2):  # two questions for the credit
        shard.requests.serve(*shard.take(learner, messages.Credit.TYPE))
    answers = shard.requests.parked
    learner.poll(50)
    assert sockets.receive_frames(shard.router) is None
    assert (answers, request.request_id) == (1, number)
    shard.fill(1)
    assert shard.versions(learner, 1) == [0]


def test_a_lost_request_is_sent_again_under_its_number(shard, learner):
    number = learner.request_sample(1)
    shard.take(learner, messages.Sample.TYPE)
    _, again = shard.take(learner, messages.Sample.TYPE)  # the credit that it asks for meanwhile is answered
    assert again.request_id == number


def test_what_came_while_the_caller_was_away_is_a_sign_of_life(tmp_path, shard, client):
    learner = client(f"ipc://{tmp_path}/shard", name="learner", liveness_s=0.3)
    shard.serve_until(learner, lambda: learner.credit)
    shard.fill(2)
    learner.request_sample(1)
    shard.requests.serve(*shard.take(None, messages.Sample.TYPE))
    assert learner.socket.poll(PATIENCE_S * 1000)
    reconnects = learner.counters["reconnects"]
    time.sleep(0.7)  # longer than it bears silence
    assert int(learner.receive(0).versions[0]) == 0
    assert learner.counters["reconnects"] == reconnects


def test_a_server_that_answers_no_ping_is_given_up_by_who_asks_nothing_else(tmp_path, shard, client):
    """As the shard that a learner has tried again, or that others are asked instead of."""
    learner = client(f"ipc://{tmp_path}/shard", name="learner", liveness_s=0.3)
    shard.serve_until(learner, lambda: learner.credit)
    reconnects = learner.counters["reconnects"]
    until(lambda: learner.counters["reconnects"] > reconnects, step=lambda: learner.poll(5))
    assert learner.silence
    shard.serve_until(learner, lambda: not learner.silence)


def test_a_ping_that_is_sent_after_a_pause_does_not_end_the_connection(shard, learner, monkeypatch):
    reconnects = learner.counters["reconnects"]
    monkeypatch.setattr(system, "monotonic", lambda: time.monotonic() + 2 * PATIENCE_S)
    shard.take(learner, messages.Credit.TYPE)
    assert learner.counters["reconnects"] == reconnects


def test_what_is_for_a_peer_that_has_gone_stays_in_the_queue(shard, learner):
    shard.fill(1)
    shard.requests.serve(b"gone", Message(messages.Sample.TYPE, {"batch_size": 1}, {}, 1))
    assert shard.requests.server.unsent == 1
    assert shard.replay.counters.sampled_batches == 0
    learner.request_sample(1)
    assert shard.versions(learner, 1) == [0]
    assert shard.replay.tables["default"].size == 0


def test_a_question_is_asked_again_of_a_restarted_server(shard, learner):
    def answers():
        _, question = shard.take(None, messages.Status.TYPE)  # the process ends before it answers
        shard.restart(2)
        shard.serve_all()
        return question

    asked = []
    poll = learner.poll

    def poll_and_serve(timeout_ms=0):
        if not asked:
            asked.append(answers())
        shard.serve_all()
        poll(5)

    learner.poll = poll_and_serve
    assert learner.status(PATIENCE_S) == {"session": 2}


def test_an_insert_for_which_there_was_no_memory_is_sent_again(tmp_path, shard, client, monkeypatch):
    actor = client(f"ipc://{tmp_path}/shard", liveness_s=PATIENCE_S)
    shard.serve_until(actor, lambda: actor.credit)
    insert, failures = shard.replay.insert, []

    def fail_once(each):
        if not failures:
            failures.append(each.sequence)
            raise MemoryError
        return insert(each)

    monkeypatch.setattr(shard.replay, "insert", fail_once)
    rollout = processes.chunk(0)
    rollout.offsets, rollout.lengths, rollout.priorities = np.zeros(1, int), np.array([10]), np.ones(1)
    assert actor.insert(rollout)
    shard.serve_until(actor, lambda: not actor.outstanding)
    assert failures == [1]
    assert shard.requests.server.rejections.by_kind == {"memory": 1}
    assert shard.replay.counters.inserted_chunks == 1


def test_an_insert_that_fails_in_its_midst_ends_the_shard_unanswered(tmp_path, shard, client, monkeypatch):
    actor = client(f"ipc://{tmp_path}/shard", liveness_s=PATIENCE_S)
    shard.serve_until(actor, lambda: actor.credit)

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(shard.replay.tables["default"], "insert", fail)  # after the chunk, before its commit
    rollout = processes.chunk(0)
    rollout.offsets, rollout.lengths, rollout.priorities = np.zeros(1, int), np.array([10]), np.ones(1)
    assert actor.insert(rollout)
    with pytest.raises(TornStateError):
        shard.serve_until(actor, lambda: not actor.outstanding)
    assert actor.outstanding == 1
    assert not shard.requests.server.rejections.by_kind


def test_inserts_that_got_lost_are_sent_again_in_order():
    inserts, sent = Inserts(), []
    data = processes.chunk(0)
    for _ in range(5):
        inserts.add(encode_insert(data, infer_specs(data), "default"))
    inserts.send(lambda body, number: sent.append((number, body.oldest)) or True, 0)
    inserts.answered(1)
    assert inserts.ping_answered(1, held=2) == 0, "all of them wait for room"
    assert inserts.ping_answered(1, held=4) == 4, "the server takes nothing behind a gap"
    inserts.send(lambda body, number: sent.append((number, body.oldest)) or True, 1)
    assert sent == [(number, 1) for number in range(1, 6)] + [(number, 2) for number in range(2, 6)]
    assert inserts.ping_answered(1, held=99) == 0, "the ping was sent before them"
    assert inserts.ping_answered(2, held=99) == 4


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("plan", ConfigError),
        ("signature", ConfigError),
        ("snapshot", ConfigError),
        ("key", AuthError),
        ("no_table", ReplayRefusedError),
    ],
)
def test_what_a_user_can_mend_is_an_error_of_the_users(kind, error):
    failure = refusal("tcp://there:5560", kind, "too much")
    assert isinstance(failure, error)
    assert "too much" in str(failure)


def test_a_plan_that_does_not_fit_is_told_to_who_inserts(tmp_path, shard, client):
    shard.replay._must_fit, shard.replay.budget_bytes = True, 100
    actor = client(f"ipc://{tmp_path}/shard")
    shard.serve_until(actor, lambda: actor.credit)
    rollout = processes.chunk(0)
    rollout.offsets, rollout.lengths, rollout.priorities = np.zeros(1, int), np.array([10]), np.ones(1)
    assert actor.insert(rollout)
    with pytest.raises(ConfigError, match="lower the capacity"):
        shard.serve_until(actor, lambda: not actor.outstanding)


def test_a_shard_that_names_a_new_session_in_every_answer_gets_one_line(learner, caplog):
    with caplog.at_level(logging.INFO):
        for session in range(1, 200):
            learner._on_credit(messages.Credit(credit=1, reason="", session=session), 0)
    assert caplog.text.count("has been restarted") == 1
