"""Ends a service that hangs, and tells its supervisor that it lives.

A loop says `turn` each time round. A thread beside it ends the process when a loop has not turned for
`run.hang_s`, which `arm` sets: the stacks of all threads, one line, exit code 70. Its supervisor starts the
service again. Work that may rightly take longer stands in `Loop.long`.

The thread also sends the supervisor a sign of life each second, as systemd expects it (sd_notify(3)): a
process that is stopped, or whose interpreter a library holds, cannot end itself. The launcher and systemd
kill it when no sign comes. Where nobody asks for signs, a timer in C ends a process whose interpreter is
held, with exit code 1.

One set of loops per process, as in `health`; in a process that has not called `start` nothing is watched.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

from troupe.common.errors import OWN_ERROR, TroupeError
from troupe.common.timing import HANG_S

_log = logging.getLogger(__name__)

PERIOD_S = 1.0
LONG = 6
"""Times the limit that work in `Loop.long` may take."""
_HELD = 1.5
"""Times the limit after which the timer in C ends a process whose interpreter is held."""
_WRITING_S = 5.0
"""How long the stacks and the last line may take: nobody may be reading them."""

_loops: set[Loop] = set()  # copied at once, while other threads add to it
_limit_s = HANG_S
_thread: threading.Thread | None = None
_timer = threading.RLock()  # for `exit_after` is called by a signal handler, in the midst of anything
_exit_s = 0.0
_armed = 0.0, 0.0  # when the timer in C was set last, and for which limit


class Loop:
    """A loop that has to turn while it exists.

    Attributes:
        turns: how many times it has turned.
        min_s: how long a turn may take whatever `run.hang_s` says.
    """

    def __init__(self, name: str) -> None:
        """Watch from now on."""
        self.name = name
        self.turns = 0
        self.doing = ""
        self.min_s = 0.0
        self._seen = 0
        self._still_s = 0.0
        _loops.add(self)
        _hold_off(self.limit_s)

    def turn(self) -> None:
        """Say that the loop is alive; costs nothing to speak of."""
        self.turns += 1

    @contextlib.contextmanager
    def long(self, what: str) -> Iterator[None]:
        """Do something that may take `LONG` times the limit."""
        before, self.doing = self.doing, what
        self.turns += 1
        _hold_off(self.limit_s)  # from here, for this work may hold the interpreter from its first moment
        try:
            yield
        finally:
            self.doing = before
            self.turns += 1

    def close(self) -> None:
        """Watch it no longer."""
        _loops.discard(self)

    @property
    def limit_s(self) -> float:
        """How long it may stand still now; 0: for ever."""
        limit_s = _limit_s * (LONG if self.doing else 1)
        return max(limit_s, self.min_s) if limit_s else 0.0

    def look(self, passed_s: float) -> float:
        """Seconds for which it has stood still, with so many more since the last look."""
        turns = self.turns
        self._still_s = 0.0 if turns != self._seen else self._still_s + passed_s
        self._seen = turns
        return self._still_s


def start() -> None:
    """Watch all loops and send signs of life from now on."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="watchdog", daemon=True)
        _thread.start()


def arm(limit_s: float) -> None:
    """Set how long a loop may stand still, in seconds; 0: for ever."""
    global _limit_s
    _limit_s = limit_s


def exit_after(seconds: float) -> None:
    """Dump the stacks and end the process (exit code 1) unless it has ended by itself by then."""
    global _exit_s
    with _timer:
        _exit_s = seconds
        faulthandler.dump_traceback_later(seconds, exit=True)


def _watch() -> None:
    before_s = time.monotonic()
    while True:
        period_s = min(PERIOD_S, _limit_s / 8) if _limit_s else PERIOD_S
        time.sleep(period_s)
        # Time that this thread has seen pass: a process that was stopped, or a machine asleep, does not hang.
        now_s = time.monotonic()
        passed_s, before_s = min(now_s - before_s, 2 * period_s), now_s
        for loop in list(_loops):
            still_s, limit_s = loop.look(passed_s), loop.limit_s
            if limit_s and still_s >= limit_s and not _exit_s:
                _end(loop, limit_s)
        notify("WATCHDOG=1")
        _hold_off(max((loop.limit_s for loop in list(_loops)), default=0.0))


def _hold_off(limit_s: float) -> None:
    """Move the timer in C, which ends the process if the interpreter is held until then."""
    if _thread is None or "NOTIFY_SOCKET" in os.environ:  # its supervisor misses the signs
        return
    global _armed
    with _timer:
        now_s, (armed_s, armed_limit_s) = time.monotonic(), _armed
        if _exit_s or (limit_s == armed_limit_s and now_s - armed_s < limit_s / 8):
            return  # it starts a thread each time
        _armed = now_s, limit_s
        if limit_s:
            faulthandler.dump_traceback_later(_HELD * limit_s, exit=True)
        else:
            faulthandler.cancel_dump_traceback_later()
        if _exit_s:  # by a signal, since we looked
            faulthandler.dump_traceback_later(_exit_s, exit=True)


def notify(text: str) -> None:
    """Tell the supervisor something in the words of sd_notify(3), if it has asked for it; never waits."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(text.encode(), "\0" + address[1:] if address[0] == "@" else address)


def _end(loop: Loop, limit_s: float) -> None:
    """The stacks, one line, and the end: nothing else gets a thread out of a call that hangs.

    The line is the same each time that the loop hangs there: so the launcher knows that a restart is in vain.
    """
    last = threading.Timer(_WRITING_S, os._exit, (TroupeError.exit_code,))
    last.daemon = True
    last.start()
    during = f" during {loop.doing}" if loop.doing else ""
    line = (
        f"{loop.name} hangs{during}: no progress for {limit_s:g} s, so it exits to be restarted; "
        "if it was slow work and not a hang, raise run.hang_s"
    )
    for log in _logs():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback(log, all_threads=True)
    if any(isinstance(each, logging.FileHandler) for each in logging.getLogger().handlers):
        _log.error("%s", line)
    with contextlib.suppress(OSError, AttributeError):
        print(f"{OWN_ERROR} {line}", file=sys.stderr, flush=True)
    os._exit(TroupeError.exit_code)


def _logs() -> list[IO[str]]:
    """The files of this process's log."""
    handlers = logging.getLogger().handlers
    return [each.stream for each in handlers if isinstance(each, logging.StreamHandler)] or [sys.stderr]
