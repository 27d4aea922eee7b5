"""All runs below the roots, as a page lists them: found, read where they have changed, numbered by change."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from troupe.common.errors import ConfigError, TroupeError
from troupe.common.runtime.files import CONFIG_FILE, STATUS_FILE
from troupe.common.runtime.logging import peer_text
from troupe.common.runtime.metrics import CSV_FILE
from troupe.services.board import notes
from troupe.services.board.opening import is_absent, stamp
from troupe.services.experiments.groups import differing_fields, labelled
from troupe.services.experiments.plan import RECORD
from troupe.services.experiments.runs import Run, read_run

MAX_DEPTH = 5
MAX_RUNS = 20_000
MAX_SWEEPS = 200
MAX_ENTRIES = 200_000
"""Of directories, in one search: somebody may name a home directory."""
RESCAN_S = 10.0
_QUIET_S = 600.0
_FILES = (CONFIG_FILE, STATUS_FILE, CSV_FILE)
_MAX_CONFIG_BYTES, _MAX_STATUS_BYTES = 1 << 20, 1 << 22


@dataclass
class Entry:
    """A run directory, and what was last read of it.

    Attributes:
        id: what a browser calls it: of its path, and no path.
        path: of the directory, without links.
        name: its path below the root, printable.
        run: what it says of itself; None where it cannot be read.
        problem: why.
        version: the change of the library with which it last changed.
        stamps: of its files, when it was read.
        note: the first line of its note.
    """

    id: str
    path: Path
    name: str
    run: Run | None = None
    problem: str = ""
    version: int = 0
    stamps: tuple[Any, ...] = ()
    note: str = ""


@dataclass
class Folder:
    """The directory of a sweep; `id`, `path` and `name` as of an `Entry`."""

    id: str
    path: Path
    name: str
    stamp: Any = None


@dataclass
class _Search:
    """How far a search for runs has come."""

    entries: int = 0
    found: list[tuple[Path, str]] = field(default_factory=list)
    sweeps: list[tuple[Path, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.entries >= MAX_ENTRIES or len(self.found) >= MAX_RUNS


class Library:
    """The runs below some roots. Its methods may be called from any thread.

    Attributes:
        roots: directories, without links.
        version: grows by one with every change.
        is_read: whether every run that was found has been read.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        """Look into no directory yet.

        Raises:
            ConfigError: one of the roots is no directory.
        """
        self.roots = []
        for root in roots:
            real = Path(os.path.realpath(root.expanduser()))
            if not real.is_dir():
                what = "is not a directory" if real.exists() else "does not exist"
                raise ConfigError(f"{root} {what}: name a run directory, or a directory that contains runs")
            self.roots.append(real)
        self.version = 0
        self.is_read = False
        self._entries: dict[str, Entry] = {}
        self._sweeps: dict[str, Folder] = {}
        self._gone: dict[str, int] = {}
        self._lock = threading.RLock()
        self._refreshing = threading.Lock()
        self._searched_s = -RESCAN_S
        self._labels: tuple[tuple[str, ...], dict[str, str], list[str]] = ((), {}, [])

    def refresh(self) -> None:
        """Look for runs that are new or gone, and read those that have changed, the newest first."""
        with self._refreshing:
            now_s = time.monotonic()
            is_search = now_s - self._searched_s >= RESCAN_S
            if is_search:
                self._searched_s = now_s
                self._search()
            with self._lock:
                entries = list(self._entries.values())
            if not self.is_read:
                entries.sort(key=lambda entry: -_changed_ns(entry.path))
            for entry in entries:
                if is_search or not _is_quiet(entry):
                    self._read(entry)
            with self._lock:
                for folder in self._sweeps.values():
                    now = stamp(folder.path, RECORD)
                    self.version += now != folder.stamp
                    folder.stamp = now
            self.is_read = True

    def entries(self) -> list[Entry]:
        """All runs, in the order in which they were found."""
        with self._lock:
            return list(self._entries.values())

    def get(self, run_id: str) -> Entry | None:
        """The run of this id; None where there is none."""
        with self._lock:
            return self._entries.get(run_id)

    def at(self, path: Path) -> Entry | None:
        """The run in a directory, without links; None where there is none."""
        return self.get(_id_of(path))

    def sweeps(self) -> list[Folder]:
        """All sweeps, in the order in which they were found."""
        with self._lock:
            return list(self._sweeps.values())

    def sweep(self, sweep_id: str) -> Folder | None:
        """The sweep of this id; None where there is none."""
        with self._lock:
            return self._sweeps.get(sweep_id)

    def changed(self, after: int) -> tuple[int, list[Entry], list[str]]:
        """The version now, runs that have changed after a version, and ids of those that are gone since."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if entry.version > after]
            gone = [run_id for run_id, version in self._gone.items() if version > after]
            return self.version, entries, gone

    def labels(self) -> tuple[dict[str, str], list[str]]:
        """What names each run by what others have not, by id, and the fields of that."""
        with self._lock:
            runs = {entry.id: entry.run for entry in self._entries.values() if entry.run is not None}
            key = tuple(f"{e.id}{e.stamps[:1]}" for e in self._entries.values() if e.run is not None)
            if self._labels[0] == key:
                return self._labels[1:]
        fields = differing_fields(list(runs.values()))
        said = labelled([run.fields for run in runs.values()], fields)
        labels = {run_id: peer_text(label) for run_id, label in zip(runs, said, strict=True)}
        with self._lock:
            self._labels = (key, labels, fields)
        return labels, fields

    def _search(self) -> None:
        search = _Search()
        for root in self.roots:
            if not search.is_over:
                _below(root, root, MAX_DEPTH, search)
        found = {_id_of(path): (path, name) for path, name in search.found}
        sweeps = {_id_of(path): Folder(_id_of(path), path, name) for path, name in search.sweeps[:MAX_SWEEPS]}
        with self._lock:
            self.version += sweeps.keys() != self._sweeps.keys()
            self._sweeps = {key: self._sweeps.get(key, folder) for key, folder in sweeps.items()}
            for run_id in self._entries.keys() - found.keys():
                del self._entries[run_id]
                self.version += 1
                self._gone[run_id] = self.version
            for run_id, (path, name) in found.items():
                self._gone.pop(run_id, None)
                if run_id not in self._entries:
                    self._entries[run_id] = Entry(run_id, path, name)
                    self.is_read = False

    def _read(self, entry: Entry) -> None:
        stamps = tuple(stamp(entry.path, name) for name in (*_FILES, notes.NOTES_FILE))
        # Of a run that goes on, only the clock and its lock say that it has ended.
        if stamps == entry.stamps and not (entry.run is not None and entry.run.state == "running"):
            return
        run, problem = None, ""
        try:
            _check(entry.path, stamps[: len(_FILES)])
            run = read_run(entry.path)
        except (TroupeError, OSError, ValueError, RecursionError, MemoryError) as error:
            problem = peer_text(str(error)) or type(error).__name__
        note = (
            _first_line(notes.read(entry.path)) if stamps[-1] != (entry.stamps or (None,))[-1] else entry.note
        )
        with self._lock:
            is_same = stamps == entry.stamps and run is not None and entry.run is not None
            entry.stamps = stamps
            if is_same and run is not None and entry.run is not None and run.state == entry.run.state:
                return
            self.version += 1
            entry.run, entry.problem, entry.note, entry.version = run, problem, note, self.version


def _check(path: Path, stamps: tuple[Any, ...]) -> None:
    """Refuse what could keep a reader for ever, or lead it elsewhere."""
    limits = (_MAX_CONFIG_BYTES, _MAX_STATUS_BYTES, 0)
    for name, found, limit in zip(_FILES, stamps, limits, strict=True):
        if found is None and not is_absent(path, name):
            raise ConfigError(f"its {name} is not a regular file")
        if found is not None and limit and found[1] > limit:
            raise ConfigError(f"its {name} has more than {limit:,} bytes")
    for name in (".lock", "checkpoints/LATEST"):
        if stamp(path, name) is None and not is_absent(path, name):
            raise ConfigError(f"its {name} is not a regular file")
    if os.path.islink(path / "checkpoints"):
        raise ConfigError("its checkpoints folder is a link")


def _first_line(note: str) -> str:
    """What a list shows of a note: its first words, without the marks of a heading, a list or a quote."""
    return peer_text(next(filter(None, (line.strip(" #>*-") for line in note.splitlines())), ""))[:100]


def _below(root: Path, path: Path, depth: int, search: _Search) -> None:
    """Find runs at `path` or below; there are none within a run, and links are not followed."""
    name = str(path.relative_to(root)) if path != root else path.name
    name = peer_text(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
    if stamp(path, CONFIG_FILE) is not None:
        search.found.append((path, name))
        return
    if stamp(path, RECORD) is not None:
        search.sweeps.append((path, name))
    if not depth:
        return
    for child in _directories(path, search):
        if search.is_over:
            return
        _below(root, child, depth - 1, search)


def _directories(path: Path, search: _Search) -> Iterator[Path]:
    try:
        with os.scandir(path) as listing:
            for each in listing:
                search.entries += 1
                if search.is_over:
                    return
                if not each.name.startswith(".") and each.is_dir(follow_symlinks=False):
                    yield path / each.name
    except OSError:
        return


def _id_of(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _changed_ns(path: Path) -> int:
    return max((found[0] for name in (CONFIG_FILE, STATUS_FILE) if (found := stamp(path, name))), default=0)


def _is_quiet(entry: Entry) -> bool:
    """Whether a run is looked at only with every search: it has ended long ago."""
    run = entry.run
    return (run is not None and run.state != "running" and time.time() - run.changed_s > _QUIET_S) or bool(
        entry.problem
    )
