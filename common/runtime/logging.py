"""Logs: one line per event, the same format in every service, never more than one line a period per topic."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from troupe.common import system
from troupe.common.errors import ConfigError

_FORMAT = "%(asctime)s %(levelname)-7s {service}: %(message)s"
_LEVELS = ("debug", "info", "warning", "error")

MAX_PEER_CHARS = 400
"""Of what a peer says, in a line for people."""


def printable(text: str) -> str:
    """Escape what is not printable: a line break or a terminal's escape in it must not forge a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(ord(c)) for c in text)


def peer_text(text: str) -> str:
    """What a peer says, on one line, printable, of at most `MAX_PEER_CHARS`."""
    line = printable(" ".join(text[: MAX_PEER_CHARS + 1].split()))
    return line if len(line) <= MAX_PEER_CHARS else f"{line[: MAX_PEER_CHARS - 3]}..."


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class OneLineFormatter(logging.Formatter):
    """A formatter whose messages stay within their line, whatever is in them; traces follow below."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of a record, escaped: names and reasons in it come from peers."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """The lines of a trace, each escaped."""
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


class _Quiet(logging.Handler):
    """Drops a line that cannot be written: the disk is full, or the reader has gone."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Say what is wrong with a line, but not with the file: that would end up in the same place."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class LogStream(_Quiet, logging.StreamHandler):
    """Lines on stderr."""


class LogFile(_Quiet, logging.FileHandler):
    """Lines at the end of a file."""

    def close(self) -> None:
        """Close; what the disk has no room for is lost."""
        with contextlib.suppress(OSError):
            super().close()


def setup_logging(service: str, path: str | Path | None = None, level: str = "info") -> None:
    """Send the root logger to stderr, or appending to `path`; replaces earlier handlers.

    Raises:
        ConfigError: the level is unknown or the file cannot be written.
    """
    if level.lower() not in _LEVELS:
        raise ConfigError(f"unknown log level {level!r}; choose one of {', '.join(_LEVELS)}")
    handler: logging.Handler
    if path is None:
        handler = LogStream(sys.stderr)
    else:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            handler = LogFile(path)
        except OSError as error:
            raise ConfigError(f"cannot write the log file {path}: {error.strerror}") from error
    handler.setFormatter(OneLineFormatter(_FORMAT.format(service=service.replace("%", "%%"))))
    root = logging.getLogger()
    # Libraries add handlers of their own as they are imported, and each would write every line once more.
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Their own chatter at these levels says nothing about a run.
    for noisy in ("matplotlib", "PIL", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def add_logging_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--log-file` and `--log-level`, the same for every service."""
    parser.add_argument("--log-file", metavar="PATH", help="append the log to this file instead of stderr")
    parser.add_argument(
        "--log-level", default="info", choices=_LEVELS, help="lowest level to log (default: info)"
    )


@contextlib.contextmanager
def warnings_shown(name: str) -> Iterator[None]:
    """For commands, which have no log: print what the logger `name` warns of, as `troupe: ...`, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(OneLineFormatter("troupe: %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Throttle:
    """Says, per key, whether a period has passed, so that a line that repeats is logged once a period.

    >>> throttle = Throttle(period_s=60)
    >>> throttle("bad message from actor-3"), throttle("bad message from actor-3")
    (True, False)
    """

    def __init__(self, period_s: float) -> None:
        """Create with no key seen."""
        self._period_s = period_s
        self._last: dict[object, float] = {}

    def __call__(self, key: object = None) -> bool:
        """Return True the first time, and again when the period is over."""
        now = system.monotonic()
        if now - self._last.get(key, -float("inf")) < self._period_s:
            return False
        if len(self._last) >= 10_000:  # keys may come from peers: bound what they can make us remember
            self._last.clear()
        self._last[key] = now
        return True
