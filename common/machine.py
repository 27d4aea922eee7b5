"""What this machine, or container, has, how its C library treats memory, and what there is of ours on it."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
from pathlib import Path

import psutil

# From malloc.h of the GNU C library.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_LARGEST_KEPT_BYTES = 1 << 30


def is_loopback(host: str) -> bool:
    """Whether an address, or `localhost`, can be reached from this machine only."""
    # Not by the first letters: 127.evil.example and localhost.evil.example are anybody's.
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes() -> int:
    """Memory of this machine or container."""
    limit = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """A name of this boot of this kernel, the same in every container; empty where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def keep_freed_memory() -> bool:
    """Let freed memory stay with the process, in large pages; False where the C library cannot be told so.

    To be called before torch takes any large array. By default, every array above 32 MiB comes fresh from the
    kernel and goes back to it, so each update of a convolutional network faults its activations in again page
    by page: a quarter of IMPALA's time on Pong. The price is that the process stays as large as it has been
    once. Pages of 2 MiB instead of 4 KiB take another 3 % off an update.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # has torch ask for them
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # Both are needed: one decides what is taken from the heap, the other when the heap gives it back.
    trimmed_late = mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and trimmed_late)


def temporary_prefix(what: str = "") -> str:
    """How the names of this process's temporary directories begin: of a killed one they are removed later.

    See `troupe.services.launcher.workspace.remove_abandoned`.
    """
    return f"troupe-{os.getpid()}-{what}"
