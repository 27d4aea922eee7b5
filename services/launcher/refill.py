"""What a resumed run begins with: items that replay has kept, or an empty table to fill again."""

from __future__ import annotations

from collections.abc import Sequence

from troupe.common.data.table_config import TableConfig


def refill_line(restored: int, min_items: int) -> str:
    """Say what is there, and what has to be stored before learning goes on."""
    if not restored:
        return f"replay starts empty, refills {min_items:,} items before learning goes on"
    line = f"replay: {restored:,} items restored"
    return line if restored >= min_items else f"{line}, learning goes on at {min_items:,}"


def items_before_learning(tables: Sequence[TableConfig]) -> int:
    """Return how many items all `tables` of a run hold together when its first batch can be drawn.

    A queue by itself hands on what comes: there is nothing to fill, nor to fill again.
    """
    if all(table.is_queue for table in tables):
        return 0
    most = max(table.min_items for table in tables)  # whatever is inserted goes into all of them
    return sum(min(table.capacity, most) for table in tables)
