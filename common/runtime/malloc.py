"""The C library's memory for a process that allocates and frees the same large arrays all the time."""

from __future__ import annotations

import ctypes

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process; False where the C library cannot be told so.

    By default, every array above 32 MiB comes fresh from the kernel and goes back to it, so each update of a
    convolutional network faults its activations in again page by page: a quarter of IMPALA's time on Pong.
    The price is that the process stays as large as it has been once.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Both are needed: one decides what is taken from the heap, the other when the heap gives it back.
    trimmed_late = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and trimmed_late)
