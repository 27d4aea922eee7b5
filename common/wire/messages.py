"""Every message type, what it carries, and who may send it; and the kinds of errors.

`docs/protocol.md` explains sequences and errors, and shows the structs and tables that are defined here. A
peer ignores fields that it does not know, so fields may be added within one protocol version; none may change
its meaning.
"""

from __future__ import annotations

from troupe.common.wire.body import Body
from troupe.common.wire.codec import Limits
from troupe.common.wire.control.messages import (
    Announce,
    Bye,
    Error,
    Heartbeat,
    HeartbeatOk,
    Hello,
    Params,
    ParamsGet,
    Telemetry,
    Welcome,
)
from troupe.common.wire.inference import Actions, Infer
from troupe.common.wire.replay.messages import (
    Batch,
    Credit,
    CreditQuestion,
    Insert,
    Inserted,
    Priorities,
    Sample,
    SnapshotOk,
    SnapshotRequest,
    Status,
    StatusOk,
    Wait,
)

BODIES: tuple[type[Body], ...] = (
    *(Hello, Welcome, Heartbeat, HeartbeatOk, ParamsGet, Params, Telemetry, Bye, Announce, Infer, Actions),
    *(Insert, Inserted, CreditQuestion, Credit, Sample, Batch, Wait, Priorities, Status, StatusOk),
    *(SnapshotRequest, SnapshotOk, Error),
)
"""What every message carries, in the order of `docs/protocol.md`."""


CONTROL_LIMITS = Limits(array_bytes=1 << 25, total_bytes=1 << 25)
"""What the learner accepts on its control socket; the largest message is a video."""

REPLAY_LIMITS = Limits(array_bytes=1 << 28, total_bytes=1 << 28)
"""What a replay shard accepts; the largest message is a chunk. What it sends has the limits of the codec."""

SUBSCRIPTION_BYTES = 1 << 18
"""What the announce socket accepts on one connection: subscriptions, and a day's heartbeats or more."""

ROLES = ("actor", "replay", "evaluator", "viewer", "learner")
"""Who may say HELLO. A viewer is anything that only looks: a panel, a stranger's script. A learner that joins
another's run shares its batches."""

# Kinds of ERROR of every server.
NO_MEMORY = "memory"  # for this, now
INTERNAL = "internal"  # a defect; its trace is in the server's log
TOO_MANY = "too_many"  # requests of one kind wait already
ASK_AGAIN_KINDS = frozenset({NO_MEMORY, INTERNAL, TOO_MANY})
"""After these, the same may be asked again, a little later."""

# Kinds of ERROR with which the learner turns a HELLO down.
REFUSED_VERSION = "version"
REFUSED_HASH = "hash"
REFUSED_SUPERSEDED = "superseded"
REFUSED_BAD_HELLO = "bad_hello"
REFUSED_RUN = "run"  # the learner has begun another run than the one that the service is in
REFUSED_KEY = "key"  # the key is that of another role
REFUSED_CLAIM = "claim"  # something that only another role may say, or not in this way: see claims
NO_SLOTS = "no_slots"  # leases may run out
NAME_TAKEN = "name_taken"  # another role, or key, has it until its lease ends
UNKNOWN_PEER = "unknown_peer"  # the learner has been restarted, or has given the peer up
RETRY_KINDS = frozenset({NO_SLOTS, NAME_TAKEN, UNKNOWN_PEER, NO_MEMORY, INTERNAL})
"""After these, HELLO may be said again; every other answer to it is final."""

# Kinds of ERROR that answer INFER.
UNKNOWN_GROUP = "unknown_group"  # begin again: the learner has nothing that these steps go on from
NOT_LEASED = "not_leased"  # the slots are not those of this actor
TOO_MANY_ROWS = "too_many_rows"  # for a batch

MAY_SEND: dict[str, tuple[str, ...]] = {
    Hello.TYPE: ROLES,
    Heartbeat.TYPE: ROLES,
    ParamsGet.TYPE: ROLES,
    Telemetry.TYPE: ROLES,
    Bye.TYPE: ROLES,
    Infer.TYPE: ("actor",),
    Insert.TYPE: ("actor", "learner"),
    Credit.TYPE: ROLES,
    Sample.TYPE: ("learner",),  # for it uses up what the limiter permits
    Priorities.TYPE: ("learner",),
    Status.TYPE: ROLES,
    SnapshotRequest.TYPE: ("learner",),  # for it writes wherever it is told to
}
"""Roles whose keys permit a message, where there are keys. What those may say in it is in `claims`."""
