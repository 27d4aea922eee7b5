"""How much memory and disk replay may use, and will use."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.common.machine import memory_limit_bytes

MAX_SHARE = 0.9
"""Share of the memory or disk limit that a plan may take."""

TABLE_BYTES_PER_ITEM = 140
"""Item record, priority, sum tree, queues, free list and row of one item."""

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
    """Plan for `tables` in `folder`; raises ConfigError where it takes over 90 % of memory or disk.

    Where their files are there already, the disk decides nothing: they have their room, chunks keep to what
    they have while the disk is full, and grow again when it is not.
    """
    limit, name = memory_limit_bytes(), "memory"
    if not all((folder / f"{table.name}.items").exists() for table in tables):
        limit, name = min((limit, name), (disk_limit_bytes(folder), "disk"))
    table_bytes = sum(table.slots for table in tables) * TABLE_BYTES_PER_ITEM
    # A tenth is left for everything else: the process itself, and for the page cache to write back.
    most = int(limit * MAX_SHARE)
    wanted = table_bytes + (max_bytes or 1)
    if wanted > most:
        raise ConfigError(
            f"replay would use {_size(wanted)}, more than 90 % of the {name} limit of {_size(limit)}: "
            "lower replay.capacity_items or replay.max_bytes"
        )
    return Plan(table_bytes, max_bytes or most - table_bytes, limit, name)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB / 100 else f"{size_bytes / 2**20:.2f} MiB"


def check_room(folder: Path, tables: Sequence[TableConfig], obs_bytes: int, copies: int = 0) -> None:
    """Raise ConfigError where full tables of the same chunks, over all shards, could not be kept here.

    `obs_bytes` is what one step's observation takes at least: 0 where it is compressed. Every item of a table
    that keeps what it has begins at a step of its own. The disk also has to hold `copies` of all of it.
    """
    items = max((table.capacity for table in tables if not table.is_queue), default=0)
    wanted = sum(table.slots for table in tables) * TABLE_BYTES_PER_ITEM + items * obs_bytes
    limit, name, with_copies = memory_limit_bytes(), "memory", ""
    disk = disk_limit_bytes(folder)
    if disk // (1 + copies) < limit:
        limit, name = disk, "disk"
        wanted *= 1 + copies
        with_copies = f" with the {copies} copies of it that checkpoints need" if copies else ""
    if wanted > limit * MAX_SHARE:
        most = max(table.capacity for table in tables)
        raise ConfigError(
            f"replay{with_copies} would take {wanted / GIB:,.2f} GiB for {most:,} items with observations of "
            f"{obs_bytes:,} bytes, more than 90 % of the {name} limit of {limit / GIB:,.2f} GiB: lower "
            "replay.capacity_items, or set replay.max_bytes to have the oldest leave early"
        )


def disk_limit_bytes(folder: Path) -> int:
    """Room for the files in `folder`: what they take already and what is free."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    # Blocks, not sizes: the files are sparse, and as long as they may ever become.
    used = sum(file.stat().st_blocks * 512 for file in folder.glob("*")) if folder.exists() else 0
    return shutil.disk_usage(existing).free + used
