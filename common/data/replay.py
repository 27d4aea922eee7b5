"""The whole of replay without a network: tables over one store of chunks, in one folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from common.data.columns import MappedFile, Payload
from common.data.fields import FieldSpec
from common.data.packing import MAX_ENTRY_BYTES, PackingError, check_blocks
from common.data.store import ChunkStore, StoreFullError, load_signature, save_signature
from common.data.table import Table, TableConfig, valid_priorities
from common.errors import ConfigError

PRODUCER = np.dtype([("incarnation", "u8"), ("sequence", "u8"), ("time_s", "f8")])
MAX_PRODUCERS = 8192

SPARE = 8
"""Files have room for this many times the entries that the first chunk lets one expect."""


class RefusedError(Exception):
    """An insert or a request that can never be served as it is. ``kind`` is a word to branch on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class GapError(Exception):
    """An insert whose predecessor has not arrived. ``expected`` is the sequence number to continue with."""

    def __init__(self, expected: int) -> None:
        super().__init__(f"expected insert {expected}")
        self.expected = expected


@dataclass
class Items:
    """Windows of one chunk: int32 ``offsets [M]``, int32 ``lengths [M]``, raw float64 ``priorities [M]``."""

    offsets: NDArray[np.int32]
    lengths: NDArray[np.int32]
    priorities: NDArray[np.float64]


@dataclass
class Insert:
    """A chunk on its way into the store.

    Attributes:
        incarnation: random number of the producing process.
        sequence: number of the insert, 1, 2, 3, ... in each incarnation.
        oldest: smallest number that the producer has not seen acknowledged; at most ``sequence``.
        specs: what the producer takes the fields to be.
        payloads: their data.
        steps: length of the chunk.
        version: parameters that acted.
        items: the windows, by table.
    """

    incarnation: int
    sequence: int
    oldest: int
    specs: tuple[FieldSpec, ...]
    payloads: Mapping[str, Payload]
    steps: int
    version: int
    items: Mapping[str, Items]


