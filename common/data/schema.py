"""The shape of what replay stores: fields, chunks and the items cut from them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from troupe.common.errors import ConfigError

MAX_FIELD_BYTES = 1 << 30
"""Most that one field of a chunk, or of a batch, may take when it is unpacked."""

LARGEST_FLOAT = 1e9
"""Floats beyond this size are not learned from: sums of their squares leave float32, as infinity does."""


FIELD_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
"""What a field may be called: replay's files are called so too."""


@dataclass(frozen=True)
class FieldSpec:
    """One named array of a chunk.

    A chunk of `L` steps stores `before + L + after` entries of the field, so that an item of `length`
    steps at `offset` needs the entries `[offset, offset + before + length + after)`. Stacked pixels are
    stored as single frames: `shape=(84, 84), before=stack - 1, after=n_steps`.

    Attributes:
        name: unique within the chunk, at most 64 characters.
        dtype: numpy dtype name of one element, such as `"uint8"`.
        shape: shape of one entry.
        before: entries stored before the first step.
        after: entries stored after the last step.
        compress: whether the sender compresses each entry with lz4.
        bounds: the least and the largest value that can be learned from, where that is not all; it is known
            to the agent only, and no part of what is stored.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: int = 0
    after: int = 0
    compress: bool = False
    # Not compared: replay's server does not know it, and its fields have to equal the agent's.
    bounds: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one uncompressed entry."""
        # Python's integers: a stranger's shape may be beyond those of numpy.
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))

    def entries(self, steps: int) -> int:
        """Number of entries that a chunk (or an item) of `steps` steps has."""
        return self.before + steps + self.after

    def limits(self) -> tuple[float, float] | None:
        """The least and the largest value that can be learned from; None where every value can."""
        if self.bounds is None and self.dtype.startswith("float"):
            largest = min(LARGEST_FLOAT, float(np.finfo(self.dtype).max))
            return -largest, largest
        return self.bounds

    def bad_rows(self, rows: NDArray) -> NDArray[np.bool_] | None:
        """Which of `rows [B, ...]` have a value outside of the limits, or NaN, `[B]`; None if none."""
        limits = self.limits()
        # The whole batch at first, which is nearly always good: two passes without a temporary array.
        if limits is None or not rows.size or (rows.min() >= limits[0] and rows.max() <= limits[1]):
            return None  # NaN is neither
        flat = rows.reshape(len(rows), -1)
        good: NDArray[np.bool_] = np.all((flat >= limits[0]) & (flat <= limits[1]), axis=1)
        return np.logical_not(good)


def stored_as(compression: str, specs: Sequence[FieldSpec]) -> tuple[FieldSpec, ...]:
    """`specs` as the chunks of a run have them by its `replay.compression`: `none` compresses no field."""
    return tuple(replace(spec, compress=spec.compress and compression != "none") for spec in specs)


@dataclass
class Items:
    """Windows of one chunk: int32 `offsets [M]`, int32 `lengths [M]`, raw float64 `priorities [M]`."""

    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    priorities: NDArray[np.float64]


@dataclass
class Chunk:
    """Consecutive steps of one slot, and the items cut from them.

    Attributes:
        fields: name to array `[before + L + after, *shape]`, in the order of the specs.
        steps: `L`, the number of steps.
        offsets: int32 `[M]`, first step of each item.
        lengths: int32 `[M]`, steps of each item; `offset + length <= L`.
        priorities: float64 `[M]`, raw (before the exponent), finite and not negative.
        version: number of the parameter set that acted, 0 if there was none.
        more: items for further tables, by table; the data are stored once all the same.
    """

    fields: dict[str, NDArray]
    steps: int
    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    priorities: NDArray[np.float64]
    version: int = 0
    more: dict[str, Items] = field(default_factory=dict)

    @property
    def items(self) -> Items:
        """The chunk's own items."""
        return Items(self.offsets, self.lengths, self.priorities)


