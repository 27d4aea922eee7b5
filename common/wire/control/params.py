"""Parameters as one flat buffer and a manifest: encoded once per version, decoded as views."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from troupe.common.wire import types
from troupe.common.wire.codec import DTYPES, WireError

# Every tensor starts at a multiple of this, which suits any vector unit and any later device copy.
_ALIGN_BYTES = 64


BFLOAT16 = "bfloat16"
"""Dtype of a manifest, in addition to those of the wire: the upper half of a float32, stored as uint16."""


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the parameters, encoded, and where the run was when they were published.

    Attributes:
        version: its number.
        manifest: see `encode_params`.
        blob: the same.
        steps: environment steps of the run.
        updates: learner updates of the run.
        at_s: monotonic time.
    """

    version: int
    manifest: list[types.Tensor]
    blob: np.ndarray
    steps: int
    updates: int
    at_s: float


def encode_params(
    params: dict[str, np.ndarray], *, bfloat16: bool = False
) -> tuple[list[types.Tensor], np.ndarray]:
    """Copy `params` into one buffer.

    Args:
        params: arrays by name.
        bfloat16: round float32 matrices, and whatever has more dimensions, to bfloat16. Vectors (biases,
            statistics) and counters stay exact: they are few.

    Returns:
        The manifest, one (name, dtype, shape, offset in bytes) per tensor in the order of `params`, and the
        buffer, uint8 [bytes]. The buffer is a copy: the tensors may change afterwards.
    """
    manifest: list[types.Tensor] = []
    offset = 0
    for name, array in params.items():
        kind, size = array.dtype.name, array.nbytes
        if kind not in DTYPES:
            raise WireError("bad_dtype", f"parameter {name} is {array.dtype}, which the wire does not carry")
        if bfloat16 and kind == "float32" and array.ndim >= 2:
            kind, size = BFLOAT16, size // 2
        manifest.append((name, cast(Any, kind), list(array.shape), offset))
        offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    # Zeros, since the gaps between tensors are sent as well: fresh memory would hold whatever was there.
    buffer = np.zeros(offset, np.uint8)
    for (_, kind, _, start), array in zip(manifest, params.values(), strict=True):
        flat = array.reshape(-1)
        if kind == BFLOAT16:
            flat = to_bfloat16(flat)
        buffer[start : start + flat.nbytes].view(flat.dtype.newbyteorder("<"))[:] = flat
    return manifest, buffer


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 `[n]` to bfloat16 as uint16 `[n]`, rounded to the nearest, halves to even; NaN stays NaN."""
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nans = np.isnan(array)
    if nans.any():  # rounding could carry into the exponent, and make infinities of them
        rounded[nans] = (bits[nans] >> 16).astype(np.uint16) | 0x40
    return rounded


def from_bfloat16(halves: np.ndarray) -> np.ndarray:
    """The inverse, exact: uint16 `[n]` to float32 `[n]`."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def decode_params(manifest: Sequence[Any], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """Name the pieces of `buffer`, uint8 [bytes]. Raises `WireError` on a misfit.

    They are views of it, but for those in bfloat16, which become float32.
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise WireError("bad_params", f"the buffer is {buffer.dtype} with {buffer.ndim} dimensions")
    try:
        tensors = msgspec.convert(manifest, list[types.Tensor])
    except msgspec.ValidationError as error:
        raise WireError("bad_params", f"the manifest: {error}") from None
    params: dict[str, np.ndarray] = {}
    for name, kind, shape, start in tensors:
        dtype = DTYPES["uint16" if kind == BFLOAT16 else kind]
        stop = start + math.prod(shape) * dtype.itemsize
        # A peer's offsets: beyond the buffer numpy would give a shorter array, between elements a copy or an
        # error.
        if name in params or stop > buffer.nbytes or start % dtype.itemsize:
            raise WireError(
                "bad_params", f"tensor {name!r:.80} is there twice, outside the buffer or between elements"
            )
        array = buffer[start:stop].view(dtype)
        params[name] = (from_bfloat16(array) if kind == BFLOAT16 else array).reshape(shape)
    return params