@dataclass
class Sample:
    """A batch. ``arrays`` holds windows ``[B, window, *shape]``, one LZ4 frame where a field is compressed.

    Attributes:
        ids: uint64 ``[B]``.
        probabilities: float64 ``[B]``, over the whole table.
        versions: int64 ``[B]``.
        lengths: int32 ``[B]``, steps of each item; shorter windows repeat their last entry.
        table_items: items in the table.
        total_priority: sum of all weights of the table.
        rows: int64 ``[B]``, the record of each item's chunk.
        commits: uint64 ``[B]``, the number of each item's chunk.
        offsets: int32 ``[B]``, first step of each item in its chunk.
        arrays: by field.
    """

    ids: NDArray[np.uint64]
    probabilities: NDArray[np.float64]
    versions: NDArray[np.int64]
    lengths: NDArray[np.int32]
    table_items: int
    total_priority: float
    rows: NDArray[np.int64]
    commits: NDArray[np.uint64]
    offsets: NDArray[np.int32]
    arrays: dict[str, NDArray]


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
    """

    def __init__(
        self, folder: Path, tables: Sequence[TableConfig], *, budget_bytes: int, seed: int | None = None
    ) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self.rng = np.random.default_rng(seed)
        self.counters = Counters()
        self.store: ChunkStore | None = None
        self.restored_items = 0
        self._lock = _lock_folder(folder)
        try:
            self._open(tables)
        except BaseException:
            self.close()
            raise

    def _open(self, tables: Sequence[TableConfig]) -> None:
        self._max_chunks = sum(table.capacity for table in tables) + 1024
        self.layout: dict[str, Any] = {"tables": {table.name: table.capacity for table in tables}}
        self.tables = {table.name: Table(table, self.folder, self._release) for table in tables}
        self._producers = MappedFile(
            self.folder / "producers", PRODUCER, (MAX_PRODUCERS,), sparse=False
        ).array
        self._places = {
            int(row["incarnation"]): i for i, row in enumerate(self._producers) if row["incarnation"]
        }
        saved = load_signature(self.folder)
        if saved is not None:
            self._restore(*saved)

    @property
    def specs(self) -> tuple[FieldSpec, ...] | None:
        """The fields; None before the first insert."""
        return self.store.specs if self.store else None

    def _restore(self, specs: tuple[FieldSpec, ...], layout: dict[str, Any]) -> None:
        if layout["tables"] != self.layout["tables"]:
            raise ConfigError(
                f"{self.folder} was made for the capacities {layout['tables']}, not {self.layout['tables']}: "
                "use those, or another self.folder"
            )
        # Positions in the files depend on neither, but a store that shrinks would have to move chunks.
        self.layout = layout
        self.budget_bytes = layout["budget_bytes"]
        store = ChunkStore(self.folder, specs, layout["budget_bytes"], self._max_chunks, layout["entries"])
        self.store = store
        for table in self.tables.values():
            np.add.at(store.references, table.restore(store.commits), 1)
            self.restored_items += table.size
        # A chunk may have been committed a moment before its producer was noted.
        for record in store.live():
            place = self._place(int(record["incarnation"]))
            self._producers["sequence"][place] = max(self._producers["sequence"][place], record["sequence"])
        store.trim()

    # ---------------------------------------------------------------- insert

    def insert(self, insert: Insert) -> bool:
        """Store a chunk and its items; False if that has happened before.

        Raises RefusedError, or GapError where an earlier insert of the same incarnation is missing.
        """
        place = self._place(insert.incarnation)
        expected = max(int(self._producers["sequence"][place]) + 1, insert.oldest)
        if insert.sequence < expected:
            self.counters.duplicate_inserts += 1
            return False
        if insert.sequence > expected:
            raise GapError(expected)
        try:
            self._check(insert)
            store = self.store or self._create(insert)
            starts = self._make_room(store, insert.payloads)
        except RefusedError as error:
            # The producer gives it up: its next insert must not look like a gap.
            self._producers["sequence"][place] = insert.sequence
            self.counters.refused[error.kind] = self.counters.refused.get(error.kind, 0) + 1
            raise
        count = sum(len(items.offsets) for items in insert.items.values())
        row, commit = store.write(starts, insert.payloads, count)
        for name, items in insert.items.items():
            self.tables[name].insert(row, commit, items.offsets, items.lengths, items.priorities)
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

    def _check(self, insert: Insert) -> None:
        """Raise RefusedError for whatever is wrong with ``insert`` in itself."""
        if self.store is not None and not same_fields(insert.specs, self.store.specs):
            raise RefusedError("signature", _difference(insert.specs, self.store.specs))
        if not 0 < insert.steps < 2**31:
            raise RefusedError("bad_chunk", f"{insert.steps} steps")
        if set(insert.payloads) != {spec.name for spec in insert.specs} or not insert.specs:
            raise RefusedError("bad_chunk", "the data and the fields differ in their names")
        for spec in insert.specs:
            _check_payload(spec, insert.payloads[spec.name], insert.steps)
        if not insert.items:
            raise RefusedError("bad_items", "a chunk without items")
        for name, items in insert.items.items():
            table = self.tables.get(name)
            if table is None:
                raise RefusedError("no_table", f"{name!r}: the tables are {sorted(self.tables)}")
            _check_items(items, insert.steps, table.config.capacity)

    def _create(self, insert: Insert) -> ChunkStore:
        """Make the store for the fields of the first insert."""
        items = sum(len(items.offsets) for items in insert.items.values())
        capacity = sum(table.config.capacity for table in self.tables.values())
        # The files are sparse, so this costs nothing but address space: rings find their sizes themselves.
        entries = {
            spec.name: max(SPARE * capacity * spec.entries(insert.steps) // items, 1 << 16)
            for spec in insert.specs
        }
        self.layout |= {"entries": entries, "budget_bytes": self.budget_bytes}
        store = ChunkStore(self.folder, insert.specs, self.budget_bytes, self._max_chunks, entries)
        for table in self.tables.values():
            table.restore(store.commits)
        save_signature(self.folder, insert.specs, self.layout)
        self.store = store
        return store

    def _make_room(self, store: ChunkStore, payloads: Mapping[str, Payload]) -> list[int]:
        try:
            while (starts := store.prepare(payloads)) is None:
                row = store.oldest()
                assert row is not None
                commit = int(store.commits[row])
                store.drop_oldest()
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

    def sample(
        self, table_name: str, batch_size: int, *, plain: bool = False, places_only: bool = False
    ) -> Sample | str:
        """A batch, or the reason why there is none now. Raises RefusedError where there can never be one.

        Args:
            table_name: which table.
            batch_size: B.
            plain: return what did not compress as it is (see ``Column.gather``).
            places_only: leave ``arrays`` empty, for a reader that has mapped the files (see `Arena`).
        """
        table = self.tables.get(table_name)
        if table is None:
            raise RefusedError("no_table", f"{table_name!r}: the tables are {sorted(self.tables)}")
        impossible = table.limiter.impossible(batch_size)
        if impossible:
            raise RefusedError("batch_size", impossible)
        reason = table.limiter.sample_blocked(table.size, batch_size)
        if reason:
            return reason
        slots, probabilities = table.select(batch_size, self.rng)
        if not len(slots):
            return "every priority is zero"
        assert self.store is not None
        items = table.items(slots)
        rows = items["row"].astype(np.int64)
        offsets, lengths = items["offset"].astype(np.int64), items["length"].astype(np.int64)
        arrays = {} if places_only else self.store.gather(rows, offsets, lengths, plain=plain)
        table.count_sampled(slots)
        self.counters.sampled_batches += 1
        self.counters.sampled_items += len(slots)
        return Sample(
            ids=np.ascontiguousarray(items["id"]),
            probabilities=probabilities,
            versions=self.store.versions[rows],
            lengths=np.ascontiguousarray(items["length"]),
            table_items=table.size,
            total_priority=table.sampler.total,
            rows=rows,
            commits=np.ascontiguousarray(items["commit"]),
            offsets=np.ascontiguousarray(items["offset"]),
            arrays=arrays,
        )

    def update(self, table_name: str, ids: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        """Set raw priorities by item id; invalid ones and unknown ids are counted and skipped."""
        table = self.tables.get(table_name)
        if table is None:
            raise RefusedError("no_table", f"{table_name!r}: the tables are {sorted(self.tables)}")
        invalid, unknown = table.update(ids, priorities)
        self.counters.invalid_priorities += invalid
        self.counters.unknown_priorities += unknown
        self.counters.updated_priorities += len(ids) - invalid - unknown

    def insert_blocked(self) -> str | None:
        """Why writers should pause, if any table wants them to."""
        for table in self.tables.values():
            reason = table.limiter.insert_blocked(table.size)
            if reason:
                return reason
        return None

    def close(self) -> None:
        """Let another process have the folder. Everything is in its files already."""
        if self.store is not None:
            self.store.close()
        self._lock.close()


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
        raise ConfigError(f"{folder} is in use by another replay process") from None
    return file


def _check_payload(spec: FieldSpec, payload: Payload, steps: int) -> None:
    entries = spec.entries(steps)
    if payload.entries != entries:
        raise RefusedError(
            "bad_chunk", f"field {spec.name} has {payload.entries} entries, expected {entries}"
        )
    if not spec.compress:
        if payload.data.shape[1:] != spec.shape or payload.data.dtype != np.dtype(spec.dtype):
            raise RefusedError("bad_chunk", f"field {spec.name} is {payload.data.dtype}{payload.data.shape}")
        return
    assert payload.lengths is not None
    if spec.entry_bytes > MAX_ENTRY_BYTES:
        raise RefusedError("bad_chunk", f"an entry of {spec.name} is too large to be compressed")
    try:
        check_blocks(payload.data, payload.lengths, spec.entry_bytes)
    except PackingError as error:
        raise RefusedError("bad_chunk", f"field {spec.name}: {error}") from None


def _check_items(items: Items, steps: int, capacity: int) -> None:
    count = len(items.offsets)
    if not count or len(items.lengths) != count or len(items.priorities) != count:
        raise RefusedError("bad_items", "offsets, lengths and priorities differ in length, or there are none")
    if count > capacity:
        raise RefusedError("bad_items", f"{count} items in a table of {capacity}")
    ends = items.offsets.astype(np.int64) + items.lengths
    if int(items.offsets.min()) < 0 or int(items.lengths.min()) < 1 or int(ends.max()) > steps:
        raise RefusedError("bad_items", "an item lies outside of its chunk")
    if not np.all(valid_priorities(items.priorities)):
        raise RefusedError("bad_priority", "a priority is negative, NaN or infinite")


def same_fields(a: Sequence[FieldSpec], b: Sequence[FieldSpec]) -> bool:
    """Whether two lists of fields store the same, in whatever order; only the sum of the margins matters."""
    return {_essence(spec) for spec in a} == {_essence(spec) for spec in b} and len(a) == len(b)


def _essence(spec: FieldSpec) -> tuple[Any, ...]:
    return spec.name, spec.dtype, spec.shape, spec.before + spec.after, spec.compress


def _difference(theirs: tuple[FieldSpec, ...], ours: tuple[FieldSpec, ...]) -> str:
    """What is wrong with a signature, in one line."""
    if {spec.name for spec in theirs} != {spec.name for spec in ours}:
        return f"fields {[s.name for s in theirs]}, this server stores {[s.name for s in ours]}"
    known = {spec.name: spec for spec in ours}
    for spec in theirs:
        if _essence(spec) != _essence(known[spec.name]):
            return f"{spec}, this server stores {known[spec.name]}"
    return "a field twice"
