"""Emptying the folder of a shard without touching anything that is not its own."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from troupe.common.data.format import SIGNATURE_FILE, load_signature
from troupe.common.errors import ConfigError
from troupe.common.runtime.files import lock_file, meant
from troupe.common.wire.replay.files import TOKEN_FILE
from troupe.services.replay.storage.opened import FAILED_SYNC_FILE, IN_USE, OPENED_FILE
from troupe.services.replay.storage.snapshot import RESTORED_FILE

_FIXED = {
    *("producers", "unstored", "chunks.records", "chunks.header"),
    *(SIGNATURE_FILE, f"{SIGNATURE_FILE}.tmp", TOKEN_FILE, f"{TOKEN_FILE}.tmp", RESTORED_FILE),
    *(FAILED_SYNC_FILE, OPENED_FILE),
}
_OF_TABLE = ("items", "priorities", "header")
_OF_FIELD = ("raw", "offsets", "lengths", "blocks", "sums")


def clear(folder: Path, tables: Collection[str] = ("default",)) -> None:
    """Delete the files that a former shard has left in `folder`, and those of `tables`.

    Raises:
        ConfigError: another shard uses it, it holds files that are not a shard's, or it cannot be read.
    """
    try:
        if not folder.is_dir():
            return
        _own_files(folder, tables)  # before the lock, which would write into a stranger's folder
        with lock_file(folder / "lock", IN_USE.format(folder)):
            # In this order, a folder that is emptied in part holds no chunks, and still says whose it is.
            own = _own_files(folder, tables)
            for file in sorted(own, key=lambda f: (f.name == SIGNATURE_FILE, f.name != "chunks.records")):
                file.unlink()
    except OSError as error:
        raise ConfigError(f"cannot empty {folder}: {os.strerror(error.errno or 0)}") from error


def _own_files(folder: Path, tables: Collection[str]) -> list[Path]:
    """Files of a shard in `folder`, but the lock. Subdirectories are none, and are nobody's business."""
    saved = load_signature(folder, any_format=True)
    specs, layout = saved or ((), {"tables": {}})
    own = _FIXED | {f"{table}.{suffix}" for table in {*layout["tables"], *tables} for suffix in _OF_TABLE}
    own |= {f"{spec.name}.{suffix}" for spec in specs for suffix in _OF_FIELD}
    files = [path for path in folder.iterdir() if not path.is_dir() and path.name != "lock"]
    # Refused as a whole: a mistyped --data-dir may be somebody's home, of which nothing must go.
    foreign = sorted(path.name for path in files if meant(path.name) not in own)
    if saved is None:
        # A shard that died in its first insert has made files for fields that it had not noted yet. They are
        # used again as they are, so they may stay.
        foreign = [name for name in foreign if name.rpartition(".")[2] not in _OF_FIELD]
    if foreign:
        raise ConfigError(
            f"{folder} cannot be emptied, for it holds files that replay did not write "
            f"({', '.join(foreign[:3])}): choose another --data-dir"
        )
    return [path for path in files if meant(path.name) in own]
