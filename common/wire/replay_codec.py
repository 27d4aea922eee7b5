"""Chunks and batches as messages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.data.arena import Allocate, Arena
from common.data.columns import Payload
from common.data.fields import Chunk, FieldSpec, check_chunk
from common.data.packing import PackingError, pack_entries, unpack_frame
from common.data.replay import Insert, Items, Sample
from common.wire import messages
from common.wire.codec import DTYPES, Message, WireError

COMPRESS_MIN_BYTES = 1024
"""Where the fields are inferred, uint8 entries from this size on are compressed."""


@dataclass
class SampleBatch:
    """A batch of items, unpacked.

    Attributes:
        ids: uint64 ``[B]``, to update priorities with.
        probabilities: float64 ``[B]``, over the whole table.
        versions: int64 ``[B]``, parameters that acted.
        lengths: int32 ``[B]``, steps of each item; shorter windows repeat their last entry.
        table_items: items in the table when it was sampled.
        total_priority: sum of ``priority ** alpha`` over the table.
        fields: ``[B, window, *shape]`` by name.
        request_id: of the request that this answers.
        shard: address of the shard, where there are several.
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
        if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.replace("_", "").isalnum():
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


def encode_insert(chunk: Chunk, specs: Sequence[FieldSpec], table: str) -> Message:
    """An INSERT without its producer's numbers, the compressed fields compressed."""
    check_chunk(chunk, specs)
    arrays: dict[str, NDArray] = {
        "items/offsets": np.ascontiguousarray(chunk.offsets, np.int32),
        "items/lengths": np.ascontiguousarray(chunk.lengths, np.int32),
        "items/priorities": np.ascontiguousarray(chunk.priorities, np.float64),
    }
    for spec in specs:
        data = chunk.fields[spec.name]
        if spec.compress:
            arrays["chunk/" + spec.name], arrays["lengths/" + spec.name] = pack_entries(data)
        else:
            # A copy: the sender may write in its arrays before ZeroMQ has read them.
            arrays["chunk/" + spec.name] = np.array(data, order="C")
    fields = {
        "table": table,
        "steps": int(chunk.steps),
        "version": int(chunk.version),
        "fields": specs_to_wire(specs),
    }
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
    items = Items(
        message.array("items/offsets", "int32", 1),
        message.array("items/lengths", "int32", 1),
        message.array("items/priorities", "float64", 1),
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
        items={message.text("table", "default", max_chars=64): items},
    )


def encode_batch(table: str, sample: Sample, specs: Sequence[FieldSpec], request_id: int) -> Message:
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
    fields = {
        "table": table,
        "table_items": sample.table_items,
        "total_priority": sample.total_priority,
        "fields": specs_to_wire(specs),
    }
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
    if "rows" in message.arrays:
        fields = _fields_in_arena(message, arena, lengths, allocate)
        if fields is None:
            return None
    else:
        fields = _fields_in_message(message, count, int(lengths.max()), allocate)
    return SampleBatch(
        ids=message.array("ids", "uint64", 1),
        probabilities=message.array("probabilities", "float64", 1),
        versions=message.array("versions", "int64", 1),
        lengths=lengths,
        table_items=message.integer("table_items"),
        total_priority=message.number("total_priority", 0.0),
        fields=fields,
        request_id=message.request_id,
    )


def _fields_in_message(message: Message, count: int, longest: int, allocate: Allocate) -> dict[str, NDArray]:
    fields: dict[str, NDArray] = {}
    for spec in specs_from_wire(message.sequence("fields")):
        shape = (count, spec.entries(longest), *spec.shape)
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
