"""Selectors by the names of `troupe.common.data.table_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from troupe.common.data.table_config import TableConfig
from troupe.services.replay.storage.elite import Attentive, Elite
from troupe.services.replay.storage.selectors import (
    Fifo,
    Heap,
    Lifo,
    Prioritized,
    Selector,
    TableView,
    Uniform,
)

Make = Callable[[TableConfig, TableView], Selector]
"""Makes a selector for the slots of a table."""

SAMPLERS: Mapping[str, Make] = {
    "prioritized": lambda config, _: Prioritized(config.slots, config.priority_exponent),
    "uniform": lambda config, _: Uniform(config.slots),
    "fifo": lambda config, _: Fifo(config.slots),
    "lifo": lambda config, _: Lifo(config.slots),
    "max_heap": lambda config, _: Heap(config.slots, largest=True),
    "min_heap": lambda config, _: Heap(config.slots, largest=False),
    "elite": Elite,
    "attentive": Attentive,
}
"""What may choose the items of a batch."""

REMOVERS: Mapping[str, Make] = {
    "fifo": SAMPLERS["fifo"],
    "lifo": SAMPLERS["lifo"],
    "uniform": SAMPLERS["uniform"],
    "lowest": SAMPLERS["min_heap"],
    "soft": SAMPLERS["fifo"],  # the oldest, too; the table removes less often
    "prioritized": lambda config, _: Prioritized(config.slots, config.removal_exponent),
    "elite": Elite,
}
"""What may choose the items that go when the table is full."""
