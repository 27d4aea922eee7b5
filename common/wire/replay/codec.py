"""Chunks and batches as messages, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from troupe.common.data.arena import Allocate, Arena
from troupe.common.data.columns import Payload
from troupe.common.data.inserts import Insert
from troupe.common.data.packing import Packer, PackingError, pack_entries, unpack_frame
from troupe.common.data.sample import Sample, Share
from troupe.common.data.schema import MAX_FIELD_BYTES, Chunk, FieldSpec, Items, check_chunk
from troupe.common.errors import ConfigError
from troupe.common.rl.importance import importance_weights
from troupe.common.wire import messages, types
from troupe.common.wire.body import Array, Body
from troupe.common.wire.codec import DTYPES, Dtype, Message, WireError

MIN_PROBABILITY = 1e-20
"""Nobody meets an item that is less likely; one that is said to be would make all others weigh nothing."""
MAX_TOTAL_PRIORITY = 1e60
"""Far above what a full table of the largest priorities adds up to; sums over shards stay finite."""
COMPRESS_MIN_BYTES = 1024
"""Where the fields are inferred, uint8 entries from this size on are compressed."""


@dataclass
class SampleBatch:
    """A batch of items, unpacked.

    Attributes:
        ids: uint64 `[B]`, to update priorities with.
        probabilities: float64 `[B]`, over the whole table that the row comes from.
        versions: int64 `[B]`, parameters that acted.
        lengths: int32 `[B]`, steps of each item; shorter windows repeat their last entry.
        sampled: int64 `[B]`, how often each was sampled, where rows are candidates; None elsewhere.
        table_items: items in the (first) table when it was sampled.
        total_priority: sum of `priority ** alpha` over the (first) table.
        min_probabilities: by table, the least of the batch, or of several shards' last ones.
        fields: `[B, window, *shape]` by name.
        request_id: of the request that this answers.
        shard: address of the shard, where there are several.
        shares: how the rows are divided between tables, one share behind the other.
        chosen: the rows are some of a batch's, and `fields` are copies.
    """

    ids: NDArray[np.uint64]
    probabilities: NDArray[np.float64]
    versions: NDArray[np.int64]
    lengths: NDArray[np.int32]
    table_items: int
    total_priority: float = 0.0
    min_probabilities: dict[str, float] = field(default_factory=dict)
    fields: dict[str, NDArray] = field(default_factory=dict)
    request_id: int = 0
    shard: str = ""
    shares: list[Share] = field(default_factory=list)
    sampled: NDArray[np.int64] | None = None
    chosen: bool = False

    @property
    def candidates(self) -> set[str]:
        """The tables whose rows are candidates, to choose the rows from that are learned from."""
        return {share.table for share in self.shares if share.wanted is not None}

    def part(self, rows: NDArray[np.int64], fields: dict[str, NDArray]) -> SampleBatch:
        """`rows [n]` of it, ascending, with `fields` of their own, such as candidates that were chosen."""
        tables = self.rows()
        shares = [
            replace(share, count=int(np.isin(rows, np.r_[tables[share.table]]).sum()), wanted=None)
            for share in self.shares
        ]
        shares = [share for share in shares if share.count]
        names = ("ids", "probabilities", "versions", "lengths")
        arrays: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **arrays, fields=fields, shares=shares, sampled=None, chosen=True)

    def rows(self) -> dict[str, slice]:
        """Which rows come from which table."""
        ends = np.cumsum([share.count for share in self.shares]).tolist()
        return {
            share.table: slice(end - share.count, end) for share, end in zip(self.shares, ends, strict=True)
        }

    def weights(self, beta: float) -> NDArray[np.float32]:
        """Importance weights `[B]` in (0, 1], on one scale for the batches of all shards.

        `beta` 0 gives ones, 1 undoes the bias of prioritized sampling wholly: see `importance_weights`.
        Rows of several tables are weighed within the table that each comes from.
        """
        weights = np.empty(len(self.ids), np.float32)
        for table, rows in self.rows().items():
            least = self.min_probabilities[table]
            weights[rows] = importance_weights(self.probabilities[rows], least, beta)
        return weights


def infer_specs(chunk: Chunk) -> tuple[FieldSpec, ...]:
    """Fields that fit `chunk`, large uint8 entries compressed. Raises ConfigError where none do."""
    specs = []
    for name, array in chunk.fields.items():
        if array.dtype.name not in DTYPES:
            raise ConfigError(f"field {name} is of {array.dtype}; replay stores {', '.join(DTYPES)}")
        if not array.ndim or len(array) < chunk.steps:
            raise ConfigError(f"field {name} is {array.shape}, too short for {chunk.steps} steps")
        spec = FieldSpec(name, array.dtype.name, tuple(array.shape[1:]), before=len(array) - chunk.steps)
        compress = spec.dtype == "uint8" and spec.entry_bytes >= COMPRESS_MIN_BYTES
        specs.append(FieldSpec(spec.name, spec.dtype, spec.shape, spec.before, 0, compress))
    return tuple(specs)


def specs_to_wire(specs: Sequence[FieldSpec]) -> list[types.FieldEntry]:
    """The fields as `[name, dtype, shape, before, after, codec]`."""
    return [
        (s.name, cast(Dtype, s.dtype), list(s.shape), s.before, s.after, "lz4" if s.compress else "raw")
        for s in specs
    ]


def specs_from_wire(entries: Sequence[types.FieldEntry]) -> tuple[FieldSpec, ...]:
    """The inverse of `specs_to_wire`."""
    return tuple(
        FieldSpec(name, dtype, tuple(shape), before, after, codec == "lz4")
        for name, dtype, shape, before, after, codec in entries
    )


def encode_insert(
    chunk: Chunk,
    specs: Sequence[FieldSpec],
    table: str,
    packers: Mapping[str, Packer] | None = None,
    *,
    incarnation: int = 1,
    name: str = "",
) -> messages.Insert:
    """An INSERT, the compressed fields compressed (by their `packers`). Raises ConfigError."""
    check_chunk(chunk, specs)
    if table in chunk.more:
        raise ConfigError(f"items for table {table!r} twice: in the chunk's own and in `more`")
    tables = {table: chunk.items} if len(chunk.offsets) else {}
    tables |= chunk.more
    if not tables:
        raise ConfigError("a chunk without items: nothing could be sampled from it")
    every = list(tables.values())
    data, sizes = {}, {}
    for spec in specs:
        entries = chunk.fields[spec.name]
        if spec.compress:
            pack = pack_entries if packers is None else packers[spec.name].pack
            data[spec.name], sizes[spec.name] = pack(entries)
        else:
            # A copy: the sender may write in its arrays before ZeroMQ has read them.
            data[spec.name] = np.array(entries, order="C")
    size = sum(each.nbytes for arrays in (data, sizes) for each in arrays.values())
    most = messages.REPLAY_LIMITS.total_bytes
    if size > most:
        raise ConfigError(f"a chunk of {size:,} bytes; a shard takes {most:,}: use shorter chunks")
    several = len(tables) > 1
    return messages.Insert(
        incarnation=incarnation,
        name=name,
        table=UNSET if several else next(iter(tables)),
        tables=[(name, len(items.offsets)) for name, items in tables.items()] if several else UNSET,
        steps=int(chunk.steps),
        version=int(chunk.version),
        fields=specs_to_wire(specs),
        offsets=np.concatenate([items.offsets for items in every]).astype(np.int32),
        lengths=np.concatenate([items.lengths for items in every]).astype(np.int32),
        priorities=np.concatenate([items.priorities for items in every]).astype(np.float64),
        data=data,
        sizes=sizes,
    )


def decode_insert(body: messages.Insert, number: int) -> Insert:
    """The insert that `body` says; raises WireError if it is not one. Its data are checked by the store."""
    if not number:
        raise WireError("bad_field", "the request id of an INSERT is its number, which begins with 1")
    if body.oldest > number:
        raise WireError("bad_field", f"INSERT.oldest: {body.oldest} is above the insert's own number")
    specs = specs_from_wire(body.fields)
    payloads = {}
    for spec in specs:
        data = _array(body, "chunk/", body.data, spec.name)
        if spec.compress:
            Array("uint8", 1).check(body.TYPE, "chunk/" + spec.name, data)
            payloads[spec.name] = Payload(data, _array(body, "lengths/", body.sizes, spec.name))
        else:
            Array(spec.dtype, 1 + len(spec.shape)).check(body.TYPE, "chunk/" + spec.name, data)
            payloads[spec.name] = Payload(data)
    items, end = {}, 0
    counts = body.counts()
    for name, count in counts.items():
        part = slice(end, end + count) if len(counts) > 1 else slice(None)
        items[name] = Items(body.offsets[part], body.lengths[part], body.priorities[part])
        end += count
    return Insert(
        incarnation=body.incarnation,
        sequence=number,
        oldest=body.oldest,
        specs=specs,
        payloads=payloads,
        steps=body.steps,
        version=body.version,
        items=items,
    )


def _array(body: Body, prefix: str, arrays: Mapping[str, NDArray], name: str) -> NDArray:
    array = arrays.get(name)
    if array is None:
        raise WireError("bad_field", f"{body.TYPE}: object missing required field `{prefix}{name}`")
    return array


def encode_batch(sample: Sample, specs: Sequence[FieldSpec], *, consumed: bool = False) -> messages.Batch:
    """A BATCH: with the windows, or with their places only if the sample has none.

    `consumed` says that places were asked for, and why there are none.
    """
    first = sample.shares[0]
    shares = [(s.table, s.count, s.table_items, s.total_priority) for s in sample.shares]
    candidates = any(share.wanted is not None for share in sample.shares)
    windows = bool(sample.arrays)
    return messages.Batch(
        table=first.table,
        table_items=first.table_items,
        total_priority=first.total_priority,
        fields=specs_to_wire(specs),
        shares=shares if len(shares) > 1 else UNSET,
        consumed=True if consumed else UNSET,
        ids=sample.ids,
        probabilities=sample.probabilities,
        versions=sample.versions,
        lengths=sample.lengths,
        sampled=sample.sampled if candidates else UNSET,
        data={spec.name: sample.arrays[spec.name] for spec in specs} if windows else {},
        rows=UNSET if windows else sample.rows,
        commits=UNSET if windows else sample.commits,
        offsets=UNSET if windows else sample.offsets,
    )


def decode_batch(
    message: Message,
    arena: Arena | None = None,
    allocate: Allocate = np.empty,
    *,
    shares: Mapping[str, int] | None = None,
    expected: Sequence[FieldSpec] | None = None,
) -> SampleBatch | None:
    """The batch in `message`, unpacked; raises WireError if it is none.

    None if it says places only, and not all of them are in `arena` any more.

    Args:
        message: a BATCH.
        arena: the shard's files, where they can be had.
        allocate: makes the arrays.
        shares: the rows by table that were asked for, if fewer, or others, are wrong; more of a table are
            candidates.
        expected: the only fields that are right, if others are wrong.
    """
    body = messages.Batch.of(message)
    least, most = float(body.probabilities.min()), float(body.probabilities.max())
    if not MIN_PROBABILITY <= least <= most <= 1 + 1e-6:  # nor NaN
        raise WireError("bad_batch", f"probabilities from {least:g} to {most:g}")
    count = len(body.lengths)
    given = [Share(body.table, count, body.table_items, body.total_priority)]
    if body.shares is not UNSET:
        given = [Share(*share) for share in body.shares]
    if shares is not None:
        given = _as_asked(given, shares, candidates=body.sampled is not UNSET)
    for share in given:
        # Shards are drawn by these sums: one that claims infinity would get every request, for good.
        if not 0 <= share.total_priority <= MAX_TOTAL_PRIORITY:
            raise WireError("bad_batch", f"a total priority of {share.total_priority:g}")
    # Before the windows are made: fields of another run would have any size.
    if expected is not None:
        _check_expected(body, arena, expected)
    if body.rows is not UNSET:
        fields = _fields_in_arena(body, arena, allocate)
        if fields is None:
            return None
    else:
        fields = _fields_in_message(body, count, int(body.lengths.max()), allocate)
    batch = SampleBatch(
        ids=body.ids,
        probabilities=body.probabilities,
        versions=body.versions,
        lengths=body.lengths,
        table_items=given[0].table_items,
        total_priority=given[0].total_priority,
        fields=fields,
        request_id=message.request_id,
        shares=given,
        sampled=None if body.sampled is UNSET else body.sampled,
    )
    batch.min_probabilities = {
        table: float(batch.probabilities[rows].min()) for table, rows in batch.rows().items()
    }
    return batch


def _as_asked(given: Sequence[Share], asked: Mapping[str, int], *, candidates: bool) -> list[Share]:
    """The shares, with what was `wanted` where there are candidates. Raises WireError where others came."""
    # A learner that asked for half of each would not notice a batch of one table only.
    if len(given) != len(asked) or {share.table for share in given} != asked.keys():
        raise WireError("bad_batch", "not the tables that were asked for")
    shares = []
    for share in given:
        wanted = asked[share.table]
        if share.count < wanted or (share.count > wanted and not candidates):
            raise WireError("bad_batch", "not the rows that were asked for")
        shares.append(share if share.count == wanted else replace(share, wanted=wanted))
    return shares


def _check_expected(body: messages.Batch, arena: Arena | None, expected: Sequence[FieldSpec]) -> None:
    """Raise WireError where the windows would not be those of the `expected` fields."""
    specs = specs_from_wire(body.fields) if body.rows is UNSET or arena is None else arena.specs
    found, wanted = ({spec.name: _windows(spec) for spec in each} for each in (specs, expected))
    if found != wanted:
        names = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise WireError(
            "bad_fields",
            f"other fields than this run's, such as {names[0]}: start that shard with another --data-dir, "
            "or with --volatile",
        )


def _windows(spec: FieldSpec) -> tuple[str, tuple[int, ...], int]:
    return spec.dtype, spec.shape, spec.entries(1)


def _fields_in_message(
    body: messages.Batch, count: int, longest: int, allocate: Allocate
) -> dict[str, NDArray]:
    fields: dict[str, NDArray] = {}
    for spec in specs_from_wire(body.fields):
        shape = (count, spec.entries(longest), *spec.shape)
        if not 0 < math.prod(shape) * np.dtype(spec.dtype).itemsize <= MAX_FIELD_BYTES:
            raise WireError("bad_batch", f"field {spec.name} of the shape {shape}")
        array = _array(body, "field/", body.data, spec.name)
        if spec.compress and array.ndim == 1:
            Array("uint8", 1).check(body.TYPE, "field/" + spec.name, array)
            try:
                out = allocate(shape, spec.dtype)
                fields[spec.name] = unpack_frame(
                    array.data, shape, spec.dtype, out, entry_bytes=spec.entry_bytes
                )
            except PackingError as error:
                raise WireError("bad_batch", f"field {spec.name}: {error}") from None
        else:
            Array(spec.dtype).check(body.TYPE, "field/" + spec.name, array)
            if array.shape != shape:
                raise WireError("bad_batch", f"field {spec.name} is {array.shape}, expected {shape}")
            fields[spec.name] = array
    return fields


def _fields_in_arena(
    body: messages.Batch, arena: Arena | None, allocate: Allocate
) -> dict[str, NDArray] | None:
    rows, commits, offsets = body.rows, body.commits, body.offsets
    if arena is None or rows is UNSET or commits is UNSET or offsets is UNSET:
        raise WireError("bad_batch", "places that were not asked for, or that are not complete")
    if not len(rows) == len(commits) == len(offsets) == len(body.lengths):
        raise WireError("bad_batch", "places that differ in number")
    try:
        return arena.gather(rows, commits, offsets, body.lengths, allocate)
    except (ValueError, IndexError) as error:
        raise WireError("bad_batch", str(error)) from None
