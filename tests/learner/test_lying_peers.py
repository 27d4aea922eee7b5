"""Peers with the proper key that lie to a run with a queue and an elite table cost it only what they send."""

import math

import msgspec
import numpy as np

from tests.harness import PATIENCE_S, until
from tests.learner.batches.mixed import STEPS, actor, make_config, running, sent, unroll
from tests.replay.misbehaving import Misbehaving
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.wire import messages, sockets
from troupe.common.wire.codec import decode
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import new_incarnation
from troupe.common.wire.replay import draws
from troupe.common.wire.replay.codec import encode_insert, specs_to_wire

SHARES = {"again": 3, "fresh": 2}
AGAIN = '{name = "again", sampler = "elite", candidates_max = 6.0, capacity = 40, min_items = 4, share = 3}'
FRESH = '{name = "fresh", limiter = "queue", capacity = 8, share = 2}'
HONEST = 31


def elite_config(tmp_path):
    more = {"replay.tables": f"[{AGAIN}, {FRESH}]", "agent.behaviour_features": "torso"}
    return make_config(tmp_path, **more, **{"run.total_steps": "1_000_000", "replay.durable": "none"})


def check(seen):
    """Every batch had its rows of both tables, but for those that nobody can learn from."""
    assert all(replayed.tolist() == sorted(replayed, reverse=True) for _, replayed in seen)
    assert all(replayed.sum() <= 3 and (~replayed).sum() <= 2 for _, replayed in seen)
    assert any(replayed.tolist() == [True] * 3 + [False] * 2 for _, replayed in seen)


def play(outbox, agent, numbers):
    """What an honest actor sends."""
    for number in numbers:
        outbox.put([unroll(agent, number)])
        sent(outbox)


# ------------------------------------------------------------------ an actor that lies


def inserts(agent):
    """INSERTs by what is wrong with them, and the kind of refusal; None: it is stored."""
    specs = {spec.name: spec for spec in agent.fields}
    good = unroll(agent, 0)

    def encoded(chunk=good, fields=specs, tables=tuple(SHARES), **changes):
        chunk.more = dict.fromkeys(tables[1:], chunk.items)
        made = encode_insert(chunk, list(fields.values()), tables[0], incarnation=5)
        return msgspec.structs.replace(made, **changes) if changes else made

    def filled(name, value):
        fields = {key: array.copy() for key, array in good.fields.items()}
        fields[name][:] = value
        return encoded(Chunk(fields, STEPS, good.offsets, good.lengths, np.ones(1)))

    wide = {**specs, "features": FieldSpec("features", "float16", (agent.net.head_features + 1,))}
    wider = {**good.fields, "features": np.zeros((STEPS, agent.net.head_features + 1), np.float16)}
    priorities = lambda value: encoded(priorities=np.full(2, value))  # noqa: E731
    return {
        "another table": (encoded(tables=("again", "mine")), "no_table"),
        "features of another width": (
            encoded(Chunk(wider, STEPS, good.offsets, good.lengths, np.ones(1)), wide),
            "signature",
        ),
        "priorities of NaN": (priorities(np.nan), "bad_priority"),
        "priorities without end": (priorities(np.inf), "bad_priority"),
        "features of NaN": (filled("features", np.nan), None),
        "features without end": (filled("features", np.inf), None),
        "the largest features": (filled("features", np.finfo(np.float16).max), None),
        "actions that there are not": (filled("action", 77), None),
        "the queue left out": (encoded(tables=("again",)), None),
        "the elite table left out": (encoded(tables=("fresh",)), None),
        "a distance of its own": (priorities(1e-30), None),
    }


class Stranger:
    """A DEALER that sends what no client would."""

    def __init__(self, ctx, endpoint):
        self._socket = sockets.make_dealer(ctx, endpoint)

    def answer(self, message):
        """The shard's answer to a message."""
        until(lambda: sockets.send(self._socket, message))  # the connection may take a while
        while self._socket.poll(1000 * PATIENCE_S):
            found = decode(sockets.receive_frames(self._socket))
            if found.request_id == message.request_id and found.type != messages.Credit.TYPE:
                return found
        raise AssertionError("no answer")

    def tell(self, message):
        until(lambda: sockets.send(self._socket, message))

    def close(self):
        self._socket.close(linger=0)


def miscounted(body, number):
    """The same INSERT, which says of the one table that all items are its own, and of the other some more."""
    message = body.message(number)
    message.fields["tables"] = [["again", 2], ["fresh", 5]]
    return message


