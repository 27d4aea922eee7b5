"""Keeps the library up to date while somebody looks, and costs nothing while nobody does."""

from __future__ import annotations

import logging
import threading
import time

from troupe.services.board.library import Library

_log = logging.getLogger(__name__)


class Watch:
    """A thread that looks at the runs every `PERIOD_S`, until `stop`, as long as somebody asks."""

    PERIOD_S = 2.0
    _PATIENCE_S = 30.0
    _LOOK_S = 5.0

    def __init__(self, library: Library) -> None:
        """Watch `library`, from `start` on."""
        self._library = library
        self._asked_s = time.monotonic()
        self._wake, self._over = threading.Event(), threading.Event()
        self._fresh = threading.Event()  # cleared while the thread sleeps because nobody asks
        self._fresh.set()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin, with a first look."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._over.set()
        self._wake.set()
        self._fresh.set()
        self._thread.join(10.0)

    def asked(self) -> None:
        """Somebody looks at the page; may be said from any thread."""
        idle = time.monotonic() - self._asked_s > self._PATIENCE_S
        self._asked_s = time.monotonic()
        if idle:
            self._wake.set()

    def catch_up(self) -> None:
        """Like `asked`, and wait for the next look where nobody had asked; `_LOOK_S` at most."""
        self.asked()
        self._fresh.wait(self._LOOK_S)

    @property
    def is_over(self) -> bool:
        """Whether it has been stopped."""
        return self._over.is_set()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._library.refresh()
            except Exception:  # a run directory may hold anything: the page goes on without what is new
                _log.exception("cannot look for runs")
            self._fresh.set()
            self._wake.clear()
            nobody = time.monotonic() - self._asked_s > self._PATIENCE_S
            if nobody:
                self._fresh.clear()
            self._wake.wait(None if nobody else self.PERIOD_S)
