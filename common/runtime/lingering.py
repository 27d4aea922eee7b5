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


def start(target: Callable[[], object], name: str) -> None:
    """Run `target` on a thread that nobody waits for."""
    thread = system.Thread(target=target, name=name, daemon=True)
    with _guard:
        _started.add(thread)
    thread.start()


def ended(code: int) -> int:
    """The exit code, to be returned by the last function of the process; where such threads wait, exit.

    Python stops a daemon thread that comes back to it from C++ while it ends, by an exception that C++ does
    not let through: the process would be aborted.
    """
    with _guard:
        waiting = any(thread.is_alive() for thread in _started)
    if waiting:
        logging.shutdown()
        os._exit(code)
    return code
