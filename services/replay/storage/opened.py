"""Whose a folder is: of which process, which tables, and which boot of the machine it was opened in last."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from troupe.common.data.pager import DiskFullError, file_error
from troupe.common.data.table_config import TableConfig
from troupe.common.errors import ConfigError
from troupe.common.machine import boot_id
from troupe.common.runtime.files import atomic_write, lock_file

IN_USE = "{} is in use by another replay process; choose another --data-dir"
OPENED_FILE = "opened.json"
FAILED_SYNC_FILE = "failed-sync"
"""Says that the disk has refused something: all has to be written again, for the system forgets that."""

_log = logging.getLogger(__name__)


class Opened:
    """What the process before this one has noted; another boot means that the power may have gone.

    Attributes:
        durable: what acknowledged items were to survive; empty where nobody was here before.
        lost_power: whether the machine has been started anew since.
    """

    def __init__(self, folder: Path, boot: str | None = None) -> None:
        self._path = folder / OPENED_FILE
        self._boot = boot_id() if boot is None else boot
        try:
            noted = json.loads(self._path.read_text())
            self.durable, before = str(noted["durable"]), str(noted["boot"])
        except (OSError, ValueError, KeyError, TypeError):
            self.durable, before = "", ""
        self._noted = self.durable, before
        self.lost_power = bool(self.durable) and (not before or before != self._boot)

    def write(self, durable: str) -> None:
        """Note that a process of this boot has the folder.

        Raises ConfigError where that cannot be written. On a full disk only `power` insists on it: what was
        acknowledged before a power cut is told by it.
        """
        if self.lost_power and self.durable == "process":
            _log.warning(
                "the machine has rebooted since %s was last used: after a power cut, what was stored in "
                "the last half minute may be missing",
                self._path.parent,
            )
        if self._noted == (durable, self._boot):
            return
        try:
            atomic_write(self._path, json.dumps({"boot": self._boot, "durable": durable}).encode())
        except OSError as error:
            failure = file_error(f"cannot write {self._path}", error)
            # A shard serves what it has although its disk is full. An old note makes the next start careful.
            if durable == "power" or not isinstance(failure, DiskFullError):
                raise failure from None
            _log.warning("%s", failure)


def check_capacities(place: object, layout: Mapping[str, Any], tables: Iterable[TableConfig]) -> None:
    """Raise ConfigError where the files in `place`, with this `layout`, are of other `tables`."""
    wanted = {table.name: table.slots for table in tables}
    if layout.get("tables") != wanted:
        raise ConfigError(
            f"{place} was made for the capacities {layout.get('tables')}, not {wanted}: "
            "use those, or another folder"
        )


def lock_folder(folder: Path) -> IO[str]:
    """Make `folder`, which belongs to this process until what is returned is closed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return lock_file(folder / "lock", IN_USE.format(folder))
    except OSError as error:
        raise ConfigError(f"cannot write in {folder}: {os.strerror(error.errno or 0)}") from None
