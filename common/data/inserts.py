"""A chunk on its way into replay, and everything that can be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.common.data.columns import Payload
from troupe.common.data.distances import FEATURES
from troupe.common.data.packing import MAX_ENTRY_BYTES, PackingError, check_blocks
from troupe.common.data.schema import MAX_FIELD_BYTES, FieldSpec, Items
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import RefusedError

MAX_PRIORITY = 1e30
"""Larger priorities are refused: sums of them could become infinite."""
SERIAL, MORE, LAST = 1, 2, 3
"""Incarnations of inserts by which they are known again: of a run in one process, whose only actor has this
number, of an imported episode, and of its last. Clients' are large numbers."""


def valid_priorities(priorities: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which of `priorities [n]` are from 0 to `MAX_PRIORITY`; NaN is not."""
    return (priorities >= 0) & (priorities <= MAX_PRIORITY)


class GapError(Exception):
    """An insert whose predecessor has not arrived. `expected` is the sequence number to continue with."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"expected insert {expected}")
        self.expected = expected


class HeldError(Exception):
    """An insert that has to wait for room: `str()` says which. It is right to try it again."""


@dataclass
class Insert:
    """A chunk on its way into the store.

    Attributes:
        incarnation: random number of the producing process.
        sequence: number of the insert, 1, 2, 3, ... in each incarnation.
        oldest: smallest number that the producer has not seen acknowledged; at most `sequence`.
        specs: what the producer takes the fields to be.
        payloads: their data.
        steps: length of the chunk.
        version: parameters that acted.
        items: the windows, by table.
        checked: whether `check_insert` has passed it, for one that waits for room is tried many times.
        owner: the key of its process, or its connection; empty for nobody in particular.
        waits_for: why it had to wait when it was last tried; empty where it never had to.
    """

    incarnation: int
    sequence: int
    oldest: int
    specs: tuple[FieldSpec, ...]
    payloads: Mapping[str, Payload]
    steps: int
    version: int
    items: Mapping[str, Items]
    checked: bool = False
    waits_for: str = ""
    owner: str = ""


def check_fit(insert: Insert, tables: Mapping[str, TableConfig], budget_bytes: int) -> None:
    """Raise RefusedError where full tables could not have their items. What is compressed counts as 0."""
    chunk_bytes = sum(s.entries(insert.steps) * s.entry_bytes for s in insert.specs if not s.compress)
    for name, items in insert.items.items():
        capacity = tables[name].capacity
        wanted = capacity * chunk_bytes // len(items.offsets)
        if wanted > budget_bytes:
            amount = f"{wanted / 2**30:.1f} GiB of {budget_bytes / 2**30:.1f} GiB"
            raise RefusedError(
                "plan",
                f"{capacity:,} items of table {name!r} would take {amount} that there are: lower "
                "the capacity, compress, or give max_bytes to have the oldest leave early",
            )


def check_insert(
    insert: Insert,
    stored: Sequence[FieldSpec] | None,
    tables: Mapping[str, TableConfig],
    item_steps: tuple[int, int] | None = None,
) -> None:
    """Raise RefusedError for whatever is wrong with `insert` in itself, or does not fit what is stored.

    `item_steps` are those of the shortest and of the longest item that are taken.
    """
    # Signature first: everything below reads the data by these fields.
    if stored is not None and not same_fields(insert.specs, stored):
        raise RefusedError("signature", _difference(insert.specs, tuple(stored)))
    if not 0 < insert.steps < 2**31:
        raise RefusedError("bad_chunk", f"{insert.steps} steps")
    if set(insert.payloads) != {spec.name for spec in insert.specs} or not insert.specs:
        raise RefusedError("bad_chunk", "the data and the fields differ in their names")
    for spec in insert.specs:
        _check_payload(spec, insert.payloads[spec.name], insert.steps)
    if not insert.items:
        raise RefusedError("bad_items", "a chunk without items")
    for name, items in insert.items.items():
        table = tables.get(name)
        if table is None:
            raise no_table(name, tables)
        _check_items(items, insert.steps, table.capacity)
        if table.sampler == "attentive" and not has_features(insert.specs):
            raise RefusedError(
                "bad_chunk",
                f"table {name!r} is sampled by the field `{FEATURES}`, which this chunk lacks, or not as a "
                "vector of float numbers for each step, not compressed",
            )
        if item_steps and (items.lengths.min() < item_steps[0] or items.lengths.max() > item_steps[1]):
            raise RefusedError("bad_items", "an item of other than {} to {} steps".format(*item_steps))


def has_features(specs: Sequence[FieldSpec]) -> bool:
    """Whether distances can be measured by these fields."""
    spec = next((spec for spec in specs if spec.name == FEATURES), None)
    return (
        spec is not None and not spec.compress and np.dtype(spec.dtype).kind == "f" and len(spec.shape) == 1
    )


def no_table(name: str, tables: Mapping[str, Any]) -> RefusedError:
    """The answer to a name that no table has."""
    return RefusedError("no_table", f"{name!r}: the tables are {sorted(tables)}")


def _check_payload(spec: FieldSpec, payload: Payload, steps: int) -> None:
    entries = spec.entries(steps)
    if not 0 < spec.entry_bytes * entries <= MAX_FIELD_BYTES:
        raise RefusedError("bad_chunk", f"field {spec.name} has no bytes, or more than {MAX_FIELD_BYTES}")
    if payload.entries != entries:
        raise RefusedError(
            "bad_chunk", f"field {spec.name} has {payload.entries} entries, expected {entries}"
        )
    if not spec.compress:
        if payload.data.shape[1:] != spec.shape or payload.data.dtype != np.dtype(spec.dtype):
            raise RefusedError("bad_chunk", f"field {spec.name} is {payload.data.dtype}{payload.data.shape}")
        return
    assert payload.lengths is not None
    if spec.entry_bytes > MAX_ENTRY_BYTES:
        raise RefusedError("bad_chunk", f"an entry of {spec.name} is too large to be compressed")
    try:
        check_blocks(payload.data, payload.lengths, spec.entry_bytes)
    except PackingError as error:
        raise RefusedError("bad_chunk", f"field {spec.name}: {error}") from None


def _check_items(items: Items, steps: int, capacity: int) -> None:
    count = len(items.offsets)
    if not count or len(items.lengths) != count or len(items.priorities) != count:
        raise RefusedError("bad_items", "offsets, lengths and priorities differ in length, or there are none")
    # It could never have a place, and held for good it would hold up all inserts of its producer behind it.
    if count > capacity:
        raise RefusedError("bad_items", f"{count} items in a table of {capacity}")
    # The sum of two int32 may wrap, and a window beyond the chunk would pass.
    ends = items.offsets.astype(np.int64) + items.lengths
    if int(items.offsets.min()) < 0 or int(items.lengths.min()) < 1 or int(ends.max()) > steps:
        raise RefusedError("bad_items", "an item lies outside of its chunk")
    if not np.all(valid_priorities(items.priorities)):
        raise RefusedError("bad_priority", "a priority is negative, NaN or infinite")


def same_fields(a: Sequence[FieldSpec], b: Sequence[FieldSpec]) -> bool:
    """Whether two lists of fields store the same, in whatever order; only the sum of the margins matters."""
    # Another order of the same fields is the same: JSON and dictionaries of other languages need not keep it.
    return {_essence(spec) for spec in a} == {_essence(spec) for spec in b} and len(a) == len(b)


def _essence(spec: FieldSpec) -> tuple[Any, ...]:
    # How the margin is divided is the agent's affair: stored are entries.
    return spec.name, spec.dtype, spec.shape, spec.before + spec.after, spec.compress


def _difference(theirs: tuple[FieldSpec, ...], ours: tuple[FieldSpec, ...]) -> str:
    """What is wrong with a signature, in one line."""
    if {spec.name for spec in theirs} != {spec.name for spec in ours}:
        return f"fields {[s.name for s in theirs]}, this server stores {[s.name for s in ours]}"
    known = {spec.name: spec for spec in ours}
    for spec in theirs:
        if _essence(spec) != _essence(known[spec.name]):
            return f"{spec}, this server stores {known[spec.name]}"
    return "a field twice"
