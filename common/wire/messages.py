"""Every message type, who sends it, and what it carries.

`docs/protocol.md` explains sequences and errors; this table is what the code, and the test that keeps the
document complete, go by. A peer ignores fields that it does not know, so fields may be added within one
protocol version; none may change its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.wire.codec import Limits

# Control: any service <-> the learner's ROUTER.
HELLO = "HELLO"
WELCOME = "WELCOME"
HEARTBEAT = "HEARTBEAT"
HEARTBEAT_OK = "HEARTBEAT_OK"
PARAMS_GET = "PARAMS_GET"
PARAMS = "PARAMS"
TELEMETRY = "TELEMETRY"
BYE = "BYE"

# Announce: the learner's PUB -> everyone; always exactly one frame, so that CONFLATE is safe.
ANNOUNCE = "ANNOUNCE"

# Inference: actors <-> the learner's second ROUTER, where inference is central.
INFER = "INFER"
ACTIONS = "ACTIONS"

# Replay: actors and the learner <-> a replay shard's ROUTER.
INSERT = "INSERT"
INSERTED = "INSERTED"
CREDIT = "CREDIT"
SAMPLE = "SAMPLE"
BATCH = "BATCH"
WAIT = "WAIT"
PRIORITIES = "PRIORITIES"
STATUS = "STATUS"
STATUS_OK = "STATUS_OK"
SNAPSHOT = "SNAPSHOT"
SNAPSHOT_OK = "SNAPSHOT_OK"

# Everywhere: the answer to what cannot be answered.
ERROR = "ERROR"

CONTROL_LIMITS = Limits(array_bytes=1 << 28, total_bytes=1 << 28)
"""What the learner accepts on its control socket; the largest message is a video."""

ROLES = ("actor", "replay", "evaluator", "viewer")
"""Who may say HELLO. A viewer is anything that only looks: a panel, a stranger's script."""

# Kinds of ERROR with which the learner turns a HELLO down.
REFUSED_VERSION = "version"
REFUSED_HASH = "hash"
REFUSED_SUPERSEDED = "superseded"
REFUSED_BAD_HELLO = "bad_hello"
REFUSED_RUN = "run"  # the learner has begun another run than the one that the service is in
REFUSED_KEY = "key"  # the key is that of another role
NO_SLOTS = "no_slots"  # leases may run out
UNKNOWN_PEER = "unknown_peer"  # the learner has been restarted, or has given the peer up
RETRY_KINDS = frozenset({NO_SLOTS, UNKNOWN_PEER})
"""After these, HELLO may be said again; every other answer to it is final."""

# Kinds of ERROR that answer INFER.
UNKNOWN_GROUP = "unknown_group"  # begin again: the learner has nothing that these steps go on from
NOT_LEASED = "not_leased"  # the slots are not those of this actor
TOO_MANY_ROWS = "too_many_rows"  # for a batch


@dataclass(frozen=True)
class Spec:
    """What one message type carries.

    Attributes:
        sender: who sends it, to whom.
        fields: name -> type and meaning.
        arrays: name -> dtype, shape and meaning.
    """

    sender: str
    fields: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, str] = field(default_factory=dict)


_STATE = {
    "session": "u64, random number of this learner process; another one means a restarted learner",
    "version": "int, newest published parameter version; -1 before the first",
    "steps": "int, environment steps of the run so far",
    "updates": "int, learner updates of the run so far",
    "stopping": "bool, the run is done: finish up and say BYE",
}

