"""The whole of replay without a network: tables over one store of chunks, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.columns import Payload
from troupe.common.data.distances import FEATURES
from troupe.common.data.format import HEADER_FILE, check_run, load_signature, save_signature
from troupe.common.data.inserts import (
    GapError,
    HeldError,
    Insert,
    check_fit,
    check_insert,
    has_features,
    no_table,
    same_fields,
)
from troupe.common.data.pager import DiskFullError, FilePager
from troupe.common.data.sample import Sample
from troupe.common.data.schema import MAX_FIELD_BYTES, FieldSpec, Items
from troupe.common.data.table_config import TableConfig, check_tables
from troupe.common.errors import ConfigError, RefusedError
from troupe.services.replay.storage.changes import CHANGE, check_memory
from troupe.services.replay.storage.checks import Checks
from troupe.services.replay.storage.choosing import choose
from troupe.services.replay.storage.counters import Counters
from troupe.services.replay.storage.damage import check_files, check_none
from troupe.services.replay.storage.leases import Leases
from troupe.services.replay.storage.opened import FAILED_SYNC_FILE, Opened, check_capacities, lock_folder
from troupe.services.replay.storage.producers import Producers
from troupe.services.replay.storage.restoring import inserts_by_producer, restore_tables, tell_damage
from troupe.services.replay.storage.store import ChunkStore, NoRoomError, StoreFullError
from troupe.services.replay.storage.table import Table

ENTRIES_MARGIN = 8
"""Files have room for this many times the entries that the first chunk lets one expect."""


class Replay:
    """Chunks and tables in `folder`, which belongs to one process at a time.

    Attributes:
        tables: by name.
        store: None until the first insert has said what the fields are.
        counters: since the start of the process.
        stuck: why no insert finds room in the files now, whatever its table; empty while they do.
        durable: `process`, or `power` where what is stored is acknowledged only after `sync`.
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
        specs: Sequence[FieldSpec] | None = None,
        item_steps: tuple[int, int] | None = None,
        durable: str = "process",
        boot: str | None = None,
        pager: Callable[[Path], FilePager] = FilePager,
    ) -> None:
        """Open `folder`, whatever a former process has left there.

        Args:
            folder: made if it is not there.
            tables: those that it was made for, or any if it is new.
            budget_bytes: what chunks may take.
            must_fit: refuse the first insert where full tables of the like would take more than that.
            seed: of sampling.
            run: see the attribute; what is there of another run is refused.
            adopt: make what is there of another run part of this one instead.
            specs: the fields that chunks must have; by default those of the first one.
            item_steps: steps of the shortest and of the longest item to take; by default any.
            durable: with `power`, what is stored is to be acknowledged only after `sync`.
            boot: name of this boot of the machine; by default what the system says.
            pager: makes what all files of a folder are written through.
        """
        check_tables(tables)
        self._must_fit = must_fit
        self._wanted, self._item_steps = specs, item_steps
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.run = run
        self.rng = system.generator(seed)
        self.counters = Counters()
        self.store: ChunkStore | None = None
        self.stuck = ""
        self.restored_items = 0
        self._leases = Leases()
        self._lock = lock_folder(folder)
        self._pager = pager(folder)
        self.durable = durable
        self._opened = Opened(folder, boot)
        self._failed_sync = folder / FAILED_SYNC_FILE
        try:
            self._open(tables, adopt=adopt)
        except BaseException:
            self.close()
            raise

    def _open(self, tables: Sequence[TableConfig], *, adopt: bool) -> None:
        saved = load_signature(self.folder)
        if saved is None:
            check_none(self.folder)
        if saved is not None and not adopt:
            remedy = "use another --data-dir, --volatile to start empty, or --adopt to take them over"
            check_run(self.folder, saved[1], self.run, remedy)
        if saved is not None:
            check_capacities(self.folder, saved[1], tables)
            check_files(self.folder, saved[0], saved[1]["tables"])
        self._slots = sum(table.slots for table in tables)
        self._max_chunks = self._slots + 1024
        self._configs = {table.name: table for table in tables}
        self.layout: dict[str, Any] = {"tables": {table.name: table.slots for table in tables}}
        self.tables = {
            table.name: Table(
                table,
                self._pager,
                self._release_queued if table.holds_writers else self._release,
                self._features,
            )
            for table in tables
        }
        self._checks = Checks(self.folder, self.tables, self.counters, every_read=self.durable == "power")
        self._producers = Producers(self._pager)
        if saved is not None:
            self._restore(*saved)
        self._begin_synced()

    def _begin_synced(self) -> None:
        """Have on the disk what is served from now on, where that was promised."""
        if self._failed_sync.exists():  # what is read here may be nowhere but in memory
            self._pager.touch()
        if self.durable == "power":
            self._pager.sync()
            self._producers.all_synced()
            self._pager.sync()
        self._failed_sync.unlink(missing_ok=True)
        self._opened.write(self.durable)

    @property
    def damaged_items(self) -> int:
        """Items that left because they, or their chunks, were not what had been written."""
        return sum(table.damage.items for table in self.tables.values())

    @property
    def specs(self) -> tuple[FieldSpec, ...] | None:
        """The fields; None before the first insert."""
        return self.store.specs if self.store else None

    def _restore(self, specs: tuple[FieldSpec, ...], layout: dict[str, Any]) -> None:
        if self._wanted is not None and not same_fields(specs, self._wanted):
            theirs, ours = ([spec.name for spec in each] for each in (specs, self._wanted))
            raise ConfigError(
                f"{self.folder} holds items with other fields ({theirs}) than the agent of this run stores "
                f"({ours}): start with another --data-dir, or with --volatile"
            )
        for config in self._configs.values():
            if config.sampler == "attentive" and not has_features(specs):
                raise ConfigError(
                    f"table {config.name!r} is sampled by the field `{FEATURES}`: {self.folder} has none, "
                    "take another sampler, start with another --data-dir, or with --volatile"
                )
        if layout.get("run", "") != self.run:
            layout["run"] = self.run
            save_signature(self.folder, specs, layout)
        self.layout = layout
        store = ChunkStore(self._pager, specs, layout["budget_bytes"], self._max_chunks, layout["entries"])
        # What is there stays; it may only not grow beyond the budget of today.
        store.space.budget_bytes = self.budget_bytes = min(self.budget_bytes, layout["budget_bytes"])
        self.store = store
        self.restored_items = restore_tables(store, self.tables.values())
        if self._opened.lost_power and self._opened.durable == "power":
            # What was not acknowledged will come again.
            for row in store.unsynced(self._producers.synced).tolist():
                self.check(row)
            self._producers.after_power_cut(inserts_by_producer(store))
        live = store.live()
        self._producers.restore(live["incarnation"], live["sequence"])
        store.free_unused()
        self.counters.damaged_chunks += len(store.damaged)
        tell_damage(self.folder, store, self._producers, self.tables)

    # ---------------------------------------------------------------- insert

    def insert(self, insert: Insert) -> bool:
        """Store a chunk and its items; False if that has happened before.

        Raises RefusedError, also for a number that was refused before, GapError where an earlier insert of
        the same incarnation is missing, or HeldError while there is no room for it. MemoryError means that
        nothing of it is there, TornStateError that this object is of no more use.
        """
        expected = max(self._producers.newest(insert.incarnation) + 1, insert.oldest)
        late = self._producers.is_open(insert.incarnation, insert.sequence)
        if insert.sequence < expected and not late:
            if not self._producers.is_stored(insert.incarnation, insert.sequence):
                raise self._counted(
                    RefusedError("not_stored", f"insert {insert.sequence} was refused before, or left out")
                )
            self._producers.heard(insert.incarnation)
            self.counters.duplicate_inserts += 1
            return False
        if insert.sequence > expected:
            raise GapError(expected)
        try:
            self._producers.admit(insert.incarnation, insert.owner)
        except RefusedError as error:
            raise self._counted(error) from None
        try:
            if not insert.checked:
                check_insert(insert, self.specs or self._wanted, self._configs, self._item_steps)
                insert.checked = True
            self._hold(insert)
            store = self._create(insert) if self.store is None else self.store
            if late:
                self._clear(store, insert)
            admitted = self._admitted(insert)
            check_memory(sum(len(items.offsets) for items in admitted.values()), self._slots)
            starts = self._make_room(store, insert.payloads) if admitted else []
        except RefusedError as error:
            # The producer gives it up: its next insert must not look like a gap.
            self.stuck = ""
            if not late:
                self._producers.settle(insert.incarnation, insert.sequence, stored=False)
            raise self._counted(error) from None
        except (NoRoomError, DiskFullError) as error:
            self.stuck = str(error)
            raise HeldError(self.stuck) from None
        self.stuck = ""
        with CHANGE:
            for name in insert.items.keys() - admitted.keys():
                self.tables[name].count_dropped(len(insert.items[name].offsets))
            if admitted:
                self._store(store, starts, insert, admitted)
            if late:
                self._producers.close_again(
                    insert.incarnation, insert.sequence, synced=self.durable != "power"
                )
            else:
                self._producers.settle(insert.incarnation, insert.sequence, stored=True)
        return True

    def _clear(self, store: ChunkStore, insert: Insert) -> None:
        """Have what a power cut has left of an insert leave: of its items some may be missing."""
        for row in store.rows_of(insert.incarnation, insert.sequence).tolist():
            with CHANGE:
                commit = store.drop(row)
                for table in self.tables.values():
                    table.drop_chunk(row, commit)

    def _admitted(self, insert: Insert) -> dict[str, Items]:
        """The items of `insert` by table, without those that a full queue drops."""
        return {
            name: items
            for name, items in insert.items.items()
            if self.tables[name].admits(len(items.offsets))
        }

    def _store(
        self, store: ChunkStore, starts: list[int], insert: Insert, admitted: Mapping[str, Items]
    ) -> None:
        """Write what is checked and has a place, whole."""
        # In this order, for a process may die anywhere: entries, items, the commit that makes both exist, and
        # the producer's number at last, by the caller. Killed before the commit, nothing is there and the
        # insert comes again; killed after it, `Producers.restore` finds the chunk, and the repeated insert is
        # known for one.
        counts = {name: len(items.offsets) for name, items in admitted.items()}
        count = sum(counts.values())
        kept = sum(n for name, n in counts.items() if self._configs[name].holds_writers)
        row, commit = store.write(starts, insert.payloads, count, kept)
        for name, items in admitted.items():
            table = self.tables[name]
            table.insert(row, commit, items.offsets, items.lengths, items.priorities, self.rng)
        store.commit(
            row,
            commit,
            steps=insert.steps,
            version=insert.version,
            time_s=system.time(),
            incarnation=insert.incarnation,
            sequence=insert.sequence,
        )
        for name, inserted in counts.items():
            self.tables[name].count_inserted(inserted)
        self.counters.inserted_chunks += 1
        self.counters.inserted_items += count
        self.counters.inserted_steps += insert.steps

    def _hold(self, insert: Insert) -> None:
        for name, items in insert.items.items():
            table = self.tables[name]
            if table.limiter.insert_held(table.size, len(items.offsets)):
                table.held_items = len(items.offsets)
                raise HeldError(f"queue {name!r} is full")

    def _create(self, insert: Insert) -> ChunkStore:
        """Make the store for the fields of the first insert."""
        if self._must_fit:
            check_fit(insert, self._configs, self.budget_bytes)
        items = sum(len(items.offsets) for items in insert.items.values())
        # The files are sparse, so this costs nothing but address space: lanes find their sizes themselves.
        entries = {
            spec.name: max(ENTRIES_MARGIN * self._slots * spec.entries(insert.steps) // items, 1 << 16)
            for spec in insert.specs
        }
        self.layout |= {"entries": entries, "budget_bytes": self.budget_bytes, "run": self.run}
        before = set(self.folder.iterdir())
        with self._pager.trial():
            try:
                store = ChunkStore(self._pager, insert.specs, self.budget_bytes, self._max_chunks, entries)
                self._make_room(store, insert.payloads)
                for table in self.tables.values():
                    table.restore(store.commits, store.steps, np.zeros(self._max_chunks, bool))
                save_signature(self.folder, insert.specs, self.layout)
                self.store = store
            except BaseException:
                for path in set(self.folder.iterdir()) - before:  # the next insert may have other fields
                    path.unlink()
                raise
        return store

    def _make_room(self, store: ChunkStore, payloads: Mapping[str, Payload]) -> list[int]:
        try:
            while (starts := store.prepare(payloads)) is None:
                row = store.oldest()
                with CHANGE:
                    commit = store.evict(row)
                    for table in self.tables.values():
                        self.counters.evicted_early_items += table.drop_chunk(row, commit)
        except StoreFullError as error:
            raise RefusedError("too_large", str(error)) from None
        return starts

    def _release(self, rows: NDArray[np.int64]) -> None:
        assert self.store is not None
        self.store.release(rows)

    def _release_queued(self, rows: NDArray[np.int64]) -> None:
        assert self.store is not None
        self.store.release(rows)
        self.store.let_go(rows)  # those that have items in other tables may go from now on

    def _features(self, items: NDArray) -> NDArray:
        """The field that distances are measured by, of records of items `[n]`."""
        assert self.store is not None
        rows, offsets, lengths = (items[name].astype(np.int64) for name in ("row", "offset", "length"))
        return self.store.gather(rows, offsets, lengths, only=(FEATURES,))[FEATURES]

    def _counted(self, error: RefusedError) -> RefusedError:
        self.counters.refused[error.kind] = self.counters.refused.get(error.kind, 0) + 1
        return error

    # ---------------------------------------------------------------- sample and update

    def sample(self, shares: Mapping[str, int], *, plain: bool = False, places: bool = False) -> Sample | str:
        """`draw` a batch, and count it as sampled."""
        sample = self.draw(shares, plain=plain, places=places)
        if not isinstance(sample, str):
            self.take(sample)
            self.count_sampled(sample)
        return sample

    def draw(self, shares: Mapping[str, int], *, plain: bool = False, places: bool = False) -> Sample | str:
        """A batch with this many rows of each table, in this order, or the reason why there is none now.

        Its items may be drawn again until `take`. Raises RefusedError where there can be none.

        Args:
            shares: rows by table.
            plain: return what did not compress as it is (see `Column.gather`).
            places: leave `arrays` empty, for a reader that has mapped the files (see `Arena`). Not done
                where items go by being sampled, for then their room may be used before it is read.
        """
        for name, count in shares.items():
            impossible = self._table(name).impossible(count)
            if impossible:
                raise RefusedError("batch_size", impossible)
        # Before any work: drawing alone takes seconds for what could never be sent.
        self._check_size(sum(shares.values()), max(self.tables[name].shortest for name in shares))
        check_memory(sum(shares.values()), self._slots)
        places = places and not any(self._configs[name].max_times_sampled for name in shares)
        while True:
            for name, count in shares.items():
                reason = self.tables[name].sample_blocked(count)
                if reason:
                    return f"{reason}, and inserts wait: {self.stuck}" if self.stuck else reason
            assert self.store is not None
            sample = choose(self.tables, self.store, shares, self.rng)
            if sample is None:
                return "every priority is zero"
            self._check_size(len(sample.ids), int(sample.lengths.max()))
            if places:  # who reads the files looks at the checksums
                with CHANGE:
                    self._leases.hold(self.store, sample.rows, sample.commits, system.monotonic())
                return sample
            if self._checks.drop_damaged(self.store, sample):
                continue
            offsets, lengths = sample.offsets.astype(np.int64), sample.lengths.astype(np.int64)
            sample.arrays = self.store.gather(sample.rows, offsets, lengths, plain=plain)
            return sample

    def check(self, row: int) -> bool:
        """Look at the whole chunk in `row`, which leaves if it is damaged; returns whether it was."""
        return self.store is not None and self._checks.check(self.store, row)

    def _check_size(self, count: int, steps: int) -> None:
        """Raise RefusedError for a batch that is too large for a message, or for memory."""
        for spec in self.specs or ():
            if count * spec.entries(steps) * spec.entry_bytes > MAX_FIELD_BYTES:
                raise RefusedError("batch_size", f"{count} rows of field {spec.name} are more than 1 GiB")

    def take(self, sample: Sample) -> None:
        """Note, in the files, that what was drawn is given away, to be done before it is: at most once.

        Then comes `count_sampled`, or `put_back` where it could not be given.
        """
        check_memory(len(sample.ids), self._slots)  # also for what follows
        with CHANGE:
            for share, slots in zip(sample.shares, sample.slots, strict=True):
                if share.wanted is None:  # of candidates, `update` says which are learned from
                    self.tables[share.table].take(slots)

    def put_back(self, sample: Sample) -> None:
        """Undo `take`."""
        with CHANGE:
            for share, slots in zip(sample.shares, sample.slots, strict=True):
                if share.wanted is None:
                    self.tables[share.table].take(slots, -1)

    def count_sampled(self, sample: Sample) -> None:
        """Count what was taken as sampled: items that have been sampled often enough go.

        Of candidates as many count as were asked for.
        """
        with CHANGE:
            for share, slots in zip(sample.shares, sample.slots, strict=True):
                self.tables[share.table].count_sampled(slots[: share.wanted], self.rng)
        self.counters.sampled_batches += 1
        self.counters.sampled_items += len(sample.ids)

    def _table(self, name: str) -> Table:
        table = self.tables.get(name)
        if table is None:
            raise no_table(name, self.tables)
        return table

    def update(
        self,
        table_name: str,
        ids: NDArray[np.uint64],
        priorities: NDArray[np.float64],
        *,
        chosen: bool = False,
    ) -> None:
        """Set raw priorities by item id; invalid ones and unknown ids are counted and skipped.

        `chosen`: these were candidates and are learned from, so each has been sampled once more.
        """
        table = self._table(table_name)
        check_memory(len(ids), self._slots)
        with CHANGE:
            invalid, unknown = table.update(ids, priorities, chosen=chosen)
        self.counters.invalid_priorities += invalid
        self.counters.unknown_priorities += unknown
        self.counters.updated_priorities += len(ids) - invalid - unknown

    def expire_leases(self) -> None:
        """Let go of chunks that were kept for readers of the files; to be called now and then."""
        if self.store is not None:
            with CHANGE:
                self._leases.expire(self.store, system.monotonic())

    def insert_blocked(self) -> dict[str, str]:
        """By table, why writers should pause; only the tables that want them to."""
        reasons = {
            name: table.limiter.insert_blocked(table.size) or self.stuck
            for name, table in self.tables.items()
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def small_files(self) -> dict[str, NDArray]:
        """Copies of all files but those of the chunks, by name."""
        assert self.store is not None
        files = {name: array.copy() for name, array in self._producers.files().items()}
        files[HEADER_FILE] = self.store.header().copy()
        for name, table in self.tables.items():
            files |= {f"{name}.{ending}": array.copy() for ending, array in table.files().items()}
        return files

    def sync(self) -> None:
        """Force what was stored before this call to the disk; another thread may call this.

        Raises OSError, and is not to be called again after that: the system would say that all is well.
        """
        try:
            self._pager.sync()
        except Exception:
            self._failed_sync.touch()
            raise

    def acknowledged(self, incarnation: int, sequence: int) -> None:
        """Note that an insert is on the disk, with all that its process inserted before, by a `sync`."""
        self._producers.acknowledged(incarnation, sequence)

    def close(self) -> None:
        """Let another process have the folder. Everything is in its files already."""
        self._pager.close()
        self._lock.close()
