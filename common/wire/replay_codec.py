"""Chunks and batches as messages, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.arena import Allocate, Arena
from common.data.columns import Payload
from common.data.fields import MAX_FIELD_BYTES, Chunk, FieldSpec, Items, check_chunk
from common.data.inserts import Insert
from common.data.packing import Packer, PackingError, pack_entries, unpack_frame
from common.data.sample import Sample, Share
from common.wire import messages
from common.wire.codec import DTYPES, Message, WireError

MAX_BATCH = 1 << 20
MAX_TABLES = 64

COMPRESS_MIN_BYTES = 1024
"""Where the fields are inferred, uint8 entries from this size on are compressed."""


@dataclass
class SampleBatch:
    """A batch of items, unpacked.

    Attributes:
        ids: uint64 ``[B]``, to update priorities with.
        probabilities: float64 ``[B]``, over the whole table that the row comes from.
        versions: int64 ``[B]``, parameters that acted.
        lengths: int32 ``[B]``, steps of each item; shorter windows repeat their last entry.
        table_items: items in the (first) table when it was sampled.
        total_priority: sum of ``priority ** alpha`` over the (first) table.
        fields: ``[B, window, *shape]`` by name.
        request_id: of the request that this answers.
        shard: address of the shard, where there are several.
        shares: how the rows are divided between tables, one share behind the other.
    """

    ids: NDArray[np.uint64]
    probabilities: NDArray[np.float64]
    versions: NDArray[np.int64]
    lengths: NDArray[np.int32]
    table_items: int
    total_priority: float = 0.0
    fields: dict[str, NDArray] = field(default_factory=dict)
    request_id: int = 0
    shard: str = ""
    shares: list[Share] = field(default_factory=list)

    def rows(self) -> dict[str, slice]:
        """Which rows come from which table."""
        ends = np.cumsum([share.count for share in self.shares]).tolist()
        return {
            share.table: slice(end - share.count, end) for share, end in zip(self.shares, ends, strict=True)
        }


def infer_specs(chunk: Chunk) -> tuple[FieldSpec, ...]:
    """Fields that fit ``chunk``, large uint8 entries compressed."""
    specs = []
    for name, array in chunk.fields.items():
        spec = FieldSpec(name, array.dtype.name, tuple(array.shape[1:]), before=len(array) - chunk.steps)
        compress = spec.dtype == "uint8" and spec.entry_bytes >= COMPRESS_MIN_BYTES
        specs.append(FieldSpec(spec.name, spec.dtype, spec.shape, spec.before, 0, compress))
    return tuple(specs)


def specs_to_wire(specs: Sequence[FieldSpec]) -> list[list[Any]]:
    """The fields as ``[name, dtype, shape, before, after, codec]``."""
    return [
        [s.name, s.dtype, list(s.shape), s.before, s.after, "lz4" if s.compress else "raw"] for s in specs
    ]


def specs_from_wire(entries: list[Any]) -> tuple[FieldSpec, ...]:
    """The inverse of ``specs_to_wire``; raises WireError for what is not a list of fields."""
    specs = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 6:
            raise WireError("bad_field", "a field is [name, dtype, shape, before, after, codec]")
        name, dtype, shape, before, after, codec = entry
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_]{1,64}", name):
            raise WireError("bad_field", "a field's name is up to 64 letters, digits and _")
        if dtype not in DTYPES or codec not in ("raw", "lz4"):
            raise WireError("bad_field", f"field {name} has an unknown dtype or codec")
        numbers = [*shape, before, after] if isinstance(shape, list) and len(shape) <= 7 else [-1]
        if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**31 for n in numbers):
            raise WireError("bad_field", f"field {name} has no proper shape or margins")
        specs.append(FieldSpec(name, dtype, tuple(shape), before, after, codec == "lz4"))
    if len({spec.name for spec in specs}) != len(specs) or not 0 < len(specs) <= 28:
        raise WireError("bad_field", "from 1 to 28 fields with different names are allowed")
    return tuple(specs)


def encode_insert(
    chunk: Chunk, specs: Sequence[FieldSpec], table: str, packers: Mapping[str, Packer] | None = None
) -> Message:
    """An INSERT without its producer's numbers, the compressed fields compressed (by their ``packers``)."""
    check_chunk(chunk, specs)
    if table in chunk.more:
        raise ValueError(f"items for table {table!r} twice")
    tables = {table: chunk.items} if len(chunk.offsets) else {}
    tables |= chunk.more
    if not tables:
        raise ValueError("a chunk without items")
    every = list(tables.values())
    arrays: dict[str, NDArray] = {
        "items/offsets": np.concatenate([items.offsets for items in every]).astype(np.int32),
        "items/lengths": np.concatenate([items.lengths for items in every]).astype(np.int32),
        "items/priorities": np.concatenate([items.priorities for items in every]).astype(np.float64),
    }
    for spec in specs:
        data = chunk.fields[spec.name]
        if spec.compress:
            pack = pack_entries if packers is None else packers[spec.name].pack
            arrays["chunk/" + spec.name], arrays["lengths/" + spec.name] = pack(data)
        else:
            # A copy: the sender may write in its arrays before ZeroMQ has read them.
            arrays["chunk/" + spec.name] = np.array(data, order="C")
    fields: dict[str, Any] = {
        "steps": int(chunk.steps),
        "version": int(chunk.version),
        "fields": specs_to_wire(specs),
    }
    if len(tables) == 1:
        fields["table"] = next(iter(tables))
    else:
        fields["tables"] = [[name, len(items.offsets)] for name, items in tables.items()]
    return Message(messages.INSERT, fields, arrays)


