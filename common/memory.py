"""How much memory there is."""

from __future__ import annotations

from pathlib import Path

import psutil


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
