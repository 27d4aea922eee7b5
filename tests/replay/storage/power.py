"""A disk whose power is cut: a pager that knows every state in which each page may have been written.

The system may write a dirty page at any time, in any order, or never before the next sync. So after each
write to a mapped file the pages that have changed are noted; a cut keeps one of the noted states of every
page, or the one of the last sync.
"""

import errno
import os

import numpy as np

from troupe.common.data.pager import PAGE_BYTES, FilePager, WrittenFile


class Recorded(np.ndarray):
    """An array that says when it, or a view of it, is written to."""

    def __array_finalize__(self, base):
        self.file = getattr(base, "file", None)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        if self.file is not None:
            self.file.note(self[key : key + 1] if isinstance(key, int) else self._around(key))

    def _around(self, key):
        """What writing to `key` may have changed, and more: never less."""
        if isinstance(key, slice):
            return self[key]
        if isinstance(key, np.ndarray) and key.dtype.kind in "iu" and key.size and int(key.min()) >= 0:
            return self[int(key.min()) : int(key.max()) + 1]
        return self


class RecordedFile(WrittenFile):
    """A file with the states of its pages since the last sync, the synced one first."""

    def __init__(self, path, dtype, shape, *, sparse, disk):
        self._disk = disk
        super().__init__(path, dtype, shape, sparse=sparse)
        size = self.array.nbytes
        self._bytes = self.array.reshape(-1).view(np.uint8)
        self.synced = path.read_bytes()[:size]  # what is there before this process writes
        self.states = {}
        self._last = self._bytes.copy()
        recorded = self.array.view(Recorded)
        recorded.file = self
        self.array = recorded

    def note(self, part=None):
        """Look which pages have changed, in memory of `part`, or anywhere."""
        begin, end = 0, len(self._bytes)
        if part is not None:
            if not part.size:
                return
            first, _ = np.lib.array_utils.byte_bounds(self._bytes)
            begin, end = (each - first for each in np.lib.array_utils.byte_bounds(part))
        changed = begin + np.flatnonzero(self._bytes[begin:end] != self._last[begin:end])
        for page in np.unique(changed // PAGE_BYTES).tolist():
            part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            states = self.states.setdefault(page, [self.synced[part]])
            states.append(self._bytes[part].tobytes())
            self._last[part] = self._bytes[part]

    def reserve(self, start, end):
        if self._disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(start, end)

    def sync(self):
        if self._disk.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.note()
        self.synced = self._bytes.tobytes()
        self.states = {}


class Disk:
    """Makes pagers; `cut` leaves what a power cut would.

    Attributes:
        full: no room is given.
        broken: no sync succeeds.
    """

    def __init__(self):
        self.full = self.broken = False
        self.files = {}

    def pager(self, folder):
        disk = self

        class Pager(FilePager):
            def _map(self, path, dtype, shape, sparse):
                file = RecordedFile(path, dtype, shape, sparse=sparse, disk=disk)
                disk.files[path.name] = file
                return file

            def sync(self):
                for file in self._files:
                    file.sync()

        return Pager(folder)

    def cut(self, choose):
        """Leave each page in one of its states: `choose(n)` gives a number below n."""
        for file in self.files.values():
            file.note()
            content = bytearray(file.synced)
            for page, states in sorted(file.states.items()):
                content[page * PAGE_BYTES : page * PAGE_BYTES + len(states[0])] = states[choose(len(states))]
            file.path.write_bytes(content)
        self.files = {}