def decode_insert(message: Message) -> Insert:
    """The insert in ``message``; raises WireError if it is not one. Its data are checked by the store."""
    specs = specs_from_wire(message.sequence("fields"))
    payloads = {}
    for spec in specs:
        if spec.compress:
            blocks = message.array("chunk/" + spec.name, "uint8", 1)
            payloads[spec.name] = Payload(blocks, message.array("lengths/" + spec.name, "uint32", 1))
        else:
            payloads[spec.name] = Payload(
                message.array("chunk/" + spec.name, spec.dtype, 1 + len(spec.shape))
            )
    sequence = message.request_id
    return Insert(
        incarnation=message.integer("incarnation", low=1),
        sequence=sequence,
        oldest=message.integer("oldest", sequence, low=1, high=sequence),
        specs=specs,
        payloads=payloads,
        steps=message.integer("steps", low=1, high=2**31 - 1),
        version=message.integer("version", 0, high=2**63 - 1),
        items=_decode_items(message),
    )


def _decode_items(message: Message) -> dict[str, Items]:
    """The items by table; they stand one table behind the other."""
    offsets = message.array("items/offsets", "int32", 1)
    lengths = message.array("items/lengths", "int32", 1)
    priorities = message.array("items/priorities", "float64", 1)
    if "tables" not in message.fields:
        return {message.text("table", "default", max_chars=64): Items(offsets, lengths, priorities)}
    items, end = {}, 0
    for name, count in counts_from_wire(message, "tables").items():
        part = slice(end, end + count)
        items[name] = Items(offsets[part], lengths[part], priorities[part])
        end += count
    if {len(offsets), len(lengths), len(priorities)} != {end}:
        raise WireError("bad_field", "the tables and the items differ in length")
    return items


def counts_from_wire(message: Message, name: str) -> dict[str, int]:
    """The field ``name``, a list of [table, count]."""
    counts: dict[str, int] = {}
    entries = message.sequence(name, of=list)
    for entry in entries:
        if len(entry) != 2 or not isinstance(entry[0], str) or type(entry[1]) is not int:
            raise WireError("bad_field", f"{name} is not a list of [table, count]")
        if len(entry[0]) > 64 or not 0 < entry[1] <= MAX_BATCH:
            raise WireError("bad_field", f"{name} has a table or a count out of range")
        counts[entry[0]] = entry[1]
    if not 0 < len(counts) == len(entries) <= MAX_TABLES:
        raise WireError("bad_field", f"{name} has no table, too many, or one twice")
    return counts


def decode_shares(message: Message) -> dict[str, int]:
    """How many rows of which table a SAMPLE asks for."""
    if "shares" in message.fields:
        return counts_from_wire(message, "shares")
    table = message.text("table", "default", max_chars=64)
    return {table: message.integer("batch_size", low=1, high=MAX_BATCH)}


