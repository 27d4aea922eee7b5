"""What a table is, and how it is described: by the same fields in TOML and on a command line.

In TOML every table of a run is an entry of the array `[[replay.tables]]`; a command line writes the same
fields as `NAME:FIELD=VALUE,...`. Both come to `table_from`, so that both mean and refuse the same.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from troupe.common.data.distances import DISTANCES
from troupe.common.errors import ConfigError

SAMPLER_NAMES = ("prioritized", "uniform", "fifo", "lifo", "max_heap", "min_heap", "elite", "attentive")
"""What may choose the items of a batch."""

REMOVER_NAMES = ("fifo", "lifo", "uniform", "lowest", "soft", "prioritized", "elite")
"""What may choose the items that go when the table is full."""

STRATEGY_NAMES = ("nearest", "spread", "least_sampled", "spread_least_sampled")
"""How `elite` and `attentive` choose among their candidates."""

SCORERS = ("replay", "learner")
"""Who says how far candidates are."""

LIMITERS = ("rate", "queue")

WHEN_FULL = ("wait", "keep_latest", "keep_oldest", "alternate")
"""What happens where something comes to a full queue."""

RESERVED = ("chunks",)
"""Names that no table can have, for replay has files of these names already."""

MAX_EXPONENT = 8.0
"""Exponents up to this keep the weight of any priority, and the sum of all of them, finite and above zero."""

QUEUE: dict[str, Any] = {"sampler": "fifo", "remover": "fifo", "max_times_sampled": 1}
"""Defaults where the limiter is `queue`: every item is passed on once, in order."""

USUAL_BATCH = 512
"""Items of a batch, where nobody says how many there will be."""

MAX_TABLES = 64
"""Tables of one shard. The status of all of them has to fit in the header of one message."""


def _field(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class TableConfig:
    """What a table is. `table_meanings` tells what each field is for.

    Priorities are raised to the exponents; those of the remover are below 0, so that low priorities go first,
    and those of zero at all. The `soft` remover lets the table run over, and takes out the oldest excess
    every so often.
    """

    name: str = _field("default", "At most 64 letters, digits, `-` and `_`.")
    capacity: int = _field(1_000_000, "Maximum number of items.")
    sampler: str = _field(
        "prioritized",
        f"Which items are sampled: {', '.join(SAMPLER_NAMES)}; a queue's default is {QUEUE['sampler']}.",
    )
    remover: str = _field(
        "fifo", f"Which items are removed when the table is full: {', '.join(REMOVER_NAMES)}."
    )
    limiter: str = _field(
        "rate",
        "`rate` enforces `min_items` and `samples_per_insert`; with `queue`, items leave only when "
        "sampled, and writers wait while the table is full (see `when_full`).",
    )
    when_full: str = _field(
        "wait",
        "What a full queue does: `wait`, or drop items, even acknowledged ones: `keep_latest` the oldest, "
        "`keep_oldest` the new, `alternate` each in turn.",
    )
    priority_exponent: float = _field(0.6, "Alpha of the prioritized sampler.")
    removal_exponent: float = _field(-0.4, "The same for the prioritized remover, below 0.")
    max_times_sampled: int = _field(
        0,
        "An item is removed after this many samples; 0 = no limit; a queue's default is "
        f"{QUEUE['max_times_sampled']}.",
    )
    min_items: int = _field(1, "Items needed before sampling begins.")
    samples_per_insert: float = _field(0.0, "How often an item is sampled on average; 0 = no limit.")
    samples_per_insert_error: float | None = _field(
        None,
        "Tolerance of this ratio, in samples, before a side waits; none = derived from the other fields.",
    )
    soft_period_batches: int = _field(100, "Batches between two removals by the `soft` remover.")
    share: int = _field(
        0,
        "In a run, rows that each batch takes from this table; actors insert into all tables with a "
        "share. 0 in all tables = the run uses only `default`.",
    )
    candidates_max: float = _field(
        4.0,
        "Initial number of candidates per row from which `elite` and `attentive` choose.",
    )
    candidates_anneal_samples: int = _field(
        0, "Samples over which that number decreases to one, which is uniform sampling; 0 = never."
    )
    strategy: str = _field("nearest", f"Which candidates are chosen: {', '.join(STRATEGY_NAMES)}.")
    scored_by: str = _field(
        "replay",
        "Who measures the distances of candidates: `replay` estimates them, or uses the stored features; "
        "`learner` computes them with its current network and chooses, which is exact and costs a forward "
        "pass.",
    )
    distance: str = _field("norm", f"Distance of `attentive`: {', '.join(DISTANCES)}.")
    distance_power: float = _field(2.0, "Exponent of the distance `norm`.")
    removal_candidates: int = _field(
        20, "Random items from which the `elite` remover removes the most off-policy one."
    )

    @property
    def slots(self) -> int:
        """Items that there is room for; more than the capacity where that is a soft limit."""
        return self.capacity + (max(self.capacity // 8, 1 << 14) if self.remover == "soft" else 0)

    @property
    def uses_priorities(self) -> bool:
        """Whether the choice of items, to sample or to remove, depends on their priorities."""
        all_alike = self.sampler == "prioritized" and not self.priority_exponent
        sampled_without = all_alike or self.sampler in ("uniform", "fifo", "lifo")
        return not (sampled_without and self.remover in ("fifo", "lifo", "uniform", "soft"))

    @property
    def is_queue(self) -> bool:
        """Whether items are passed on in order, each so often, and then are gone."""
        return self.limiter == "queue"

    @property
    def holds_writers(self) -> bool:
        """Whether writers wait while the table is full, and nothing that it has acknowledged is dropped."""
        return self.is_queue and self.when_full == "wait"

    def limiter_error(self, batch_size: int = USUAL_BATCH) -> float:
        """Return `samples_per_insert_error`; where it is none, the one that suits batches of this size."""
        if self.samples_per_insert_error is not None:
            return self.samples_per_insert_error
        # Neither a deadlock nor a ratio that wanders: a tenth of the minimum, or a few batches.
        ratio = self.samples_per_insert
        # A band narrower than a batch would deadlock (`Limiter.impossible`); one insert moves the ratio by
        # `ratio` samples.
        return max(0.1 * ratio * self.min_items, 8.0 * batch_size, 200.0 * ratio)


_DISTANCE_BOUNDS = {
    "candidates_max": (1, 1000),
    "candidates_anneal_samples": (0, 2**53),
    "distance_power": (1, 64),
    "removal_candidates": (1, 1 << 16),
}


# Fields that only these samplers, or removers, use.
_ONLY_OF: dict[str, tuple[str, tuple[str, ...]]] = {
    "candidates_max": ("sampler", ("elite", "attentive")),
    "candidates_anneal_samples": ("sampler", ("elite", "attentive")),
    "strategy": ("sampler", ("elite", "attentive")),
    "scored_by": ("sampler", ("elite", "attentive")),
    "distance": ("sampler", ("attentive",)),
    "distance_power": ("sampler", ("attentive",)),
    "removal_candidates": ("remover", ("elite",)),
}


def table_meanings() -> dict[str, tuple[Any, str]]:
    """Return the default and the meaning of every field of a table."""
    return {each.name: (each.default, each.metadata["meaning"]) for each in fields(TableConfig)}


def table_from(values: Mapping[str, Any]) -> TableConfig:
    """Return the table that plain values, such as those of TOML, describe.

    Fields left out have their default.

    Raises:
        ConfigError: a field that there is not, or a value that cannot be; in one line.
    """
    where = f"table {values.get('name', TableConfig.name)!r}"
    known = table_meanings()
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise ConfigError(
                f"{where} has no field {key!r}; "
                + (f"nearest: {near[0]}" if near else f"has {', '.join(known)}")
            )
    given = {key: _typed(where, key, value) for key, value in values.items()}
    defaults: dict[str, Any] = QUEUE if given.get("limiter") == "queue" else {}
    table = TableConfig(**(defaults | given))
    _check(where, table)
    return table


def parse_table(text: str) -> TableConfig:
    """Return the table that `NAME:FIELD=VALUE,...` describes. Raises ConfigError."""
    name, _, rest = text.partition(":")
    values: dict[str, Any] = {"name": name.strip()}
    where = f"table {values['name']!r}"
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            remedy = "limiter=queue" if key == "queue" else "NAME:FIELD=VALUE,..."
            raise ConfigError(f"{where}: {key!r} has no value: write {remedy}")
        if key in values:
            raise ConfigError(f"{where}: {key} is given twice")
        # By the field's kind: a table may be named `7`, and a number there must stay text.
        values[key] = _number(value) if key in _NUMBERS else value
    if "share" in values:
        raise ConfigError(
            f"{where}: share is for [[replay.tables]] of a run; a client of a server says how many "
            "rows it wants"
        )
    return table_from(values)


def check_tables(tables: Iterable[TableConfig]) -> None:
    """Raise ConfigError, in one line, for tables that a shard cannot have."""
    names: set[str] = set()
    for table in tables:
        where = f"table {table.name!r}"
        _check(where, table)
        if table.name in names:
            raise ConfigError(f"{where} is defined twice: give each table another name")
        names.add(table.name)
    if not names:
        raise ConfigError("a replay server needs a table")
    if len(names) > MAX_TABLES:
        raise ConfigError(f"{len(names)} tables: one shard has at most {MAX_TABLES}")


def shard_tables(tables: Sequence[TableConfig], shards: int, batch_size: int) -> list[TableConfig]:
    """Return each shard's part of the tables of a run: capacities and minima are divided, rounded up."""
    # Rounded up: rounded down, `min_items` below the number of shards would become 0, and capacity might not
    # hold a batch.
    parts = [
        replace(table, **{name: -(-getattr(table, name) // shards) for name in _SHARED}) for table in tables
    ]
    # Filled in here, where the batch is known: a shard that works it out again would take the usual size of
    # one.
    return [replace(part, samples_per_insert_error=part.limiter_error(batch_size)) for part in parts]


# Numbers of a run's table that its shards divide.
_SHARED = ("capacity", "min_items", "candidates_anneal_samples")

# The fields that are numbers: whole ones, or any.
_NUMBERS = {
    each.name: int if isinstance(each.default, int) else float
    for each in fields(TableConfig)
    if not isinstance(each.default, str)
}


def _number(text: str) -> Any:
    """A number of a command line; what is none stays text, which `_typed` refuses by name."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _typed(where: str, key: str, value: Any) -> Any:
    kind = _NUMBERS.get(key, str)
    if value is None and getattr(TableConfig, key) is None:
        return None
    if kind is str and isinstance(value, str):
        return value
    if kind is not str and not isinstance(value, bool):
        # A whole number is fine for a fraction, as in TOML; the reverse is refused rather than rounded.
        if isinstance(value, int) and abs(value) < 2**63:  # what fits in a message
            return kind(value)
        if kind is float and isinstance(value, float):
            return value
    what = {str: "a text", int: "a whole number", float: "a number"}[kind]
    raise ConfigError(f"{where}: {key} = {str(value)[:40]!r} should be {what}")


def _check(where: str, table: TableConfig) -> None:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", table.name):
        raise ConfigError(f"{where}: a name is up to 64 letters, digits, - and _")
    if table.name in RESERVED:
        raise ConfigError(f"{where}: replay's own files have this name, choose another")
    _check_choice(where, "sampler", table.sampler, SAMPLER_NAMES)
    _check_choice(where, "remover", table.remover, REMOVER_NAMES)
    _check_choice(where, "limiter", table.limiter, LIMITERS)
    _check_choice(where, "when_full", table.when_full, WHEN_FULL)
    if not 0 < table.capacity < 2**31:
        raise ConfigError(f"{where}: capacity ({table.capacity}) should be from 1 to {2**31 - 1}")
    if not 0 < table.min_items <= table.capacity:
        raise ConfigError(
            f"{where}: min_items ({table.min_items}) should be from 1 to the capacity ({table.capacity})"
        )
    if not 0 <= table.priority_exponent <= MAX_EXPONENT:
        raise ConfigError(f"{where}: priority_exponent should be from 0 to {MAX_EXPONENT:g}")
    if not -MAX_EXPONENT <= table.removal_exponent < 0:
        raise ConfigError(f"{where}: removal_exponent should be below 0, and not below -{MAX_EXPONENT:g}")
    for key in ("max_times_sampled", "samples_per_insert", "samples_per_insert_error"):
        limit = getattr(table, key)
        if limit is not None and not 0 <= limit < math.inf:
            raise ConfigError(f"{where}: {key} ({limit}) should be finite, and not below 0")
    if not 0 <= table.share <= table.capacity:
        raise ConfigError(
            f"{where}: share ({table.share}) should be from 0 to the capacity ({table.capacity})"
        )
    if table.soft_period_batches < 1:
        raise ConfigError(f"{where}: soft_period_batches should be at least 1")
    _check_choice(where, "strategy", table.strategy, STRATEGY_NAMES)
    _check_choice(where, "scored_by", table.scored_by, SCORERS)
    _check_choice(where, "distance", table.distance, DISTANCES)
    for key, (least, most) in _DISTANCE_BOUNDS.items():
        if not least <= getattr(table, key) <= most:
            raise ConfigError(f"{where}: {key} ({getattr(table, key)}) should be from {least} to {most}")
    for key, (chooser, names) in _ONLY_OF.items():
        # A default may be there: the configuration of a run is written whole.
        if getattr(table, key) != getattr(TableConfig, key) and getattr(table, chooser) not in names:
            raise ConfigError(
                f"{where}: {key} has no effect, because it is for {chooser} {' or '.join(names)}: take one "
                f"of those instead of {getattr(table, chooser)}, or leave {key} out"
            )
    if table.scored_by == "learner" and table.max_times_sampled:
        raise ConfigError(
            f"{where}: scored_by learner leaves candidates in the table, so max_times_sampled has to be 0"
        )
    if table.is_queue and not table.max_times_sampled:
        raise ConfigError(f"{where}: a queue needs max_times_sampled, or it would never empty")
    if not table.is_queue and table.when_full != TableConfig.when_full:
        raise ConfigError(
            f"{where}: when_full is for a queue; from other tables the remover takes something out"
        )
    if table.is_queue and table.remover != QUEUE["remover"] and not table.holds_writers:
        raise ConfigError(f"{where}: when_full says what leaves a full queue: leave the remover out")
    if table.is_queue and table.samples_per_insert:
        raise ConfigError(f"{where}: a queue has no samples_per_insert")


def _check_choice(where: str, key: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, 1, cutoff=0.5)
        nearest = f"; nearest: {near[0]}" if near else ""
        raise ConfigError(f"{where}: {key} = {value!r} should be one of {', '.join(choices)}{nearest}")
