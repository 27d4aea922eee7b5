"""What actors and the learner say to a replay shard, and what it answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from troupe.common.runtime.logging import peer_text
from troupe.common.wire import types
from troupe.common.wire.body import Body


class Insert(Body, kw_only=True):
    """Actor -> replay; the request ID is the number of the insert, 1, 2, 3, ... in each incarnation.

    Attributes:
        incarnation: random, chosen once per process; with the number it names the insert
        name: the sender, for logs
        oldest: smallest number that the sender has not seen settled; at most the request ID
        table: the table that gets the items; `default` without this and `tables`
        tables: list of [table, its M], for items of several tables, one table after the other; replaces
            `table`
        steps: length L of the chunk, without the margins
        version: parameter version that acted
        fields: list of [name, dtype, shape of one entry, before, after, codec]
        offsets: [M], first step of each item in the chunk
        lengths: [M], steps of each item
        priorities: [M], initial priorities (before the exponent), at most 1e30
        data: raw: dtype [before + L + after, *shape]; lz4: uint8 [bytes], a block per entry
        sizes: lz4 only: [before + L + after], bytes of each block, including its size
    """

    TYPE: ClassVar[str] = "INSERT"
    incarnation: types.Number
    name: types.Text = ""
    oldest: types.Number = 1
    table: types.Name | UnsetType = UNSET
    tables: types.Counts | UnsetType = UNSET
    steps: types.Steps
    version: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    fields: types.Fields
    offsets: types.Int32s = msgspec.field(name="items/offsets")
    lengths: types.Int32s = msgspec.field(name="items/lengths")
    priorities: types.Float64s = msgspec.field(name="items/priorities")
    data: types.AnyArrays = msgspec.field(name="chunk/FIELD")
    sizes: types.Uint32Arrays = msgspec.field(name="lengths/FIELD")

    def __post_init__(self) -> None:
        types.check_fields(self.fields)
        lengths = {len(self.offsets), len(self.lengths), len(self.priorities)}
        if self.tables is not UNSET and lengths != {sum(self.counts().values())}:
            raise ValueError("the tables and the items differ in length")

    def counts(self) -> dict[str, int]:
        """Items by table, in their order."""
        if self.tables is not UNSET:
            return types.by_name(self.tables)
        return {"default" if self.table is UNSET else self.table: len(self.offsets)}


class Inserted(Body, kw_only=True):
    """Replay -> actor, once the insert is stored (or was stored before); repeats its request ID.

    Attributes:
        credit: inserts that the actor may have unacknowledged from now on
    """

    TYPE: ClassVar[str] = "INSERTED"
    credit: types.Size


class CreditQuestion(Body, kw_only=True):
    """Actor -> replay, the question.

    Attributes:
        incarnation: as in INSERT; 0 from a client that does not insert
        name: for logs
    """

    TYPE: ClassVar[str] = "CREDIT"
    incarnation: types.U64 = 0
    name: types.Text = ""


class Credit(Body, kw_only=True):
    """Replay -> actor, the answer; also unasked (request ID 0) on every change.

    Attributes:
        credit: as in INSERTED
        reason: why the credit is zero, or why inserts of this client wait; empty otherwise
        session: random number of the replay process; another one means a restart
        held: the first insert of this incarnation that waits for room in a queue, or for the disk: it and
            those after it are not lost; absent if none waits
        parked: this client's SAMPLE requests that wait for the limiter; absent if none waits
        fields: as in INSERT, what the shard stores; absent until it knows
        files: `folder` and `host` (boot ID) if files may be mapped; otherwise absent
    """

    TYPE: ClassVar[str] = "CREDIT"
    credit: types.Size
    reason: types.Text = ""
    session: types.U64
    held: types.U64 | UnsetType = UNSET
    parked: list[types.U64] | UnsetType = UNSET
    fields: types.Fields | UnsetType = UNSET
    files: dict[str, Any] | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.reason = peer_text(self.reason)


class Sample(Body, kw_only=True):
    """Learner -> replay.

    Attributes:
        table: `default` if absent
        batch_size: B; may be absent only with `shares`
        plain: lz4 fields may come as raw if none of their entries has shrunk
        token: content of the file `token` in the shard's folder, to get positions; absent to get windows
        shares: list of [table, rows], for a batch from several tables; replaces `table` and `batch_size`
        suspects: rows of a BATCH whose chunks do not match their checksums; the shard checks them itself
    """

    TYPE: ClassVar[str] = "SAMPLE"
    shares: types.Counts | UnsetType = UNSET
    table: types.Name | UnsetType = UNSET
    batch_size: types.Rows | UnsetType = UNSET
    plain: bool = False
    token: types.Name | UnsetType = UNSET
    suspects: types.Suspects | UnsetType = UNSET

    def __post_init__(self) -> None:
        self.counts()

    def counts(self) -> dict[str, int]:
        """Rows by table, in their order."""
        if self.shares is not UNSET:
            return types.by_name(self.shares)
        if self.batch_size is UNSET:
            raise ValueError("neither `batch_size` nor `shares`")
        return {"default" if self.table is UNSET else self.table: self.batch_size}


class Batch(Body, kw_only=True):
    """Replay -> learner, answer to SAMPLE.

    Attributes:
        table: the (first) table that the batch is from
        table_items: items in the whole table, for importance weights
        total_priority: sum of priority ** exponent over the whole table
        fields: as in INSERT
        shares: list of [table, rows, table_items, total_priority], if several were requested; rows are in
            the same order
        consumed: windows come in spite of the token, because sampling removes the items
        ids: [B], item IDs, never reused
        probabilities: [B], above 0, over the row's whole table
        versions: [B], parameter versions that acted
        lengths: [B], steps of each item; shorter windows repeat their last entry
        sampled: [B], how often each was sampled; only if rows are candidates: see `Candidates`
        data: raw: dtype [B, before + max(lengths) + after, *shape]; lz4: uint8 [bytes], one LZ4 frame that
            unpacks to it
        rows: [B], instead of the fields if the token is right: see `Same host`
        commits: [B], with rows: the number of each item's chunk
        offsets: [B], with rows: first step of each item in its chunk
    """

    TYPE: ClassVar[str] = "BATCH"
    table: types.Name = "default"
    table_items: types.ItemCount
    total_priority: float = 0.0
    fields: types.Fields
    shares: types.Shares | UnsetType = UNSET
    consumed: bool | UnsetType = UNSET
    ids: types.Uint64s
    probabilities: types.Float64s
    versions: types.Int64s
    lengths: types.Int32s
    sampled: types.Int64s | UnsetType = UNSET
    data: types.AnyArrays = msgspec.field(name="field/FIELD")
    rows: types.Int64s | UnsetType = UNSET
    commits: types.Uint64s | UnsetType = UNSET
    offsets: types.Int32s | UnsetType = UNSET

    def __post_init__(self) -> None:
        types.check_fields(self.fields)
        count = len(self.lengths)
        if not count or not len(self.ids) == len(self.probabilities) == len(self.versions) == count:
            raise ValueError("no rows, or arrays that differ in length")
        if self.sampled is not UNSET and len(self.sampled) != count:
            raise ValueError("`sampled` and the rows differ in length")
        if int(self.lengths.min()) < 1:
            raise ValueError("an item without steps")
        if self.shares is not UNSET and sum(rows for _, rows, _, _ in self.shares) != count:
            raise ValueError("the shares differ from the batch")


class Wait(Body, kw_only=True):
    """Replay -> learner, answer to a SAMPLE that the table's limiter held for half a second: ask again;
    learner -> actor, answer to a repeated INFER while the first one waits.

    Attributes:
        reason: what is missing
    """

    TYPE: ClassVar[str] = "WAIT"
    reason: types.Text = ""

    def __post_init__(self) -> None:
        self.reason = peer_text(self.reason)


class Priorities(Body, kw_only=True):
    """Learner -> replay, not answered; unknown IDs and invalid priorities are counted and skipped.

    Attributes:
        table: the table of these items
        chosen: these rows of a BATCH of candidates are learned from: each counts as sampled once more
        ids: [N]
        priorities: [N], the new ones (before the exponent)
    """

    TYPE: ClassVar[str] = "PRIORITIES"
    table: types.Name = "default"
    chosen: bool = False
    ids: types.Uint64s
    priorities: types.Float64s

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.priorities):
            raise ValueError("ids and priorities differ in length")


class Status(Body, kw_only=True):
    """Anyone -> replay, or the learner at its control address."""

    TYPE: ClassVar[str] = "STATUS"


class StatusOk(Body, kw_only=True):
    """Replay or learner -> sender.

    Attributes:
        values: from a shard, its sizes, rates and counters by name; from the learner, what `status.json` has
    """

    TYPE: ClassVar[str] = "STATUS_OK"
    values: dict[str, Any] = msgspec.field(name="*")


class SnapshotRequest(Body, kw_only=True):
    """Learner -> replay, to have it copy what it holds, or to ask for progress.

    Attributes:
        destination: absolute path on the shard's host, or address such as s3://BUCKET/PATH, without control
            characters; empty to ask only
        token: random, the same in every request about one snapshot
    """

    TYPE: ClassVar[str] = "SNAPSHOT"
    destination: Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*\Z")] = ""
    token: types.Name = ""


class SnapshotOk(Body, kw_only=True):
    """Replay -> sender, at once, while the copy continues.

    Attributes:
        destination: of the last snapshot; empty if there was none
        state: of that snapshot
        bytes_total: bytes to write
        bytes_done: bytes written
        items: items in it, once done
        detail: why it failed
    """

    TYPE: ClassVar[str] = "SNAPSHOT_OK"
    destination: types.Text
    state: Literal["running", "done", "failed", "none"]
    bytes_total: types.U64
    bytes_done: types.U64
    items: types.U64
    detail: types.Text

    def __post_init__(self) -> None:
        self.detail = peer_text(self.detail)
