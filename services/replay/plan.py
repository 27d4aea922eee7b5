"""How much memory and disk replay may use, and will use."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.data.table import TableConfig
from common.errors import ConfigError

MOST = 0.9
"""Share of the memory or disk limit that a plan may take."""

TABLE_BYTES_PER_ITEM = 120
"""Item record, priority, sum tree, queues and free list of one item."""

GIB = float(1 << 30)


@dataclass(frozen=True)
class Plan:
    """What one shard may use.

    Attributes:
        table_bytes: for tables, whatever the items are.
        store_bytes: the most that chunks may take.
        limit_bytes: the smaller of the memory and the disk that are there.
        limit_name: which of them.
    """

    table_bytes: int
    store_bytes: int
    limit_bytes: int
    limit_name: str

    def __str__(self) -> str:
        return (
            f"tables {self.table_bytes / GIB:.2f} GiB, chunks up to {self.store_bytes / GIB:.2f} GiB, "
            f"{self.limit_name} limit {self.limit_bytes / GIB:.2f} GiB"
        )


def make_plan(folder: Path, tables: Sequence[TableConfig], max_bytes: int | None) -> Plan:
    """Plan for ``tables`` in ``folder``; raises ConfigError where it takes over 90 % of memory or disk."""
    memory, disk = memory_limit_bytes(), disk_limit_bytes(folder)
    limit, name = min((memory, "memory"), (disk, "disk"))
    table_bytes = sum(table.slots for table in tables) * TABLE_BYTES_PER_ITEM
    most = int(limit * MOST)
    wanted = table_bytes + (max_bytes or 1)
    if wanted > most:
        raise ConfigError(
            f"replay would use {wanted / GIB:.2f} GiB, more than 90 % of the {name} limit of "
            f"{limit / GIB:.2f} GiB: lower replay.capacity_items or replay.max_bytes"
        )
    return Plan(table_bytes, max_bytes or most - table_bytes, limit, name)


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


def disk_limit_bytes(folder: Path) -> int:
    """Room for the files in ``folder``: what they take already and what is free."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    used = sum(file.stat().st_blocks * 512 for file in folder.glob("*")) if folder.exists() else 0
    return shutil.disk_usage(existing).free + used
