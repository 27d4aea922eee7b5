"""The section of replay: one table from plain fields, or any number of `[[replay.tables]]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, field_validator

from troupe.common.config.fields import MAX_BATCH, Section, structural, tunable
from troupe.common.data.table_config import TableConfig, check_tables, shard_tables, table_from
from troupe.common.errors import ConfigError


def _table(value: Any) -> TableConfig:
    """One entry of `[[replay.tables]]`."""
    if isinstance(value, TableConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(_TABLES_LOOK)
    try:
        return table_from(value)
    # Only a ValueError becomes pydantic's ValidationError, which names the field.
    except ConfigError as error:
        raise ValueError(str(error)) from None


_TABLES_LOOK = (
    'should be an array of tables, [[replay.tables]] in a file: [{name = "default", limiter = "queue", '
    "capacity = 64}]"
)

ReplayTable = Annotated[TableConfig, BeforeValidator(_table)]

Durable = Literal["none", "process", "power"]
_DURABLE_BOOLEANS = {"true": "process", "false": "none"}

# Fields of `[replay]` of which the one table is made where `tables` names none.
# They came first, and presets still use them: one table needs no `[[replay.tables]]`.
_PLAIN_TABLE = {
    "capacity_items",
    "min_items",
    "priority_exponent",
    "samples_per_insert",
    "samples_per_insert_error",
}


class ReplayConfig(Section):
    """The prioritized replay table."""

    capacity_items: int = structural(
        2_000_000, "Maximum number of items, over all shards; the oldest are removed first.", ge=1, lt=2**31
    )
    min_items: int = tunable(50_000, "Items that must be stored before sampling begins.", ge=1)
    batch_size: int = tunable(512, "Items per sampled batch.", ge=1, le=MAX_BATCH)
    priority_exponent: float = structural(
        0.6, "Alpha: probability of an item is priority^alpha, normalised.", ge=0
    )
    importance_exponent: float = tunable(
        0.4, "Beta: exponent of the importance weights at the first update.", ge=0
    )
    importance_exponent_final: float = tunable(0.4, "Beta after `importance_anneal_updates`.", ge=0)
    importance_anneal_updates: int = tunable(
        0, "Updates over which beta moves linearly; 0 = beta is constant.", ge=0
    )
    samples_per_insert: float = tunable(0.0, "How often an item is sampled on average; 0 = no limit.", ge=0)
    samples_per_insert_error: float | None = tunable(
        None,
        "Tolerance of this ratio, in samples, before a side waits; none = derived from the other fields.",
        ge=0,
    )
    shards: int = structural(1, "Replay processes that share the items.", ge=1, le=64)
    max_bytes: int | None = structural(
        None, "Bytes of storage that one shard may use; none = what the capacity needs.", ge=1
    )
    compression: Literal["lz4", "none"] = structural("lz4", "Compression of pixels, done once by the actor.")
    tables: tuple[ReplayTable, ...] = structural(
        (),
        "Tables, each an entry of `[[replay.tables]]`; none = one prioritized table `default` made from "
        "the other fields. `capacity` and `min_items` are totals over all shards. Batches come from "
        "`default`, or from the tables with a `share`; shares add up to `batch_size`.",
    )
    durable: Durable = tunable(
        "process",
        "What acknowledged items survive: `none` = nothing, a shard starts empty; `process` = its death, "
        "however sudden; `power` = a power cut, because each insert waits until it is on disk.",
    )

    @field_validator("durable", mode="before")
    @classmethod
    def _durable_was_a_boolean(cls, value: Any) -> Any:
        """Configurations before there were three of them said true or false."""
        return _DURABLE_BOOLEANS.get(str(value).lower(), value)

    @field_validator("tables", mode="before")
    @classmethod
    def _tables_are_an_array(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError(_TABLES_LOOK)
        return value

    @field_validator("tables")
    @classmethod
    def _tables_are_possible(cls, value: tuple[TableConfig, ...]) -> tuple[TableConfig, ...]:
        try:
            if value:
                check_tables(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    def shard_tables(self, shards: int) -> list[TableConfig]:
        """Return the tables of each shard, given the number of shards."""
        # Made here and not kept: capacity is over all shards, and only who asks knows how many there are.
        plain = TableConfig(
            capacity=self.capacity_items,
            min_items=self.min_items,
            priority_exponent=self.priority_exponent,
            samples_per_insert=self.samples_per_insert,
            samples_per_insert_error=self.samples_per_insert_error,
        )
        return shard_tables(self.tables or (plain,), shards, self.batch_size)

    def table(self, name: str = "default") -> TableConfig | None:
        """Return the table of this name over all shards; None where there is none."""
        return next((table for table in self.shard_tables(1) if table.name == name), None)

    def shares(self) -> dict[str, int]:
        """Return the rows of a batch by table, in the order of `tables`; actors insert into all of these."""
        shares = {table.name: table.share for table in self.tables if table.share}
        # `TableConfig.name` on the class is the default of the field, "default".
        return shares or {TableConfig.name: self.batch_size}

    def sampled_tables(self, shards: int = 1) -> list[TableConfig]:
        """Return the tables of each shard that batches come from, given the number of shards."""
        shares = self.shares()
        return [table for table in self.shard_tables(shards) if table.name in shares]

    def unused(self) -> set[str]:
        """Return the fields that mean nothing beside `tables`, or to a queue."""
        queues = all(table.is_queue for table in self.sampled_tables())
        weights = {name for name in type(self).model_fields if name.startswith("importance_")}
        return (_PLAIN_TABLE if self.tables else set()) | (weights if queues else set())
