"""Types of fields and arrays, with their bounds."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from troupe.common import timing
from troupe.common.data.schema import FIELD_NAME
from troupe.common.data.table_config import MAX_TABLES
from troupe.common.wire.body import Array
from troupe.common.wire.codec import Dtype

MAX_BATCH = 1 << 20
"""Rows of one table in a batch, or items of one table in an insert."""
MAX_PROCESS_SLOTS = 1 << 14
"""Slots of one actor."""
MAX_RUN_SLOTS = 1 << 20
"""Slots of all actors."""
MAX_LEARNERS = 1 << 10
"""Learners that share batches."""
MAX_PARTS = 1 << 16
"""Parts of one evaluation."""
MAX_GROUPS = 64
"""Groups of slots of one actor."""

MAX_EPISODES = 4096
"""Games of one report."""
MAX_VALUE = 1e30
"""Of a metric, or a return: what curves can show, and sums of it are finite."""
MAX_EXACT = 2**53
"""Whole numbers above this cannot be told apart as floats."""
MAX_TROUBLE = 500
"""Characters that say what went wrong in an environment."""
METRIC = r"[A-Za-z0-9_-]+([/.][A-Za-z0-9_-]+)*"
"""Pattern of the names of metrics and levels, which become parts of the names of curves."""

U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger integers
Number = Annotated[int, Meta(ge=1)]
"""Of an insert; also an incarnation that inserts."""
Size = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Steps = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StepsMade = Annotated[int, Meta(ge=0, le=2**53)]
StepCount = Annotated[int, Meta(ge=0, le=2**62)]
"""Of one process, all of its slots together."""
Version = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
"""Of parameters; -1 for none."""
Rows = Annotated[int, Meta(ge=1, le=MAX_BATCH)]
ItemCount = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Heartbeat = Annotated[float, Meta(ge=timing.HEARTBEAT_S[0], le=timing.HEARTBEAT_S[1])]
Liveness = Annotated[float, Meta(ge=timing.LIVENESS_S[0], le=timing.LIVENESS_S[1])]
Clock = Annotated[float, Meta(ge=0, le=1e11)]
"""Seconds since 1970."""
SlotCount = Annotated[int, Meta(ge=0, le=MAX_RUN_SLOTS)]
Slots = Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_RUN_SLOTS)]], Meta(max_length=MAX_PROCESS_SLOTS)]
"""Of one process."""
Name = Annotated[str, Meta(max_length=64)]
Level = Annotated[str, Meta(max_length=64, pattern=rf"^{METRIC}\Z")]
Value = Annotated[float, Meta(ge=-MAX_VALUE, le=MAX_VALUE)]
"""Of a game. NaN is in no range."""
Text = Annotated[str, Meta(max_length=4096)]
MAX_SHARDS = 128
"""Live shards of a run: twice as many as it may have, as each may be replaced by one elsewhere."""
Endpoint = Annotated[str, Meta(max_length=270)]
"""`tcp://HOST:PORT`, where a host has at most 253 characters, or `ipc://PATH`."""
Endpoints = Annotated[list[Endpoint], Meta(max_length=MAX_SHARDS)]
"""All of the longest fit into a header, beside a configuration."""

FieldName = Annotated[str, Meta(pattern=rf"^{FIELD_NAME.pattern}\Z")]
Shape = Annotated[list[Size], Meta(max_length=7)]
FieldEntry = tuple[FieldName, Dtype, Shape, Size, Size, Literal["raw", "lz4"]]
"""Name, dtype, shape of one entry, entries before and after, codec."""
Fields = Annotated[list[FieldEntry], Meta(min_length=1, max_length=28)]
AnyFields = Annotated[list[FieldEntry], Meta(max_length=28)]
Counts = Annotated[list[tuple[Name, Rows]], Meta(min_length=1, max_length=MAX_TABLES)]
"""Table and how many of it."""
MAX_SUSPECTS = 64
Suspects = Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=MAX_SUSPECTS)]
"""Rows of chunks that may be damaged."""
Share = tuple[Name, Rows, ItemCount, float]
"""Table, rows, items in it, total priority of it."""
Shares = Annotated[list[Share], Meta(min_length=1, max_length=MAX_TABLES)]

Offset = Annotated[int, Meta(ge=0, le=2**48 - 1)]
TensorShape = Annotated[list[Offset], Meta(max_length=32)]
Tensor = tuple[Text, Literal[Dtype, "bfloat16"], TensorShape, Offset]
"""Name, dtype, shape, and offset in bytes."""

AnyArray = Annotated[np.ndarray, Array()]
Uint8s = Annotated[np.ndarray, Array("uint8", 1)]
Int32s = Annotated[np.ndarray, Array("int32", 1)]
Int64s = Annotated[np.ndarray, Array("int64", 1)]
Uint64s = Annotated[np.ndarray, Array("uint64", 1)]
Float32s = Annotated[np.ndarray, Array("float32", 1)]
Float64s = Annotated[np.ndarray, Array("float64", 1)]
AnyArrays = Annotated[dict[str, np.ndarray], Array()]
Uint32Arrays = Annotated[dict[str, np.ndarray], Array("uint32", 1)]


def by_name(counts: list[tuple[Name, Rows]]) -> dict[str, int]:
    """Counts by table. Raises ValueError where a table is there twice."""
    by_table = dict(counts)
    if len(by_table) != len(counts):
        raise ValueError("a table twice")
    return by_table


def check_fields(fields: list[FieldEntry]) -> None:
    """Raise ValueError where two fields have one name."""
    if len({entry[0] for entry in fields}) != len(fields):
        raise ValueError("two fields of one name")
