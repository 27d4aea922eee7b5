"""Order between memory that two processes share, where Python has no word for it."""

from __future__ import annotations

import threading

_LOCK = threading.Lock()


def fence() -> None:
    """Let no read or write move from before this call to after it, or the other way round.

    A lock keeps what is before it before its release, and what is after it after its acquisition: two rounds
    keep the two apart, on processors that order memory less strictly than x86 as well.
    """
    # One round is not enough: what comes before may move into the locked region from above, and what follows
    # from below.
    for _ in range(2):
        with _LOCK:
            pass
