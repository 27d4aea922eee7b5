"""Signs of life of a child, sent as systemd's services send them: a datagram a second on a socket of its own.

They come from a thread of the child that does nothing else (`troupe.common.runtime.watchdog`), so that their
absence means one thing: the process is stopped, or has its interpreter held.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

_LOOK_S = 1.0
"""Most that counts as silence between two looks: time in which this process was stopped does not."""


class Signs:
    """Hears the signs of life of one child, whichever process it is."""

    def __init__(self, path: Path, starts_in_s: float) -> None:
        """Listen on a new socket at `path`; a process has `starts_in_s` more until its first sign."""
        self._starts_in_s = starts_in_s
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self._silent_s = 0.0
        self._looked_s = time.monotonic()

    def begin(self) -> None:
        """A new process begins: what has come is another's, and this one is given time to start."""
        self._heard()
        self._silent_s = -self._starts_in_s

    def silent_s(self) -> float:
        """Seconds without a sign; negative while a process starts."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, _LOOK_S), now_s
        if self._heard():
            self._silent_s = 0.0
        else:
            self._silent_s += passed_s
        return self._silent_s

    def close(self) -> None:
        """Listen no longer."""
        self._socket.close()

    def _heard(self) -> bool:
        heard = False
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(256)
                heard = True
        return heard