def test_what_an_actor_claims_of_tables_features_and_distances(tmp_path, context):
    config = elite_config(tmp_path)
    with running(config, tmp_path, context) as (learning, seen), actor(config, context) as (control, outbox):
        agent, learner = learning.service.agent, learning.service
        play(outbox, agent, range(1, 9))
        stranger = Stranger(context, control.shards[0])
        try:
            bad = stranger.answer(miscounted(inserts(agent)["features of NaN"][0], 1))
            assert bad.type == messages.Error.TYPE
            assert "the tables and the items differ in length" in bad.fields["detail"]
            for number, (name, (body, kind)) in enumerate(inserts(agent).items(), 1):
                said = stranger.answer(body.message(number))
                assert said.type == (messages.Error.TYPE if kind else messages.Inserted.TYPE), (
                    name,
                    said.fields,
                )
                assert said.fields.get("kind") == kind, name
            ids = np.arange(2**63, 2**63 + 4, dtype=np.uint64)
            for value in (np.nan, -1.0, np.inf, 0.0):
                for table in (*SHARES, "mine"):
                    told = messages.Priorities(table=table, ids=ids, priorities=np.full(4, value))
                    stranger.tell(told.message(0))
            before = learner.counters.updates
            play(outbox, agent, range(9, HONEST))
            until(lambda: learning.error or learner.counters.updates >= before + 8)
            until(lambda: learning.error or learner.shares.usable.left_out)
        finally:
            stranger.close()
        assert learning.error is None
        assert all(math.isfinite(x) for array in agent.params().values() for x in array.ravel())
    check(seen)


# ------------------------------------------------------------------ a shard that lies


def mixed(specs, request, shares=None, **data):
    """A BATCH as the learner has asked for it, but for other `shares` or `data`."""
    counts = request.counts() if shares is None else dict(shares)
    count = sum(counts.values())
    arrays = {
        spec.name: np.full((count, spec.entries(STEPS), *spec.shape), data.get(spec.name, 0), spec.dtype)
        for spec in specs
    }
    return messages.Batch(
        table=next(iter(counts)),
        table_items=count,
        total_priority=1e9,  # so that it is drawn
        shares=[(name, rows, 40, 1e9) for name, rows in counts.items()],
        fields=specs_to_wire(specs),
        ids=np.arange(count, dtype=np.uint64),
        probabilities=np.full(count, 1 / count),
        versions=np.zeros(count, np.int64),
        lengths=np.full(count, STEPS, np.int32),
        data=arrays,
    )


def changed(**changes):
    return lambda specs, request: msgspec.structs.replace(mixed(specs, request), **changes)


def wider_features(specs, request):
    specs = [FieldSpec(s.name, s.dtype, (s.shape[0] + 1,)) if s.name == "features" else s for s in specs]
    return mixed(specs, request)


REFUSED = {
    "one row more of the queue": lambda specs, request: mixed(specs, request, {"again": 2, "fresh": 3}),
    "all of one table": lambda specs, request: mixed(specs, request, {"again": 5}),
    "another table": lambda specs, request: mixed(specs, request, {"again": 3, "mine": 2}),
    "no shares": changed(shares=msgspec.UNSET),
    "a table twice": changed(shares=[("again", 3, 40, 1.0), ("again", 2, 40, 1.0)]),
    "a priority of NaN in the second table": changed(
        shares=[("again", 3, 40, 1.0), ("fresh", 2, 40, math.nan)]
    ),
    "wider features": wider_features,
}
STORED = {
    "features of NaN": lambda specs, request: mixed(specs, request, features=np.nan),
    "features without end": lambda specs, request: mixed(specs, request, features=np.inf),
    "rewards of NaN": lambda specs, request: mixed(specs, request, reward=np.nan),
}


def test_what_a_shard_claims_of_shares_and_features(tmp_path, context, monkeypatch):
    monkeypatch.setattr(draws, "FAULT_S", (0.01, 0.1))  # it is tried many times
    config = elite_config(tmp_path)
    with running(config, tmp_path, context) as (learning, seen), actor(config, context) as (_, outbox):
        agent, learner = learning.service.agent, learning.service
        bad = Misbehaving(
            context, f"ipc://{tmp_path}/bad", agent.fields, [*REFUSED.values(), *STORED.values()]
        )
        member = ControlClient(
            context,
            config.net.control,
            role="replay",
            name="replay-9",
            incarnation=new_incarnation(),
            replay_endpoint=bad.endpoint,
        )
        try:
            member.join(60)
            play(outbox, agent, range(1, HONEST))
            rounds = 2 * (len(REFUSED) + len(STORED))
            until(lambda: learning.error or (bad.asked > rounds and learner.counters.updates >= 8), 120)
            until(lambda: learning.error or learner.shares.usable.left_out >= 5)
        finally:
            member.close()
            bad.stop()
        assert learning.error is None
        assert all(math.isfinite(x) for array in agent.params().values() for x in array.ravel())
    check([batch for batch in seen if len(batch[1])])