MESSAGES: dict[str, Spec] = {
    HELLO: Spec(
        "service -> learner",
        {
            "role": "str, one of ROLES",
            "name": "str, unique in the run, such as actor-0 or replay-0; at most 64 characters",
            "incarnation": "u64, random, chosen once per process",
            "hash": "str, hash of the structural config, or empty where the service knows none yet",
            "slots_wanted": "int, how many exploration slots an actor asks for; 0 for others",
            "slots_held": "list of int, slots held before a re-join, granted again where they are free",
            "replay_endpoint": "str, where a replay shard can be reached; empty for others",
            "host": "str, for logs",
            "pid": "int, for logs",
            "software": "str, for logs",
            "run": "str, the run that the service is in; empty or absent if this process was in none yet",
        },
    ),
    WELCOME: Spec(
        "learner -> service",
        {
            "config": "map, the run's whole config",
            "slots": "list of int, the slots leased to this process, ascending",
            "total_slots": "int, slots of the whole run",
            "announce": "str, endpoint of the announce PUB; a wildcard host stands for the learner's own",
            "inference": "str, endpoint of central inference, likewise; empty or absent where there is none",
            "shards": "list of str, endpoints of the live replay shards",
            "heartbeat_s": "float, how often to send HEARTBEAT",
            "liveness_s": "float, silence after which either side gives up the other",
            "run": "str, random name of the run, the same for all of its learner processes",
            **_STATE,
        },
    ),
    HEARTBEAT: Spec(
        "service -> learner",
        {
            "version": "int, parameter version in use; -1 for none",
            "error": "str, the last error worth showing; empty for none",
        },
    ),
    HEARTBEAT_OK: Spec(
        "learner -> service",
        {"shards": "list of str, endpoints of the live replay shards", **_STATE},
    ),
    PARAMS_GET: Spec("service -> learner", {"version": "int, the version that the asker has; -1 for none"}),
    PARAMS: Spec(
        "learner -> service",
        {
            "manifest": "list of [name, dtype, shape, offset in bytes]; empty where there is nothing newer",
            **_STATE,
        },
        {"blob": "uint8 [bytes], all tensors; absent where there is nothing newer"},
    ),
    TELEMETRY: Spec(
        "service -> learner, not answered",
        {
            "metrics": "map of str to number",
            "fields": "map, whatever is not a number, such as episodes: list of [return, steps]",
        },
        {"*": "blobs by name, such as video: uint8 [T, H, W, 3]"},
    ),
    BYE: Spec("service -> learner, not answered", {"reason": "str, for logs"}),
    ANNOUNCE: Spec("learner -> everyone (PUB, one frame)", dict(_STATE)),
    INFER: Spec(
        "actor -> learner: a group of slots begins, or has done what it was told; answered with ACTIONS",
        {
            "incarnation": "u64, that of HELLO",
            "group": "int, which of the actor's groups; its slots step together",
            "slots": "list of int, the slots on lease that begin here, one a row; absent where they go on",
            "after": "u64, request id of the ACTIONS that were carried out; absent where slots begin",
        },
        {
            "first": "observations [E, ...], whole: of all rows where slots begin; else of those with "
            "ended above 0, in their order, the first of the next episode",
            "obs": "observations [S, ...], where the step led, at an episode's end that episode's last one; "
            "only the newest frame where frames are stacked; absent where slots begin, like all below",
            "reward": "float32 [S], as the agent is to learn from it",
            "ended": "uint8 [S], 0 goes on, 1 terminated, 2 truncated, 3 the environment failed: void",
        },
    ),
    ACTIONS: Spec(
        "learner -> actor, answer to INFER",
        {"version": "int, parameter version that chose"},
        {"actions": "int64 [S], one a row"},
    ),
    INSERT: Spec(
        "actor -> replay; the request id is the number of the insert, 1, 2, 3, ... in each incarnation",
        {
            "incarnation": "u64, random, not zero, chosen once per process; names the insert with its number",
            "name": "str, the sender, for logs",
            "oldest": "u64, smallest number not seen acknowledged by the sender; the request id if absent",
            "table": 'str, the table that gets the items; "default" if absent',
            "tables": "list of [table, M of it], for items of several tables, one table behind the other; "
            "takes the place of table",
            "steps": "int, length L of the chunk, without the margins",
            "version": "int, parameter version that acted; 0 if absent",
            "fields": "list of [name, dtype, shape of one entry, before, after, codec], codec raw or lz4",
        },
        {
            "items/offsets": "int32 [M], first step of each item in the chunk",
            "items/lengths": "int32 [M], steps of each item",
            "items/priorities": "float64 [M], initial priorities (before the exponent)",
            "chunk/FIELD": "raw: dtype [before + L + after, *shape]; lz4: uint8 [bytes], a block per entry",
            "lengths/FIELD": "lz4 only: uint32 [before + L + after], bytes of each block with its size",
        },
    ),
    INSERTED: Spec(
        "replay -> actor, once the insert is stored (or was stored before); repeats its request id",
        {"credit": "int, inserts that the actor may have unacknowledged from now on"},
    ),
    CREDIT: Spec(
        "actor -> replay, to ask; replay -> actor, the answer, and unasked (request id 0) on every change",
        {
            "incarnation": "u64, as in INSERT (question only)",
            "name": "str, for logs (question only)",
            "credit": "int, as in INSERTED (answer only)",
            "reason": "str, why the credit is zero; empty otherwise (answer only)",
            "session": "u64, random number of the replay process; another one means a restart (answer only)",
            "fields": "list as in INSERT, what the shard stores, once it knows (answer only)",
            "files": "map, folder and host (boot id) where files may be mapped; absent if not (answer only)",
            "held": "u64, the first insert of this incarnation that waits for room in a queue: it and those "
            "behind it are not lost; absent if none does (answer only)",
            "parked": "list of u64, the SAMPLE requests of the asker that wait for the limiter; absent if "
            "none does (answer only)",
        },
    ),
    SAMPLE: Spec(
        "learner -> replay",
        {
            "table": 'str; "default" if absent',
            "batch_size": "int, B",
            "plain": "bool, lz4 fields may come as raw where nothing of them compresses; false if absent",
            "token": "str, what the file `token` in the shard's folder says, to get places; empty if absent",
            "shares": "list of [table, rows], for a batch from several tables; takes the place of both",
        },
    ),
    BATCH: Spec(
        "replay -> learner, answer to SAMPLE",
        {
            "table": "str, the (first) table that the batch is from",
            "table_items": "int, items in the whole of it, for importance weights",
            "total_priority": "float, sum of priority ** exponent over the whole of it",
            "shares": "list of [table, rows, table_items, total_priority], where several were asked for; the "
            "rows of one stand behind those of the other",
            "consumed": "bool, windows come in spite of the token, for the items go by being sampled; false "
            "if absent",
            "fields": "list as in INSERT",
        },
        {
            "ids": "uint64 [B], item ids, never reused",
            "probabilities": "float64 [B], over the whole table that the row is from",
            "versions": "int64 [B], parameter versions that acted",
            "lengths": "int32 [B], steps of each item; shorter windows repeat their last entry",
            "field/FIELD": "raw: dtype [B, before + max(lengths) + after, *shape]; lz4: uint8 [bytes], one "
            "LZ4 frame that unpacks to it",
            "rows": "int64 [B], instead of the fields where the token is right: see `Same host`",
            "commits": "uint64 [B], with rows: the number of each item's chunk",
            "offsets": "int32 [B], with rows: first step of each item in its chunk",
        },
    ),
    WAIT: Spec(
        "replay -> learner, answer to a SAMPLE that the table's limiter held for half a second: ask again; "
        "learner -> actor, answer to an INFER that came again while the first one still waits",
        {"reason": "str, what is missing"},
    ),
    PRIORITIES: Spec(
        "learner -> replay, not answered; unknown ids and invalid priorities are counted and skipped",
        {"table": 'str; "default" if absent'},
        {"ids": "uint64 [N]", "priorities": "float64 [N], new priorities (before the exponent)"},
    ),
    STATUS: Spec("anyone -> replay"),
    STATUS_OK: Spec("replay -> asker", {"*": "sizes, rates and counters by name"}),
    SNAPSHOT: Spec(
        "anyone -> replay, to copy what it holds, or to ask how far that is",
        {
            "destination": "str, absolute path on the shard's host, or address such as s3://BUCKET/PATH; "
            "empty or absent to ask only",
            "token": "str, random, the same in every request about one snapshot",
        },
    ),
    SNAPSHOT_OK: Spec(
        "replay -> asker, at once: the copy goes on meanwhile",
        {
            "destination": "str, of the last snapshot; empty if there was none",
            "state": "str, running, done, failed or none",
            "bytes_total": "int, bytes to write",
            "bytes_done": "int, bytes written",
            "items": "int, items in it, once it is done",
            "detail": "str, why it failed",
        },
    ),
    ERROR: Spec(
        "any server -> the sender of what it could not serve; repeats its request id where it had one",
        {
            "kind": "str, a word to branch on",
            "detail": "str, one line for people",
            "about": "str, type of the message that could not be served; empty where it could not be decoded",
            "expected": "u64, number of the insert to go on with; only where kind is gap",
            "config": "map, the run's config; only where kind is hash",
        },
    ),
}
