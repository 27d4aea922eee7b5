"""Forcing inserts to the disk before they are acknowledged: many at a time, while the shard serves on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from troupe.common import system
from troupe.common.errors import SyncFailedError

CLOSE_S = 30.0
"""How long the end waits for a disk."""


class GroupCommit:
    """Runs one sync after the other in a thread, for as long as something waits for one.

    What is written while a sync runs is for the next one. So a group is as large as the disk is slow, and
    nothing waits for longer than two of them take.

    Attributes:
        done: how many syncs are over, and so the number of the last one.
    """

    def __init__(self, sync: Callable[[], None]) -> None:
        """`sync` forces to the disk what was written before it was called; raises OSError."""
        self.done = 0
        self._sync = sync
        self._begun = 0
        self._asked = 0  # for the end of this one
        self._wanted = system.Event()
        self._over = system.Condition()
        self._closed = False
        self._failure: Exception | None = None
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = system.Thread(target=self._run, name="sync", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable when a sync is over, until `check`."""
        return self._signal

    def begin(self) -> int:
        """Have everything that was written before this call forced to the disk; the number of that sync."""
        self._asked = self._begun + 1  # the one that runs, if one does, may have passed over it
        self._wanted.set()
        return self._asked

    def check(self) -> int:
        """The number of the last sync that is over. Raises SyncFailedError where one has failed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        if self._failure is not None:
            why = getattr(self._failure, "strerror", None) or repr(self._failure)
            raise SyncFailedError(
                f"cannot force writes to the disk ({why}): nothing that waits for them is "
                "acknowledged; check the disk, then start again with the same --data-dir"
            )
        return self.done

    def finish(self, timeout_s: float = CLOSE_S) -> int:
        """Wait until nothing waits for a sync; returns what `check` does, and raises what it does."""
        with self._over:
            self._over.wait_for(lambda: self.done >= self._asked or self._failure is not None, timeout_s)
        return self.check()

    def close(self) -> None:
        """End the thread, after the sync that runs."""
        self._closed = True
        self._wanted.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._signal)

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            self._wanted.clear()
            self._begun += 1
            failure = self._failed_sync()
            with self._over:
                if failure is None:
                    self.done = self._begun
                self._failure = failure
                self._over.notify_all()
            os.eventfd_write(self._signal, 1)
            if self._failure is not None:
                return

    def _failed_sync(self) -> Exception | None:
        """Sync; why that has failed, or None."""
        try:
            self._sync()
        except Exception as error:  # no thread for it, say: this one must not end and tell nobody
            return error
        return None
