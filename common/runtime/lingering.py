"""Threads that may still wait inside a library, whatever their owner does, when the process ends."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from troupe.common import system

_started: weakref.WeakSet[system.Thread] = weakref.WeakSet()
_guard = threading.Lock()


MOMENT_S = 1.0
"""How long the end of the process waits for each thread that is not a daemon."""


def start(target: Callable[[], object], name: str, *, daemon: bool = True) -> None:
    """Run `target` on a thread that nobody waits for; where it is no `daemon`, for a moment."""
    thread = system.Thread(target=target, name=name, daemon=daemon)
    with _guard:
        _started.add(thread)
    thread.start()


def ended(code: int) -> int:
    """The exit code, to be returned by the last function of the process; where such threads wait, exit.

    Python stops a daemon thread that comes back to it from C++ while it ends, by an exception that C++ does
    not let through: the process would be aborted.
    """
    with _guard:
        started = list(_started)
    for thread in started:
        if not thread.daemon:
            thread.join(MOMENT_S)
    if any(thread.is_alive() for thread in started):
        logging.shutdown()
        os._exit(code)
    return code
