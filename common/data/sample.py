"""A batch of items, and how it is divided between tables."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Share:
    """The rows of a batch that come from one table, one share behind the other.

    Attributes:
        table: its name.
        count: rows.
        table_items: items in the table.
        total_priority: sum of all weights of the table, or its items where its sampler has no weights.
        wanted: rows that were asked for, where those that came are candidates, of which the learner chooses
            so many; None: all were asked for.
    """

    table: str
    count: int
    table_items: int
    total_priority: float
    wanted: int | None = None


@dataclass
class Sample:
    """A batch. `arrays` holds windows `[B, window, *shape]`, one LZ4 frame where a field is compressed.

    Attributes:
        shares: how the rows are divided.
        slots: of each share.
        ids: uint64 `[B]`.
        probabilities: float64 `[B]`, over the whole table of the row's share.
        versions: int64 `[B]`.
        times_s: float64 `[B]`, when each was inserted, in seconds since 1970.
        lengths: int32 `[B]`, steps of each item; shorter windows repeat their last entry.
        sampled: int64 `[B]`, how often each was sampled.
        rows: int64 `[B]`, the record of each item's chunk.
        commits: uint64 `[B]`, the number of each item's chunk.
        offsets: int32 `[B]`, first step of each item in its chunk.
        arrays: by field.
    """

    shares: list[Share]
    slots: list[NDArray[np.int64]]
    ids: NDArray[np.uint64]
    probabilities: NDArray[np.float64]
    versions: NDArray[np.int64]
    times_s: NDArray[np.float64]
    lengths: NDArray[np.int32]
    sampled: NDArray[np.int64]
    rows: NDArray[np.int64]
    commits: NDArray[np.uint64]
    offsets: NDArray[np.int32]
    arrays: dict[str, NDArray] = field(default_factory=dict)
