"""The whole of replay without a network: tables over one store of chunks, in one folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from common.data.columns import MappedFile, Payload
from common.data.fields import MAX_FIELD_BYTES, FieldSpec
from common.data.inserts import GapError, HeldError, Insert, RefusedError, check_insert, no_table
from common.data.leases import Leases
from common.data.sample import Sample, Share
from common.data.store import (
    HEADER_FILE,
    ChunkStore,
    StoreFullError,
    check_run,
    load_signature,
    save_signature,
)
from common.data.table import Table, TableConfig
from common.data.table_config import check_tables
from common.errors import ConfigError

PRODUCER = np.dtype([("incarnation", "u8"), ("sequence", "u8"), ("time_s", "f8")])
PRODUCERS_FILE = "producers"
MAX_PRODUCERS = 8192

SPARE = 8
"""Files have room for this many times the entries that the first chunk lets one expect."""


@dataclass
class Counters:
    """What has happened since this process started."""

    inserted_chunks: int = 0
    inserted_items: int = 0
    inserted_steps: int = 0
    duplicate_inserts: int = 0
    sampled_batches: int = 0
    sampled_items: int = 0
    updated_priorities: int = 0
    invalid_priorities: int = 0
    unknown_priorities: int = 0
    evicted_early_items: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class Replay:
    """Chunks and tables in ``folder``, which belongs to one process at a time.

    Attributes:
        tables: by name.
        store: None until the first insert has said what the fields are.
        counters: since the start of the process.
        restored_items: items that a former process has left.
        run: name of the run that the items are of; empty where they are of none.
    """

    def __init__(
        self,
        folder: Path,
        tables: Sequence[TableConfig],
        *,
        budget_bytes: int,
        must_fit: bool = False,
        seed: int | None = None,
        run: str = "",
        adopt: bool = False,
    ) -> None:
        """Open ``folder``, whatever a former process has left there.

        Args:
            folder: made if it is not there.
            tables: those that it was made for, or any if it is new.
            budget_bytes: what chunks may take.
            must_fit: refuse the first insert where full tables of the like would take more than that.
            seed: of sampling.
            run: see the attribute; what is there of another run is refused.
            adopt: make what is there of another run part of this one instead.
        """
        check_tables(tables)
        self._must_fit = must_fit
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.run = run
        self.rng = np.random.default_rng(seed)
        self.counters = Counters()
        self.store: ChunkStore | None = None
        self.restored_items = 0
        self._leases = Leases()
        self._lock = _lock_folder(folder)
        try:
            self._open(tables, adopt=adopt)
        except BaseException:
            self.close()
            raise

    def _open(self, tables: Sequence[TableConfig], *, adopt: bool) -> None:
        saved = load_signature(self.folder)
        if saved is not None and not adopt:
            remedy = "use another --data-dir, --volatile to start empty, or --adopt to take them over"
            check_run(self.folder, saved[1], self.run, remedy)
        self._max_chunks = sum(table.slots for table in tables) + 1024
        self._configs = {table.name: table for table in tables}
        self.layout: dict[str, Any] = {"tables": {table.name: table.slots for table in tables}}
        self.tables = {table.name: Table(table, self.folder, self._release) for table in tables}
        self._producers = MappedFile(
            self.folder / PRODUCERS_FILE, PRODUCER, (MAX_PRODUCERS,), sparse=False
        ).array
        self._places = {
            int(row["incarnation"]): i for i, row in enumerate(self._producers) if row["incarnation"]
        }
        if saved is not None:
            self._restore(*saved)

    @property
    def specs(self) -> tuple[FieldSpec, ...] | None:
        """The fields; None before the first insert."""
        return self.store.specs if self.store else None

    def _restore(self, specs: tuple[FieldSpec, ...], layout: dict[str, Any]) -> None:
        check_capacities(self.folder, layout, self._configs.values())
        if layout.get("run", "") != self.run:
            layout["run"] = self.run
            save_signature(self.folder, specs, layout)
        self.layout = layout
        store = ChunkStore(self.folder, specs, layout["budget_bytes"], self._max_chunks, layout["entries"])
        # What is there stays; it may only not grow beyond the budget of today.
        store.space.budget_bytes = self.budget_bytes = min(self.budget_bytes, layout["budget_bytes"])
        self.store = store
        for table in self.tables.values():
            np.add.at(store.references, table.restore(store.commits), 1)
            self.restored_items += table.size
        # A chunk may have been committed a moment before its producer was noted.
        live = store.live()
        producers, which = np.unique(live["incarnation"], return_inverse=True)
        newest = np.zeros(len(producers), np.uint64)
        np.maximum.at(newest, which, live["sequence"])
        for incarnation, sequence in zip(producers.tolist(), newest, strict=True):
            place = self._place(incarnation)
            self._producers["sequence"][place] = max(self._producers["sequence"][place], sequence)
        store.free_unused()

    # ---------------------------------------------------------------- insert

    def insert(self, insert: Insert) -> bool:
        """Store a chunk and its items; False if that has happened before.

        Raises RefusedError, GapError where an earlier insert of the same incarnation is missing, or HeldError
        while a queue has no room for it.
        """
        place = self._place(insert.incarnation)
        expected = max(int(self._producers["sequence"][place]) + 1, insert.oldest)
        if insert.sequence < expected:
            self.counters.duplicate_inserts += 1
            return False
        if insert.sequence > expected:
            raise GapError(expected)
        try:
            if not insert.checked:
                check_insert(insert, self.specs, self._configs)
                insert.checked = True
            self._hold(insert)
            store = self._create(insert) if self.store is None else self.store
            starts = self._make_room(store, insert.payloads)
        except RefusedError as error:
            # The producer gives it up: its next insert must not look like a gap.
            self._producers["sequence"][place] = insert.sequence
            self.counters.refused[error.kind] = self.counters.refused.get(error.kind, 0) + 1
            raise
        count = sum(len(items.offsets) for items in insert.items.values())
        row, commit = store.write(starts, insert.payloads, count)
        for name, items in insert.items.items():
            table = self.tables[name]
            table.insert(row, commit, items.offsets, items.lengths, items.priorities, self.rng)
        now_s = time.time()
        store.commit(
            row,
            commit,
            steps=insert.steps,
            version=insert.version,
            time_s=now_s,
            incarnation=insert.incarnation,
            sequence=insert.sequence,
        )
        self._producers["sequence"][place] = insert.sequence
        self._producers["time_s"][place] = now_s
        self.counters.inserted_chunks += 1
        self.counters.inserted_items += count
        self.counters.inserted_steps += insert.steps
        return True

    def _hold(self, insert: Insert) -> None:
        for name, items in insert.items.items():
            table = self.tables[name]
            if table.limiter.insert_held(table.size, len(items.offsets)):
                table.held_items = len(items.offsets)
                raise HeldError(name)

    def _create(self, insert: Insert) -> ChunkStore:
        """Make the store for the fields of the first insert."""
        if self._must_fit:
            self._check_fit(insert)
        items = sum(len(items.offsets) for items in insert.items.values())
        capacity = sum(table.slots for table in self._configs.values())
        # The files are sparse, so this costs nothing but address space: lanes find their sizes themselves.
        entries = {
            spec.name: max(SPARE * capacity * spec.entries(insert.steps) // items, 1 << 16)
            for spec in insert.specs
        }
        self.layout |= {"entries": entries, "budget_bytes": self.budget_bytes, "run": self.run}
        store = ChunkStore(self.folder, insert.specs, self.budget_bytes, self._max_chunks, entries)
        for table in self.tables.values():
            table.restore(store.commits)
        save_signature(self.folder, insert.specs, self.layout)
        self.store = store
        return store

    def _check_fit(self, insert: Insert) -> None:
        """Raise RefusedError where full tables could not have their items. What is compressed counts as 0."""
        chunk_bytes = sum(s.entries(insert.steps) * s.entry_bytes for s in insert.specs if not s.compress)
        for name, items in insert.items.items():
            capacity = self._configs[name].capacity
            wanted = capacity * chunk_bytes // len(items.offsets)
            if wanted > self.budget_bytes:
                amount = f"{wanted / 2**30:.1f} GiB of {self.budget_bytes / 2**30:.1f} GiB"
                raise RefusedError(
                    "plan",
                    f"{capacity:,} items of table {name!r} would take {amount} that there are: lower "
                    "the capacity, compress, or give max_bytes to have the oldest leave early",
                )

    def _make_room(self, store: ChunkStore, payloads: Mapping[str, Payload]) -> list[int]:
        try:
            while (starts := store.prepare(payloads)) is None:
                row, commit = store.evict()
                for table in self.tables.values():
                    self.counters.evicted_early_items += table.drop_chunk(row, commit)
        except StoreFullError as error:
            raise RefusedError("too_large", str(error)) from None
        return starts

    def _release(self, rows: NDArray[np.int64]) -> None:
        assert self.store is not None
        self.store.release(rows)

    def _place(self, incarnation: int) -> int:
        """Where a producer is noted; a new one takes the place of the one that was silent for longest."""
        place = self._places.get(incarnation)
        if place is None:
            place = len(self._places)
            if place >= MAX_PRODUCERS:
                place = int(np.argmin(self._producers["time_s"]))
                self._places.pop(int(self._producers["incarnation"][place]), None)
            self._producers[place] = (incarnation, 0, time.time())
            self._places[incarnation] = place
        return place

    # ---------------------------------------------------------------- sample and update

    def sample(self, shares: Mapping[str, int], *, plain: bool = False, places: bool = False) -> Sample | str:
        """``draw`` a batch, and count it as sampled."""
        sample = self.draw(shares, plain=plain, places=places)
        if not isinstance(sample, str):
            self.count_sampled(sample)
        return sample

    def draw(self, shares: Mapping[str, int], *, plain: bool = False, places: bool = False) -> Sample | str:
        """A batch with so many rows of each table, in this order, or the reason why there is none now.

        Its items may be drawn again until ``count_sampled``. Raises RefusedError where there can be none.

        Args:
            shares: rows by table.
            plain: return what did not compress as it is (see ``Column.gather``).
            places: leave ``arrays`` empty, for a reader that has mapped the files (see `Arena`). Not done
                where items go by being sampled, for then their room may be used before it is read.
        """
        for name, count in shares.items():
            impossible = self._table(name).impossible(count)
            if impossible:
                raise RefusedError("batch_size", impossible)
        for name, count in shares.items():
            reason = self.tables[name].sample_blocked(count)
            if reason:
                return reason
        sample = self._choose(shares)
        if sample is None:
            return "every priority is zero"
        assert self.store is not None
        self._check_size(len(sample.ids), int(sample.lengths.max()))
        if places and not any(self._configs[name].max_times_sampled for name in shares):
            self._leases.hold(self.store, sample.rows, sample.commits, time.monotonic())
        else:
            offsets, lengths = sample.offsets.astype(np.int64), sample.lengths.astype(np.int64)
            sample.arrays = self.store.gather(sample.rows, offsets, lengths, plain=plain)
        return sample

    def _check_size(self, count: int, steps: int) -> None:
        """Raise RefusedError for a batch that is too large for a message, or for memory."""
        for spec in self.specs or ():
            if count * spec.entries(steps) * spec.entry_bytes > MAX_FIELD_BYTES:
                raise RefusedError("batch_size", f"{count} rows of field {spec.name} are more than 1 GiB")

    def count_sampled(self, sample: Sample) -> None:
        """Count what was drawn as sampled: items that have been sampled often enough go."""
        for share, slots in zip(sample.shares, sample.slots, strict=True):
            self.tables[share.table].count_sampled(slots, self.rng)
        self.counters.sampled_batches += 1
        self.counters.sampled_items += len(sample.ids)

    def _choose(self, shares: Mapping[str, int]) -> Sample | None:
        """A batch without its data, and without counting it as sampled."""
        chosen = []
        for name, count in shares.items():
            drawn = self.tables[name].draw(count, self.rng)
            if drawn is None:
                return None
            chosen.append(drawn)
        slots = [each for each, _ in chosen]
        items = np.concatenate(
            [self.tables[name].items(each) for name, each in zip(shares, slots, strict=True)]
        )
        assert self.store is not None
        rows = items["row"].astype(np.int64)
        return Sample(
            shares=[self._share(name, count) for name, count in shares.items()],
            slots=slots,
            ids=np.ascontiguousarray(items["id"]),
            probabilities=np.concatenate([probabilities for _, probabilities in chosen]),
            versions=self.store.versions[rows],
            times_s=self.store.times_s[rows],
            lengths=np.ascontiguousarray(items["length"]),
            rows=rows,
            commits=np.ascontiguousarray(items["commit"]),
            offsets=np.ascontiguousarray(items["offset"]),
        )

    def _share(self, name: str, count: int) -> Share:
        table = self.tables[name]
        return Share(name, count, table.size, table.sampler.total)

    def _table(self, name: str) -> Table:
        table = self.tables.get(name)
        if table is None:
            raise no_table(name, self.tables)
        return table

    def update(self, table_name: str, ids: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        """Set raw priorities by item id; invalid ones and unknown ids are counted and skipped."""
        table = self._table(table_name)
        invalid, unknown = table.update(ids, priorities)
        self.counters.invalid_priorities += invalid
        self.counters.unknown_priorities += unknown
        self.counters.updated_priorities += len(ids) - invalid - unknown

    def expire_leases(self) -> None:
        """Let go of chunks that were kept for readers of the files; to be called now and then."""
        if self.store is not None:
            self._leases.expire(self.store, time.monotonic())

    def insert_blocked(self) -> dict[str, str]:
        """By table, why writers should pause; only the tables that want them to."""
        reasons = {name: table.limiter.insert_blocked(table.size) for name, table in self.tables.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def small_files(self) -> dict[str, NDArray]:
        """Copies of all files but those of the chunks, by name."""
        assert self.store is not None
        files = {PRODUCERS_FILE: self._producers.copy(), HEADER_FILE: self.store.header().copy()}
        for name, table in self.tables.items():
            files |= {f"{name}.{ending}": array.copy() for ending, array in table.files().items()}
        return files

    def close(self) -> None:
        """Let another process have the folder. Everything is in its files already."""
        if self.store is not None:
            self.store.close()
        self._lock.close()


def check_capacities(place: object, layout: Mapping[str, Any], tables: Iterable[TableConfig]) -> None:
    """Raise ConfigError where the files in ``place``, with this ``layout``, are of other ``tables``."""
    wanted = {table.name: table.slots for table in tables}
    if layout["tables"] != wanted:
        raise ConfigError(
            f"{place} was made for the capacities {layout['tables']}, not {wanted}: "
            "use those, or another folder"
        )


def _lock_folder(folder: Path) -> IO[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot write in {folder}: {os.strerror(error.errno or 0)}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"{folder} is in use by another replay process; choose another --data-dir"
        ) from None
    return file