def encode_batch(sample: Sample, specs: Sequence[FieldSpec], request_id: int) -> Message:
    """A BATCH: with the windows, or with their places only if the sample has none."""
    arrays: dict[str, NDArray] = {
        "ids": sample.ids,
        "probabilities": sample.probabilities,
        "versions": sample.versions,
        "lengths": sample.lengths,
    }
    if sample.arrays:
        for spec in specs:
            arrays["field/" + spec.name] = sample.arrays[spec.name]
    else:
        arrays |= {"rows": sample.rows, "commits": sample.commits, "offsets": sample.offsets}
    first = sample.shares[0]
    fields: dict[str, Any] = {
        "table": first.table,
        "table_items": first.table_items,
        "total_priority": first.total_priority,
        "fields": specs_to_wire(specs),
    }
    if len(sample.shares) > 1:
        fields["shares"] = [[s.table, s.count, s.table_items, s.total_priority] for s in sample.shares]
    return Message(messages.BATCH, fields, arrays, request_id)


def decode_batch(
    message: Message, arena: Arena | None = None, allocate: Allocate = np.empty
) -> SampleBatch | None:
    """The batch in ``message``, unpacked; raises WireError if it is none.

    None if it says places only, and not all of them are in ``arena`` any more.
    """
    lengths = message.array("lengths", "int32", 1)
    count = len(lengths)
    if not count:
        raise WireError("bad_batch", "an empty batch")
    shares = _decode_shares(message, count)
    ids = message.array("ids", "uint64", 1)
    probabilities, versions = (
        message.array("probabilities", "float64", 1),
        message.array("versions", "int64", 1),
    )
    if not len(ids) == len(probabilities) == len(versions) == count or int(lengths.min()) < 1:
        raise WireError("bad_batch", "arrays that differ in length, or an item without steps")
    if "rows" in message.arrays:
        fields = _fields_in_arena(message, arena, lengths, allocate)
        if fields is None:
            return None
    else:
        fields = _fields_in_message(message, count, int(lengths.max()), allocate)
    return SampleBatch(
        ids=ids,
        probabilities=probabilities,
        versions=versions,
        lengths=lengths,
        table_items=shares[0].table_items,
        total_priority=shares[0].total_priority,
        fields=fields,
        request_id=message.request_id,
        shares=shares,
    )


def _fields_in_message(message: Message, count: int, longest: int, allocate: Allocate) -> dict[str, NDArray]:
    fields: dict[str, NDArray] = {}
    for spec in specs_from_wire(message.sequence("fields")):
        shape = (count, spec.entries(longest), *spec.shape)
        if not 0 < math.prod(shape) * np.dtype(spec.dtype).itemsize <= MAX_FIELD_BYTES:
            raise WireError("bad_batch", f"field {spec.name} of the shape {shape}")
        array = message.array("field/" + spec.name)
        if spec.compress and array.ndim == 1:
            frame = message.array("field/" + spec.name, "uint8", 1)
            try:
                fields[spec.name] = unpack_frame(frame.data, shape, spec.dtype, allocate(shape, spec.dtype))
            except PackingError as error:
                raise WireError("bad_batch", f"field {spec.name}: {error}") from None
        else:
            array = message.array("field/" + spec.name, spec.dtype)
            if array.shape != shape:
                raise WireError("bad_batch", f"field {spec.name} is {array.shape}, expected {shape}")
            fields[spec.name] = array
    return fields


def _fields_in_arena(
    message: Message, arena: Arena | None, lengths: NDArray[np.int32], allocate: Allocate
) -> dict[str, NDArray] | None:
    rows, commits = message.array("rows", "int64", 1), message.array("commits", "uint64", 1)
    offsets = message.array("offsets", "int32", 1)
    if arena is None or not len(rows) == len(commits) == len(offsets) == len(lengths):
        raise WireError("bad_batch", "places that were not asked for, or that differ in number")
    try:
        return arena.gather(rows, commits, offsets, lengths, allocate)
    except (ValueError, IndexError) as error:
        raise WireError("bad_batch", str(error)) from None


def _decode_shares(message: Message, count: int) -> list[Share]:
    if "shares" not in message.fields:
        table = message.text("table", "default", max_chars=64)
        items, total = message.integer("table_items", low=1), message.number("total_priority", 0.0)
        return [Share(table, count, items, total)]
    shares = []
    for entry in message.sequence("shares", of=list):
        if [type(value) for value in entry] != [str, int, int, float]:
            raise WireError("bad_batch", "a share is [table, rows, table items, total priority]")
        shares.append(Share(*entry))
    if not shares:
        raise WireError("bad_batch", "no shares")
    if sum(share.count for share in shares) != count or min(share.count for share in shares) < 1:
        raise WireError("bad_batch", "the shares differ from the batch")
    if min(share.table_items for share in shares) < 1:
        raise WireError("bad_batch", "a share of a table without items")
    return shares
