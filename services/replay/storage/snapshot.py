"""A copy of a replay folder, taken while the owner goes on serving, and back again on any machine.

Tables and records are copied at once, in memory: they are what the snapshot is of. The data follow from a
thread, while the owner may free and overwrite chunks. As for a reader on the same host, a chunk that still
has its *commit* at the end has been there all along; the others, and their items, are not in the snapshot.

The snapshot holds the used parts of the files, and a manifest with the size and checksum of each, written
last: without it there is no snapshot. A local one appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from troupe.common import system
from troupe.common.data.format import RECORDS_FILE, SIGNATURE_FILE, check_run, fence
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import CheckpointError, ConfigError, TroupeError
from troupe.common.runtime.files import atomic_write, made_whole
from troupe.services.replay.storage.destinations import Destination, open_destination
from troupe.services.replay.storage.opened import check_capacities
from troupe.services.replay.storage.replay import Replay

MANIFEST_FILE = "snapshot.json"
RESTORED_FILE = "restored.json"
"""In a folder that was restored: from which address, and the checksum of the manifest that was there."""

FORMAT = 2
"""That of the files in it: the first had no checksums."""
PIECE_BYTES = 8 << 20


@dataclass
class Progress:
    """How far a snapshot is.

    Attributes:
        destination: where it goes.
        state: `running`, `done` or `failed`.
        bytes_total: bytes to write.
        bytes_done: bytes written.
        items: items of all tables that are in it, once it is done.
        detail: why it failed.
    """

    destination: str
    state: str = "running"
    bytes_total: int = 0
    bytes_done: int = 0
    items: int = 0
    detail: str = ""


class Snapshot:
    """One snapshot on its way. To be made by the thread that owns `replay`, between two inserts.

    Attributes:
        progress: how far it is.
    """

    def __init__(self, replay: Replay, destination: str) -> None:
        """Copy what changes all the time. Raises ConfigError if it cannot be written.

        No network is asked here: what an address beyond this machine says comes with the `progress`.
        """
        store = replay.store
        if store is None:
            raise ConfigError("there is nothing to take a snapshot of yet")
        self._store = store
        self._to: Destination = open_destination(destination, MANIFEST_FILE)
        self._signature = (replay.folder / SIGNATURE_FILE).read_bytes()
        self._lanes = store.lane_files()
        self._records = store.records_in_use().copy()
        self._small = replay.small_files()
        self._items = [self._small[f"{name}.items"] for name in replay.tables]
        self._files: list[dict[str, Any]] = []
        sizes = [array.nbytes for array in (*self._lanes.values(), *self._small.values(), self._records)]
        self.progress = Progress(destination, bytes_total=sum(sizes))
        self._stop = system.Event()
        self._thread = system.Thread(target=self._run, name="snapshot", daemon=True)

    def start(self) -> None:
        """Write it, in a thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Give it up, if it is not complete, and wait until its thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def join(self, timeout_s: float) -> None:
        """Wait until it is complete, or has failed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        progress = self.progress
        try:
            self._to.prepare()
            for name, array in self._lanes.items():
                self._write(name, array)
            damaged = self._forget_damaged()
            progress.items = self._forget_gone()
            for name, array in self._small.items():
                self._write(name, array)
            self._write(RECORDS_FILE, self._records)
            self._write(SIGNATURE_FILE, np.frombuffer(self._signature, np.uint8))
            manifest = {
                "format": FORMAT,
                "time_s": system.time(),
                "items": progress.items,
                "layout": json.loads(self._signature)["layout"],
                "files": self._files,
            }
            self._to.finish(json.dumps(manifest, indent=1).encode())
            progress.state = "done"
            if damaged:
                progress.detail = f"without {damaged} damaged chunks"
        except Exception as error:  # whatever a file system, or the network behind it, may raise
            kind = "" if isinstance(error, TroupeError) else f"{type(error).__name__}: "
            progress.detail = f"{kind}{error}".splitlines()[0]
            progress.state = "failed"
            self._to.abort()

    def _forget_damaged(self) -> int:
        """Take the chunks that do not match their checksums out of the records; returns how many there were.

        Those that are overwritten meanwhile are among them, and have left anyway.
        """
        damaged = []
        for row in np.flatnonzero(self._records["commit"]).tolist():
            if self._stop.is_set():
                raise CheckpointError("stopped")
            try:
                if self._store.damaged_chunks(np.array([row]), self._records[row : row + 1])[0]:
                    damaged.append(row)
            except (IndexError, ValueError):
                damaged.append(row)
        still = self._store.commits[damaged] == self._records["commit"][damaged]
        self._records["commit"][damaged] = 0
        return int(np.count_nonzero(still))

    def _forget_gone(self) -> int:
        """Take the chunks that have left out of the records; returns the items that remain."""
        fence()  # everything has been read by now
        now = self._store.commits[: len(self._records)]
        self._records["commit"][now != self._records["commit"]] = 0
        return sum(
            int(np.count_nonzero((i["commit"] != 0) & (i["commit"] == self._records["commit"][i["row"]])))
            for i in self._items
        )

    def _write(self, name: str, array: NDArray) -> None:
        data = array.reshape(-1).view(np.uint8)
        digest = hashlib.sha256()
        with self._to.open(name) as file:
            for at in range(0, len(data), PIECE_BYTES):
                if self._stop.is_set():
                    raise CheckpointError("stopped")
                # A copy: what is summed has to be what is written.
                piece = data[at : at + PIECE_BYTES].tobytes()
                digest.update(piece)
                file.write(piece)
                self.progress.bytes_done += len(piece)
        self._files.append({"name": name, "bytes": len(data), "sha256": digest.hexdigest()})


def restore_snapshot(
    source: str,
    folder: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    run: str | None = None,
    tables: Sequence[TableConfig] | None = None,
) -> int | None:
    """Make `folder` from the snapshot at `source`; returns the number of its items.

    The folder appears when it is complete. Before anything is copied it is known whether the snapshot is of
    `run` and of `tables` (None: any will do). Returns None where the folder was made from this very
    snapshot before, and stays as it is. Raises ConfigError where something else is there or the snapshot will
    not do, and CheckpointError where it cannot be read or is damaged.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is no directory")
    if folder.exists() and any(path.name not in ("lock", "token") for path in folder.iterdir()):
        if _was_restored(source, folder):
            return None
        raise ConfigError(f"{folder} is not empty: restore to another --data-dir, or use --volatile")
    origin = open_destination(source)
    try:
        text = origin.read(MANIFEST_FILE)
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{source} has format {manifest['format']}, this version reads {FORMAT}")
        files = [(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in manifest["files"]]
        items = int(manifest["items"])
        layout = dict(manifest["layout"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{source} holds no snapshot that can be read: {error}") from None
    if run is not None:
        check_run(source, layout, run, "restore another snapshot, or take over this one with --adopt")
    if tables is not None:
        check_capacities(source, layout, tables)
    try:
        with made_whole(folder, ".restoring") as temporary:
            for name, size, digest in files:
                say(f"restoring {name} ({size >> 20} MiB)")
                _copy(origin, name, size, digest, temporary)
            record = {"source": source, "manifest_sha256": _sum(text)}
            # Last, and forced to the disk with all names: a power cut leaves the folder whole, or none.
            atomic_write(temporary / RESTORED_FILE, json.dumps(record).encode())
            if folder.exists():
                for path in folder.iterdir():
                    path.unlink()
                folder.rmdir()
    except OSError as error:
        raise CheckpointError(f"cannot restore {source}: {error.strerror or error}") from None
    return items


def _was_restored(source: str, folder: Path) -> bool:
    """Whether `folder` was made from what is at `source` now, or was when it could still be read."""
    try:
        record = json.loads((folder / RESTORED_FILE).read_text())
        same_place, digest = record["source"] == source, record["manifest_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    try:
        return bool(_sum(open_destination(source).read(MANIFEST_FILE)) == digest)
    except (OSError, TroupeError):
        return bool(same_place)


def _sum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _copy(origin: Destination, name: str, size: int, digest: str, folder: Path) -> None:
    if Path(name).name != name or name.startswith("."):
        raise CheckpointError(f"the snapshot names {name!r}, which is not a file of replay")
    found, written = hashlib.sha256(), 0
    with origin.open_to_read(name) as file, (folder / name).open("wb") as out:
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
            out.write(piece)
            written += len(piece)
        out.flush()
        os.fsync(out.fileno())
    if written != size or found.hexdigest() != digest:
        raise CheckpointError(f"the snapshot is damaged: {name} is not as it was written")
