"""The shape of what replay stores: fields, chunks and the items cut from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

MAX_FIELD_BYTES = 1 << 30
"""Most that one field of a chunk, or of a batch, may take when it is unpacked."""


@dataclass(frozen=True)
class FieldSpec:
    """One named array of a chunk.

    A chunk of ``L`` steps stores ``before + L + after`` entries of the field, so that an item of ``length``
    steps at ``offset`` needs the entries ``[offset, offset + before + length + after)``. Stacked pixels are
    stored as single frames: ``shape=(84, 84), before=stack - 1, after=n_steps``.

    Attributes:
        name: unique within the chunk, at most 64 characters.
        dtype: numpy dtype name of one element, such as ``"uint8"``.
        shape: shape of one entry.
        before: entries stored before the first step.
        after: entries stored after the last step.
        compress: whether the sender compresses each entry with lz4.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: int = 0
    after: int = 0
    compress: bool = False

    @property
    def entry_bytes(self) -> int:
        """Bytes of one uncompressed entry."""
        # Python's integers: a stranger's shape may be beyond those of numpy.
        return int(np.dtype(self.dtype).itemsize * math.prod(self.shape))

    def entries(self, steps: int) -> int:
        """Number of entries that a chunk (or an item) of ``steps`` steps has."""
        return self.before + steps + self.after


@dataclass
class Items:
    """Windows of one chunk: int32 ``offsets [M]``, int32 ``lengths [M]``, raw float64 ``priorities [M]``."""

    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    priorities: NDArray[np.float64]


@dataclass
class Chunk:
    """Consecutive steps of one slot, and the items cut from them.

    Attributes:
        fields: name to array ``[before + L + after, *shape]``, in the order of the specs.
        steps: ``L``, the number of steps.
        offsets: int32 ``[M]``, first step of each item.
        lengths: int32 ``[M]``, steps of each item; ``offset + length <= L``.
        priorities: float64 ``[M]``, raw (before the exponent), finite and not negative.
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


def check_chunk(chunk: Chunk, specs: Sequence[FieldSpec]) -> None:
    """Raises ValueError if ``chunk`` does not have exactly the arrays that ``specs`` describe."""
    names = {spec.name for spec in specs}
    if set(chunk.fields) != names:
        raise ValueError(f"chunk has fields {sorted(chunk.fields)}, the specs say {sorted(names)}")
    for spec in specs:
        array = chunk.fields[spec.name]
        want = (spec.entries(chunk.steps), *spec.shape)
        if array.shape != want or array.dtype != np.dtype(spec.dtype):
            raise ValueError(f"field {spec.name} is {array.dtype}{array.shape}, expected {spec.dtype}{want}")
    for items in (chunk.items, *chunk.more.values()):
        _check_items(items, chunk.steps)


def check_windows(windows: Mapping[str, NDArray], steps: int, specs: Sequence[FieldSpec]) -> None:
    """Raises ValueError unless ``windows [B, entries, *shape]`` of ``steps`` steps are what ``specs`` say."""
    names = {spec.name for spec in specs}
    if set(windows) != names:
        raise ValueError(f"the fields {sorted(windows)} instead of {sorted(names)}")
    for spec in specs:
        array = windows[spec.name]
        want = (spec.entries(steps), *spec.shape)
        if array.shape[1:] != want or array.dtype != np.dtype(spec.dtype):
            raise ValueError(
                f"field {spec.name} as {array.dtype}{array.shape[1:]} instead of {spec.dtype}{want}"
            )


def _check_items(items: Items, steps: int) -> None:
    count = len(items.offsets)
    if len(items.lengths) != count or len(items.priorities) != count:
        raise ValueError("offsets, lengths and priorities differ in length")
    if count and (
        np.min(items.offsets) < 0
        or np.min(items.lengths) < 1
        or np.max(np.asarray(items.offsets, np.int64) + items.lengths) > steps
    ):
        raise ValueError("an item lies outside of its chunk")
