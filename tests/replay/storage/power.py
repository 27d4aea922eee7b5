"""A disk whose power is cut: a pager that knows every state in which each page may have been written.

The system may write a dirty page at any time, in any order, or never before the next sync. So after each
write to a mapped file the pages that have changed are noted; a cut keeps one of the noted states of every
page, or the one of the last sync.
"""

import errno
import os
import weakref

import numpy as np

from troupe.common.data.pager import PAGE_BYTES, FilePager, WrittenFile


class Recorded(np.ndarray):
    """An array that says when it, or a view of it, is written to."""

    def __array_finalize__(self, base):
        # Weak, for the collector does not see what an array is a view of.
        self.file = getattr(base, "file", lambda: None)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        file = self.file()
        if file is not None:
            file.note(self[key : key + 1] if isinstance(key, int) else self._around(key))

    def _around(self, key):
        """What writing to `key` may have changed, and more: never less."""
        if isinstance(key, slice):
            return self[key]
        if isinstance(key, np.ndarray) and key.dtype.kind in "iu" and key.size and int(key.min()) >= 0:
            return self[int(key.min()) : int(key.max()) + 1]
        return self


class RecordedFile(WrittenFile):
    """A file with the states that its pages have had since they were synced, the synced one first."""

    def __init__(self, path, dtype, shape, *, sparse, disk):
        self._disk = disk
        super().__init__(path, dtype, shape, sparse=sparse)
        self._bytes = self.array.reshape(-1).view(np.uint8)
        self.states = {}  # by page; none of those that are on the disk
        self._last = self._bytes.copy()
        before = disk.files.get(path.name)
        if before is not None:  # of a process that has ended: what it had not synced is not on the disk yet
            self.states = {page: list(states) for page, states in before.states.items()}
            self._last = before._last
            self.note()
        recorded = self.array.view(Recorded)
        recorded.file = weakref.ref(self)
        self.array = recorded

    def note(self, part=None):
        """Look which pages have changed, in memory of `part`, or anywhere."""
        begin, end = 0, len(self._bytes)
        if part is not None:
            if not part.size:
                return
            first, _ = np.lib.array_utils.byte_bounds(self._bytes)
            begin, end = (each - first for each in np.lib.array_utils.byte_bounds(part))
        for page in self._changed(begin, end):
            part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            states = self.states.setdefault(page, [self._last[part].tobytes()])
            states.append(self._bytes[part].tobytes())
            self._last[part] = self._bytes[part]

    def _changed(self, begin, end):
        """Pages that have changed between these bytes."""
        begin -= begin % 8
        if end - begin > PAGE_BYTES:  # word by word
            whole = end - end % 8
            words = self._bytes[begin:whole].view(np.uint64) != self._last[begin:whole].view(np.uint64)
            pages = set(((begin + 8 * np.flatnonzero(words)) // PAGE_BYTES).tolist())
            begin = whole
        else:
            pages = set()
        changed = begin + np.flatnonzero(self._bytes[begin:end] != self._last[begin:end])
        return sorted(pages | set((changed // PAGE_BYTES).tolist()))

    def reserve(self, start, end):
        if self._disk.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(start, end)

    def sync(self):
        self.end_sync(self.begin_sync())

    def begin_sync(self):
        """By page, how many of its states are to be on the disk, or older than what is."""
        if self._disk.broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.note()
        return {page: len(states) for page, states in list(self.states.items())}

    def end_sync(self, counts):
        """The last of these states is on the disk; pages that have changed meanwhile may be newer."""
        for page, count in counts.items():
            states = self.states[page]
            del states[: count - 1]
            if len(states) == 1:
                del self.states[page]


class Disk:
    """Makes pagers; `cut` leaves what a power cut would.

    Attributes:
        full: no room is given.
        broken: no sync succeeds.
    """

    def __init__(self, wait=lambda: None):
        """`wait` is called while a sync lasts."""
        self.full = self.broken = False
        self.files = {}
        self._wait = wait

    def pager(self, folder):
        disk = self

        class Pager(FilePager):
            def _map(self, path, dtype, shape, sparse):
                file = RecordedFile(path, dtype, shape, sparse=sparse, disk=disk)
                disk.files[path.name] = file
                return file

            def sync(self):
                begun = [(file, file.begin_sync()) for file in self._files]
                disk._wait()
                for file, counts in begun:
                    file.end_sync(counts)

        return Pager(folder)

    def cut(self, choose, folder=None):
        """Leave each page in one of its states, in a copy in `folder` if there is one.

        `choose(n)` gives a number below n.
        """
        for file in self.files.values():
            file.note()
            with (file.path if folder is None else folder / file.name).open("r+b") as left:
                for page, states in sorted(file.states.items()):
                    left.seek(page * PAGE_BYTES)
                    left.write(states[choose(len(states))])
        self.files = {}
