"""Parameters as one flat buffer and a manifest: encoded once per version, decoded as views."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.wire.codec import DTYPES, WireError

_ALIGN_BYTES = 64
"""Every tensor starts at a multiple of this, which suits any vector unit and any later device copy."""


def encode_params(params: dict[str, np.ndarray]) -> tuple[list[list[Any]], np.ndarray]:
    """Copy `params` into one buffer.

    Returns:
        The manifest, one `[name, dtype, shape, offset in bytes]` per tensor in the order of `params`, and the
        buffer, uint8 [bytes]. The buffer is a copy: the tensors may change afterwards.
    """
    manifest: list[list[Any]] = []
    offset = 0
    for name, array in params.items():
        if array.dtype.name not in DTYPES:
            raise WireError("bad_dtype", f"parameter {name} is {array.dtype}, which the wire does not carry")
        manifest.append([name, array.dtype.name, list(array.shape), offset])
        offset += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    buffer = np.zeros(offset, np.uint8)
    for (_, kind, _, start), array in zip(manifest, params.values(), strict=True):
        target = buffer[start : start + array.nbytes].view(DTYPES[kind])
        target[:] = array.reshape(-1)
    return manifest, buffer


def decode_params(manifest: list[Any], buffer: np.ndarray) -> dict[str, np.ndarray]:
    """Name the pieces of `buffer`, uint8 [bytes], without copying. Raises `WireError` on a misfit."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise WireError("bad_params", f"the buffer is {buffer.dtype} with {buffer.ndim} dimensions")
    params: dict[str, np.ndarray] = {}
    for entry in manifest:
        if not isinstance(entry, list) or len(entry) != 4:
            raise WireError("bad_params", "an entry of the manifest is not [name, dtype, shape, offset]")
        name, kind, shape, start = entry
        if not isinstance(name, str) or not isinstance(kind, str) or kind not in DTYPES or name in params:
            raise WireError("bad_params", f"entry {name!r:.80} of the manifest has a bad name or type")
        sizes = [*shape, start] if isinstance(shape, list) and len(shape) <= 32 else [-1]
        if not all(isinstance(size, int) and 0 <= size < 2**48 for size in sizes):
            raise WireError("bad_params", f"tensor {name!r:.80} has a bad shape or offset")
        dtype = DTYPES[kind]
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > buffer.nbytes or start % dtype.itemsize:
            raise WireError("bad_params", f"tensor {name!r:.80} lies outside the buffer or between elements")
        params[name] = buffer[start:stop].view(dtype).reshape(shape)
    return params
