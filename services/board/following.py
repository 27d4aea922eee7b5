"""Files that grow: each look takes in what is new since the last one."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from troupe.services.board.opening import open_regular

BLOCK_BYTES = 1 << 23
READ_BYTES = 1 << 28
"""Of one file, read for one answer: the next one goes on."""

_versions = itertools.count(1)


class Follower:
    """A file of lines in a run directory, followed by its offset.

    Attributes:
        version: another one after each change; no two followers ever have the same.
        is_complete: whether all that there is of the file has been read.
    """

    def __init__(self, run: Path, name: str) -> None:
        """Read nothing yet."""
        self._run, self._file_name = run, name
        self._number = 0
        self._offset = 0
        self.version = next(_versions)
        self.is_complete = False

    def read(self) -> None:
        """Take in what the file has more than at the last time; nothing where it cannot be read."""
        try:
            file = open_regular(self._run, self._file_name)
        except OSError:
            self.is_complete = True
            return
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._number or found.st_size < self._offset:  # another file, or cut
                self._number, self._offset = found.st_ino, self.start_at(found.st_size)
                self.clear()
                self.changed()
            left = READ_BYTES
            file.seek(self._offset)
            while left > 0 and (block := file.read(BLOCK_BYTES)):
                end = block.rfind(b"\n") + 1
                if not end and len(block) < BLOCK_BYTES:
                    break  # half a line, of a run that is being written
                if end:
                    self.take(block[:end])
                self._offset += end or len(block)  # a line of megabytes is none of ours
                left -= len(block)
                file.seek(self._offset)
            self.is_complete = left > 0

    def changed(self) -> None:
        """Say that what was read is not what it was."""
        self.version = next(_versions)

    def start_at(self, size: int) -> int:
        """Where to begin in a file of so many bytes."""
        return 0

    def clear(self) -> None:
        """Forget what was read: the file is another one."""
        raise NotImplementedError

    def take(self, block: bytes) -> None:
        """Take in whole lines."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """Values that are kept."""
        raise NotImplementedError
