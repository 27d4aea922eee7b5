"""Going on with the chunks and items that a former process has left."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from troupe.services.replay.storage.producers import Producers
from troupe.services.replay.storage.store import ChunkStore
from troupe.services.replay.storage.table import Table

_log = logging.getLogger(__name__)


def restore_tables(store: ChunkStore, tables: Collection[Table]) -> int:
    """Find the items of `tables` whose chunks are in `store`; returns how many there are."""
    lost = np.zeros(len(store.commits), bool)
    lost[store.damaged] = True
    for table in tables:
        rows = table.restore(store.commits, store.steps, lost)
        store.raise_commit(table.newest_commit)
        np.add.at(store.references, rows, 1)
        if table.config.holds_writers:
            store.keep(rows)
    return sum(table.size for table in tables)


def inserts_by_producer(store: ChunkStore) -> dict[int, list[int]]:
    """The numbers of the inserts whose chunks are there, by the incarnation of their producer."""
    live, found = store.live(), dict[int, list[int]]()
    for incarnation, number in zip(live["incarnation"].tolist(), live["sequence"].tolist(), strict=True):
        found.setdefault(incarnation, []).append(number)
    return found


def tell_damage(folder: Path, store: ChunkStore, producers: Producers, tables: Mapping[str, Table]) -> None:
    """Say in the log what of the files was not what had been written."""
    found = {"records of chunks": len(store.damaged), "producers": producers.damaged}
    found["copies of the header of chunks"] = store.header_damaged
    for name, table in tables.items():
        damage = table.damage
        found[f"items of table {name!r}, which are gone"] = damage.items
        found[f"priorities of table {name!r}, which are set to its largest"] = damage.priorities
        found[f"copies of the totals of table {name!r}"] = damage.header
    told = ", ".join(f"{count} {what}" for what, count in found.items() if count)
    if told:
        _log.error("%s is damaged: %s; what is whole is served", folder, told)