class SlotStep(NamedTuple):
    """One step of one slot, as an accumulator takes it. A tuple: there are thousands of them a second."""

    action: int | list[float] | NDArray
    """What was done at the newest observation: a number, or a row of `troupe.common.spaces.ActionSpec`."""
    reward: float
    """What it earned, clipped as the learner should see it."""
    extras: Mapping[str, Any]
    """What the agent's `act` said of this step; the accumulator says which names it asks for."""
    next_obs: NDArray
    """The observation that followed, the episode's true last one where it ended. It is copied."""
    terminated: bool = False
    """The episode ended and nothing follows, so there is no bootstrap."""
    truncated: bool = False
    """The episode was cut off, so the bootstrap is `final_value`."""
    final_value: float = 0.0
    """The value of `next_obs`, needed only where the episode was cut off."""
    version: int = 0
    """Version of the parameters that chose the action."""


def as_array(name: str, values: ArrayLike, dtype: str | None = None) -> NDArray:
    """Lists and numbers as an array, of `dtype` where that changes no value; an array as it is.

    Raises ConfigError for lists that are no array; `name` is that of the field.
    """
    if isinstance(values, np.ndarray):
        return values
    try:
        array = np.asarray(values)
    except ValueError:
        raise ConfigError(f"field {name}: lists that differ in length are no array") from None
    if dtype is None or array.dtype == np.dtype(dtype) or array.dtype.kind not in "biuf":
        return array
    with np.errstate(all="ignore"):
        # Python's lists become float64 and int64 by default, which is rarely what was declared.
        converted = array.astype(dtype)
    # Numbers with a fraction are rounded to float32, and never to integers.
    exact = converted.dtype.kind == "f" or np.array_equal(converted, array)
    return converted if exact else array


def with_arrays(chunk: Chunk, specs: Sequence[FieldSpec] | None) -> Chunk:
    """`chunk` with arrays where it has lists: of what `specs` say, or as numpy chooses."""
    dtypes = {spec.name: spec.dtype for spec in specs or ()}
    own = _items_with_arrays(chunk.items)
    return replace(
        chunk,
        fields={name: as_array(name, values, dtypes.get(name)) for name, values in chunk.fields.items()},
        offsets=own.offsets,
        lengths=own.lengths,
        priorities=own.priorities,
        more={table: _items_with_arrays(items) for table, items in chunk.more.items()},
    )


def _items_with_arrays(items: Items) -> Items:
    return Items(
        as_array("offsets", items.offsets, "int32"),
        as_array("lengths", items.lengths, "int32"),
        as_array("priorities", items.priorities, "float64"),
    )


def check_chunk(chunk: Chunk, specs: Sequence[FieldSpec]) -> None:
    """Raise ConfigError if `chunk` does not have exactly the arrays that `specs` describe."""
    names = {spec.name for spec in specs}
    if set(chunk.fields) != names:
        raise ConfigError(f"the chunk has fields {sorted(chunk.fields)}, the specs say {sorted(names)}")
    for spec in specs:
        array = chunk.fields[spec.name]
        want = (spec.entries(chunk.steps), *spec.shape)
        if array.shape != want or array.dtype != np.dtype(spec.dtype):
            raise ConfigError(
                f"field {spec.name} is {array.dtype}{array.shape}, expected {spec.dtype}{want}: "
                "every chunk of a client has the fields of its first"
            )
    for items in (chunk.items, *chunk.more.values()):
        _check_items(items, chunk.steps)


def _check_items(items: Items, steps: int) -> None:
    count = len(items.offsets)
    if len(items.lengths) != count or len(items.priorities) != count:
        raise ConfigError("offsets, lengths and priorities of a chunk's items differ in length")
    if count and (
        np.min(items.offsets) < 0
        or np.min(items.lengths) < 1
        or np.max(np.asarray(items.offsets, np.int64) + items.lengths) > steps
    ):
        raise ConfigError(f"an item lies outside of its chunk of {steps} steps")
