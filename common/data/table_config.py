"""What a table is, and how it is written on a command line: ``NAME:sampler=uniform,capacity=1000``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from common.data.limiter import auto_error
from common.errors import ConfigError

SAMPLERS = ("prioritized", "uniform", "fifo", "lifo", "max_heap", "min_heap")
REMOVERS = ("fifo", "lifo", "uniform", "lowest", "soft", "prioritized")
LIMITERS = ("rate", "queue")

RESERVED = ("chunks",)
"""Names that no table can have, for replay has files of these names already."""

STEEPEST = 8.0
"""Exponents up to this keep the weight of any priority, and the sum of all of them, finite and above zero."""

QUEUE = {"sampler": "fifo", "remover": "fifo", "max_times_sampled": 1, "limiter": "queue"}
"""What the word ``queue`` stands for: every item is passed on once, in order, and writers wait for room."""

MOST_TABLES = 64
"""Tables of one shard. The status of all of them has to fit in the header of one message."""


@dataclass(frozen=True)
class TableConfig:
    """What a table is.

    Attributes:
        name: at most 64 letters, digits, ``-`` and ``_``.
        capacity: most items.
        sampler: one of SAMPLERS.
        remover: one of REMOVERS, what goes where the table is full. ``soft`` lets it run over, and takes out
            the oldest excess every so often.
        limiter: ``rate`` holds to ``min_items`` and ``samples_per_insert``; with ``queue`` nothing is ever
            removed but by sampling, and writers wait while the table is full.
        priority_exponent: alpha of the prioritized sampler.
        removal_exponent: the same of the prioritized remover; below 0, so that low priorities go first, and
            those of zero at all.
        max_times_sampled: an item goes after so many samples; 0 for no limit.
        min_items: items that must be there before sampling begins.
        samples_per_insert: times an item is sampled on average, 0 for no limit.
        samples_per_insert_error: samples by which that may be off.
        soft_period_batches: sampled batches between two removals of the excess, for ``soft``.
    """

    name: str = "default"
    capacity: int = 1_000_000
    sampler: str = "prioritized"
    remover: str = "fifo"
    limiter: str = "rate"
    priority_exponent: float = 0.6
    removal_exponent: float = -0.4
    max_times_sampled: int = 0
    min_items: int = 1
    samples_per_insert: float = 0.0
    samples_per_insert_error: float = 0.0
    soft_period_batches: int = 100

    @property
    def slots(self) -> int:
        """Items that there is room for; more than the capacity where that is a soft limit."""
        return self.capacity + (max(self.capacity // 8, 1 << 14) if self.remover == "soft" else 0)

    @property
    def is_queue(self) -> bool:
        """Whether writers wait while the table is full."""
        return self.limiter == "queue"


def check_tables(tables: Iterable[TableConfig]) -> None:
    """Raises ConfigError for what cannot be, in one line."""
    names: set[str] = set()
    for table in tables:
        where = f"table {table.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", table.name):
            raise ConfigError(f"{where}: a name is up to 64 letters, digits, - and _")
        if table.name in names:
            raise ConfigError(f"{where} is there twice: give each table another name")
        if table.name in RESERVED:
            raise ConfigError(f"{where}: replay's own files have this name, choose another")
        names.add(table.name)
        _check_choice(where, "sampler", table.sampler, SAMPLERS)
        _check_choice(where, "remover", table.remover, REMOVERS)
        _check_choice(where, "limiter", table.limiter, LIMITERS)
        if not 0 < table.capacity < 2**31 or not 0 < table.min_items <= table.capacity:
            raise ConfigError(f"{where}: min_items ({table.min_items}) should be from 1 to the capacity")
        if not 0 <= table.priority_exponent <= STEEPEST:
            raise ConfigError(f"{where}: priority_exponent should be from 0 to {STEEPEST:g}")
        if not -STEEPEST <= table.removal_exponent < 0:
            raise ConfigError(f"{where}: removal_exponent should be below 0, and not below -{STEEPEST:g}")
        limits = (table.max_times_sampled, table.samples_per_insert, table.samples_per_insert_error)
        if not all(0 <= limit < math.inf for limit in limits):
            raise ConfigError(f"{where}: max_times_sampled and samples_per_insert should not be below 0")
        if table.soft_period_batches < 1:
            raise ConfigError(f"{where}: soft_period_batches should be at least 1")
        if table.is_queue and not table.max_times_sampled:
            raise ConfigError(f"{where}: a queue needs max_times_sampled, or it would never empty")
        if table.is_queue and table.samples_per_insert:
            raise ConfigError(f"{where}: a queue has no samples_per_insert")
    if not names:
        raise ConfigError("a replay server needs a table")
    if len(names) > MOST_TABLES:
        raise ConfigError(f"{len(names)} tables: one shard has at most {MOST_TABLES}")


def plain_table(
    capacity: int, min_items: int, exponent: float, ratio: float, error: float | None, batch_size: int = 512
) -> TableConfig:
    """The one prioritized table of who names none; None chooses the error of its samples per insert."""
    if error is None:
        error = auto_error(ratio, min_items, batch_size)
    return TableConfig(
        capacity=capacity,
        min_items=min_items,
        priority_exponent=exponent,
        samples_per_insert=ratio,
        samples_per_insert_error=error,
    )


def parse_table(text: str, batch_size: int = 512) -> TableConfig:
    """The table that ``NAME:KEY=VALUE,...`` describes. Raises ConfigError.

    Args:
        text: keys are the attributes of `TableConfig`; the bare word ``queue`` stands for ``QUEUE``.
        batch_size: to choose ``samples_per_insert_error`` by, where it is not given.
    """
    name, _, options = text.partition(":")
    table = TableConfig(name=name.strip())
    kinds = {field.name: type(getattr(table, field.name)) for field in fields(table)}
    values: dict[str, object] = {}
    for option in filter(None, (part.strip() for part in options.split(","))):
        key, equals, value = (part.strip() for part in option.partition("="))
        if key == "queue" and not equals:
            values |= QUEUE
            continue
        if key not in kinds or key == "name":
            near = difflib.get_close_matches(key, [*kinds, "queue"], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"table {table.name!r} has no option {key!r}{hint}")
        try:
            values[key] = kinds[key](value)
        except ValueError:
            raise ConfigError(f"table {table.name!r}: {key}={value} should be a number") from None
    table = replace(table, **values)  # type: ignore[arg-type]
    if "samples_per_insert_error" not in values:
        error = auto_error(table.samples_per_insert, table.min_items, batch_size)
        table = replace(table, samples_per_insert_error=error)
    check_tables([table])
    return table


def _check_choice(where: str, key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{where}: {key}={value} should be one of {', '.join(choices)}")
