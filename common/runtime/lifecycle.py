"""Starting and stopping a service: signals, deadlines, exit codes."""

from __future__ import annotations

import atexit
import errno
import faulthandler
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from troupe.common import system
from troupe.common.errors import DISK_FULL, OWN_ERROR, ConfigError, TroupeError, defect_line
from troupe.common.families import EXTRAS
from troupe.common.installation import install_command
from troupe.common.polling import readable
from troupe.common.runtime import watchdog
from troupe.common.runtime.logging import printable

_log = logging.getLogger(__name__)

INTERNAL_ERROR = 70
INTERRUPTED = 130
_TOGETHER_S = 0.1  # nobody presses Ctrl-C twice in that time
_NO_MEMORY = (
    "no memory is left for this process: lower replay.capacity_items, replay.batch_size or the number of "
    "actor processes, or give the machine or container more"
)
# Packages that only some installations have, and the extra that brings each.
_EXTRAS = {
    **EXTRAS,
    "torch": "learner,actor",
    "safetensors": "learner",
    "tensorboardX": "learner",
    "PIL": "evaluator",
    "starlette": "board",
    "uvicorn": "board",
}


class Deadline:
    """A point in time that a wait must not pass.

    >>> Deadline(None).expired   # no limit
    False
    """

    def __init__(self, seconds: float | None) -> None:
        """Start now; `None` means without a limit."""
        self.started = system.monotonic()
        self.seconds = seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return system.monotonic() - self.started

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative; infinite without a limit."""
        return float("inf") if self.seconds is None else max(0.0, self.seconds - self.elapsed_s)

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        return self.remaining_s <= 0.0

    def slice_s(self, at_most_s: float) -> float:
        """How long to wait in one go: the rest, but at most `at_most_s`."""
        return min(self.remaining_s, at_most_s)


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGHUP (the terminal has gone) into a flag that a main loop looks at.

    The first signal asks for a clean stop. A second one, or `force_after_s` seconds spent stopping, ends the
    process at once: a service that hangs while it stops must never become a process that nobody can stop. In
    a job of Slurm a further SIGTERM is none.
    With `force_after_s=None` neither happens, and the caller looks at `signals`. Signals that come
    together are one: `timeout` sends its signal to the process, and then to the group that it is in.

    A pipe carries the news rather than a `threading.Event`, whose lock the interrupted code may hold.
    """

    def __init__(self, force_after_s: float | None = 60.0) -> None:
        """Create the flag; `install` connects it to the signals."""
        self._requested = False
        self._signals = 0
        self._counted_s = -_TOGETHER_S
        self._force_after_s = force_after_s
        self._reader, self._writer = os.pipe()
        # A handler must not block; and a full pipe means that the reader knows already.
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)
        self._former: dict[signal.Signals, Any] = {}
        self._former_wakeup = -1

    def install(self) -> StopSignal:
        """Handle the signals from now on (main thread only); returns itself."""
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else `nohup` wants us to go on
            numbers.append(signal.SIGHUP)
        # Python runs a handler between two bytecodes. One that is due just before a wait in the kernel would
        # run after it, however long that takes; so the signal itself writes to the pipe, in C.
        self._former_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def uninstall(self) -> None:
        """Give the signals back to the handlers from before `install`."""
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        self._former = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now_s = system.monotonic()
        if now_s - self._counted_s < _TOGETHER_S:
            return
        # Slurm says SIGTERM again with every `scancel` and at the end of a job's grace time: that is no
        # impatience, and what is being written then is the checkpoint. SIGKILL follows anyway.
        if number == signal.SIGTERM and self._signals and "SLURM_JOB_ID" in os.environ:
            return
        self._counted_s = now_s
        self._signals += 1
        if self._force_after_s is not None:
            if self._signals > 1:
                # Not `sys.exit`: that would run the very clean-up that hangs.
                os._exit(128 + number)
            watchdog.exit_after(self._force_after_s)
        self.set()

    def set(self) -> None:
        """Ask for a stop from inside the process, from any thread."""
        if not self._requested:
            self._requested = True
            os.write(self._writer, b"x")

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self._requested

    @property
    def signals(self) -> int:
        """How many signals have come."""
        return self._signals

    def __bool__(self) -> bool:
        return self._requested

    def fileno(self) -> int:
        """Return a descriptor that becomes readable on a stop: register it with a poller."""
        return self._reader

    def wait(self, timeout_s: float) -> bool:
        """Sleep until a stop is asked for, at most `timeout_s`; returns `requested`."""
        readable(self._reader, timeout_s)
        if not self._requested:  # woken by a signal that asks for no stop, whose byte must not wake us again
            with suppress(BlockingIOError):
                os.read(self._reader, 512)
        return self._requested


def enable_stack_dumps() -> None:
    """Write all stacks to stderr on a crash, and on SIGUSR1 (`kill -USR1 PID` shows where a service is)."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def run_main(body: Callable[[], int | None]) -> int:
    """Run a command's body and turn what it raises into an exit code and one line on stderr.

    Expected errors (`TroupeError`) are printed as `troupe: error: ...` without a traceback. Anything else is
    a defect, of Troupe or of a user's own code: the traceback goes first, then a one-line summary that names
    the line of the user's code: the last line of a log always says why.
    """
    # At its end Python would look for cycles in all that is left: with torch, for a quarter of a second.
    atexit.register(gc.freeze)
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        return _exit_code(body)
    finally:
        if signal.getsignal(signal.SIGINT) is _on_ctrl_c:
            signal.signal(signal.SIGINT, former)
        # Python would try once more to write what is left, and turn the exit code into 120.
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: closed by the caller
            try:
                stream.flush()
            except (OSError, ValueError):
                with suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Interrupt as Python does, and leave the next one to it: what is raised before is not Ctrl-C's."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.default_int_handler(number, frame)


def _exit_code(body: Callable[[], int | None]) -> int:
    try:
        return body() or 0
    except TroupeError as error:
        _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `troupe presets | head`: the reader has gone, which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            return _report_defect(error)
        line = f"the package {error.name} is not installed: {install_command(extra)}"
        _say(line)
        return ConfigError.exit_code
    except Exception as error:
        if _wants_memory(error):
            _log.info("out of memory", exc_info=error)
            _say(_NO_MEMORY)
            return INTERNAL_ERROR  # not a mistake of the configuration: a supervisor may try again
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            _log.info("the disk is full", exc_info=error)
            what = f" {error.filename}" if error.filename else ""  # not known of a file that is open
            _say(f"cannot write{what}: {error.strerror}; make room")
            return INTERNAL_ERROR
        return _report_defect(error)


def _wants_memory(error: Exception) -> bool:
    """Whether an error means that the machine, or this process's limit, has no memory left."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = ("can't allocate memory", "not enough memory", "out of memory", "can't start new thread")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


def _report_defect(error: Exception) -> int:
    _log.exception("stopped by an unexpected error")
    _say(defect_line(error))
    return INTERNAL_ERROR


def _say(text: str) -> None:
    with suppress(OSError):  # nobody can be told, but the exit code says what kind of error it was
        print(f"{OWN_ERROR} {one_line(text)}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """Join the lines of `text` into one, fit for a terminal, whatever their source."""
    return printable(" ".join(text.split()))
