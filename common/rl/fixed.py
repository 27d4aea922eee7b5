"""Arithmetic whose shapes and branches do not depend on what tensors hold, as a CUDA graph needs it.

A graph repeats kernels, and Python is not run again: nothing may be picked out by a mask, and nothing read on
the CPU to decide what comes next. On a CPU, where little work is worth a branch, the other way is the faster
one. Both give the same results.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

_here = threading.local()


def shapes_are_fixed() -> bool:
    """Whether this thread computes for a graph now."""
    return getattr(_here, "fixed", False)


@contextlib.contextmanager
def fixed_shapes() -> Iterator[None]:
    """Within it this thread computes as for a graph."""
    before = shapes_are_fixed()
    _here.fixed = True
    try:
        yield
    finally:
        _here.fixed = before


@functools.cache
def constant(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor `[n]` of these numbers, made once: a graph must not copy from the memory of Python."""
    with torch.inference_mode(False):  # whoever asks first may act, and another learn with it
        return torch.tensor(numbers, dtype=dtype, device=device)


def one_hot(rows: Tensor, count: int) -> Tensor:
    """Map int64 `[...]` below `count` to `[..., count]`, 1 at the place of each; int64 or bool."""
    if not shapes_are_fixed():
        return nn.functional.one_hot(rows, count)  # which looks, on a CPU, whether all are below
    return rows[..., None] == torch.arange(count, device=rows.device)
