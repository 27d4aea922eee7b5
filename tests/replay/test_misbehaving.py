"""A shard with the proper key that answers what cannot be used costs a run nothing but its own items."""

import logging

import msgspec
import numpy as np
import pytest

from tests.harness import until
from tests.replay.learners import learnable, run_learner
from tests.replay.misbehaving import Misbehaving, batch_of, spoilt
from tests.replay.shards import fill
from troupe.common.data.schema import FieldSpec
from troupe.common.wire import messages
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay import draws

VALUE = (FieldSpec("value", "float64", ()),)


def refused(kind, about=messages.Sample.TYPE, detail="no\nreason"):
    return lambda specs, request: messages.Error(kind=kind, detail=detail, about=about)


def without_first(specs, request):
    body = batch_of(specs, request)
    return msgspec.structs.replace(body, fields=body.fields[1:] or [("x", "int64", [], 0, 0, "raw")])


def garbage(specs, request):
    return None


ANSWERS = {
    **{f"refused: {kind}": refused(kind) for kind in ("batch_size", "signature", "plan", "key", "no", "")},
    "refused: an insert that there is not": refused("no_table", messages.Insert.TYPE),
    "refused: nothing in particular": refused("internally", ""),
    "garbage": garbage,
    "no data": spoilt(data={}),
    "other fields": without_first,
    "other dtypes": lambda specs, request: batch_of(
        [FieldSpec(s.name, "int16", s.shape, s.before, s.after) for s in specs], request
    ),
    "other shapes": lambda specs, request: batch_of(
        [FieldSpec(s.name, s.dtype, (*s.shape, 3), s.before, s.after) for s in specs], request
    ),
    "impossible": spoilt(probabilities=lambda body: body.probabilities * 1e6),
    "never met": spoilt(probabilities=lambda body: body.probabilities * 1e-300),
    "NaN": spoilt(probabilities=lambda body: body.probabilities * np.nan),
    "without end": spoilt(total_priority=np.inf),
    "below zero": spoilt(total_priority=-1.0),
    "another table": spoilt(table="another"),
    "fewer rows": lambda specs, request: batch_of(specs, messages.Sample(batch_size=1)),
    "many steps": spoilt(lengths=lambda body: body.lengths * (2**31 - 1)),
}


@pytest.fixture
def misbehave(context, tmp_path):
    running = []

    def make(specs, *answers):
        running.append(Misbehaving(context, f"ipc://{tmp_path}/bad.socket", specs, answers))
        return running[-1]

    yield make
    for each in running:
        each.stop()


def some(client):
    """The batch that has come, if one has; four are asked for at any time."""
    for _ in range(4 - client.outstanding_samples):
        client.request_sample(16)
    batch = client.receive(0.1)
    return [] if batch is None else [batch]


@pytest.mark.parametrize("name", ANSWERS)
def test_the_others_are_sampled_on(context, start, connect, misbehave, caplog, monkeypatch, name):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(draws, "FAULT_S", (0.01, 0.1))  # it is tried many times
    good, bad = start("good"), misbehave(VALUE, ANSWERS[name])
    fill(context, good, np.ones(100), np.ones(100))
    client = connect(good, bad, tolerate_refusals=True, expected=VALUE)
    seen = []
    until(
        lambda: len(seen) >= 50 and bad.asked >= 5,
        step=lambda: seen.extend(some(client)),
        why=lambda: (client.wait_reason, len(seen), bad.asked),
    )
    assert sum(batch.shard == bad.endpoint for batch in seen) <= 1, "the first one was right"
    assert all(np.isfinite(batch.weights(0.4)).all() for batch in seen)
    lines = [
        record.getMessage() for record in caplog.records if "sampling the other shards" in record.getMessage()
    ]
    assert lines
    assert all(bad.endpoint in line and "\n" not in line for line in lines)


def test_one_that_takes_requests_and_gives_nothing_is_lost(
    context,
    start,
    connect,
    misbehave,
    monkeypatch,
):
    monkeypatch.setattr(draws, "NO_BATCH_S", 0.5)
    good, bad = start("good"), misbehave(VALUE, None)
    fill(context, good, np.ones(100), np.ones(100))
    client = connect(good, bad, tolerate_refusals=True, expected=VALUE)
    seen = []
    until(
        lambda: len(seen) >= 50 and client._shards[bad.endpoint].lost,
        step=lambda: seen.extend(some(client)),
        why=lambda: client.wait_reason,
    )


def test_alone_it_keeps_the_learner_waiting_and_is_used_when_it_is_right_again(
    connect,
    misbehave,
    monkeypatch,
):
    monkeypatch.setattr(draws, "FAULT_S", (0.01, 0.1))
    bad = misbehave(VALUE, *list(ANSWERS.values())[:7], *[spoilt()] * 100_000)
    client = connect(bad, tolerate_refusals=True, expected=VALUE)
    seen = []
    until(lambda: len(seen) >= 5, step=lambda: seen.extend(some(client)), why=lambda: client.wait_reason)


def test_a_run_goes_on(context, server, client, misbehave, tmp_path, monkeypatch):
    monkeypatch.setattr(draws, "FAULT_S", (0.01, 0.1))
    running = run_learner(tmp_path, tmp_path / "run")
    learner = running.service
    specs = learner.agent.fields
    good = server("--learner", f"ipc://{tmp_path}/control")
    nan = spoilt(data=lambda body: {n: a * np.array(np.nan, a.dtype) if a.dtype.kind == "f" else a + 100
                                    for n, a in body.data.items()})  # fmt: skip
    bad = misbehave(specs, *ANSWERS.values(), nan)
    member = ControlClient(
        context,
        f"ipc://{tmp_path}/control",
        role="replay",
        name="replay-9",
        incarnation=new_incarnation(),
        replay_endpoint=bad.endpoint,
    )
    actor = client(good, specs=specs)
    try:
        member.join(60)
        for _ in range(20):
            until(lambda: actor.insert(learnable(specs, 64)))
        assert actor.flush(60)
        rounds = 2 * (len(ANSWERS) + 1)
        until(lambda: running.error or (bad.asked > rounds and learner.counters.updates >= 50), 120)
    finally:
        running.end()
        member.close()
    assert running.error is None
