"""Waiting for one file descriptor, whatever its number."""

from __future__ import annotations

import math
import select


def readable(fd: int, timeout_s: float) -> bool:
    """Wait until something can be read, for at most `timeout_s`; whether it can.

    `select` takes no descriptor above 1,023, which a process has as soon as it has as many connections.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    # Rounded up: a wait of less than a millisecond would be none.
    return bool(poll.poll(max(0, math.ceil(timeout_s * 1000))))
