"""The record of a run for TensorBoard: one event file, and another after each failed write."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from troupe.common import system

_BARS, _MAX_BARS = 30, 256
"""Of a histogram of real numbers, and of one that has a bar for each whole number."""


class EventFile:
    """One TensorBoard event file, for any thread: tensorboardX's `EventsWriter`.

    Its `SummaryWriter` puts a process queue and a thread before the same writer, which can block the caller
    and delay its exit; its `add_video` needs moviepy. While one thread adds a check sum to a film the others
    wait: with the package crc32c that is 1 ms a MiB, without it 0.3 s.
    """

    _FLUSH_PERIOD_S = 5.0

    def __init__(self, directory: Path, resumed_steps: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary, self._writer = Event, Summary, EventsWriter
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._renewing = threading.Lock()
        self._file = self._open()
        self._failed = False
        self._flushed_at = system.monotonic()
        if resumed_steps is not None:
            start = Event(wall_time=system.time(), step=resumed_steps)
            # TensorBoard then hides what an earlier session wrote at this step or later.
            start.session_log.status = SessionLog.SessionStatus.START
            self._file.write_event(start)

    def _open(self) -> Any:
        # The suffix keeps a quick restart, within the second, from writing over what was there.
        suffix = f".{system.pid()}.{int(system.time() * 1e9) % 10**9:09d}"
        return self._writer(str(self._directory / "events"), suffix)

    def _renew(self) -> None:
        """After a failed write go on in another file: TensorBoard reads none beyond half an event."""
        with self._renewing:
            if self._failed:
                file = self._open()
                try:
                    file.flush()
                except OSError:
                    _discard(file)
                    Path(file._file_name).unlink(missing_ok=True)
                    raise
                _discard(self._file)
                self._file, self._failed = file, False

    def scalar(self, tag: str, value: float, step: int, ago_s: float) -> None:
        """Add a value that was measured `ago_s` ago."""
        self._add(self._summary(value=[self._summary.Value(tag=tag, simple_value=value)]), step, ago_s)

    def image(self, tag: str, encoded: bytes, height: int, width: int, step: int) -> None:
        """Add a picture or a film, encoded."""
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        self._add(self._summary(value=[self._summary.Value(tag=tag, image=image)]), step)

    def text(self, tag: str, text: str) -> None:
        """Add a text in Markdown."""
        from tensorboardX.summary import text as text_summary

        self._add(text_summary(tag, text), 0)

    def histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        """Add how finite values are distributed."""
        from tensorboardX.summary import histogram

        with np.errstate(over="ignore"):  # the sum of squares may be infinite
            self._add(histogram(tag, values, _bin_edges(values)), step)

    def _add(self, summary: Any, step: int, ago_s: float = 0.0) -> None:
        if self._failed:
            self._renew()
        try:
            self._file.write_event(self._event(wall_time=system.time() - ago_s, step=step, summary=summary))
        except OSError:
            self._failed = True
            raise
        if system.monotonic() - self._flushed_at > self._FLUSH_PERIOD_S:
            self.flush()

    def flush(self) -> None:
        """Make TensorBoard see what was added."""
        try:
            self._file.flush()
        except OSError:
            self._failed = True
            raise
        self._flushed_at = system.monotonic()

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self._file.close()
        except OSError:
            _discard(self._file)
            raise


def _discard(file: Any) -> None:
    """Close a file whose last bytes cannot be written; its own `close` would stop at them."""
    with suppress(OSError):
        file._py_recordio_writer.close()


def _bin_edges(values: np.ndarray) -> np.ndarray:
    """Edges of a histogram of finite values: a bar for each whole number, else `_BARS` of one width.

    numpy makes edges by itself only where they differ after rounding. Values that differ in the last digit,
    as sums of the same rewards in another order do, and equal ones of 1e16, get one bar around them.
    """
    low, high = values.min(), values.max()
    if values.dtype.kind in "iub" and int(high) - int(low) < _MAX_BARS:
        return np.arange(int(low), int(high) + 2) - 0.5
    low, high = float(low), float(high)
    size = max(abs(low), abs(high))
    if high / 2 - low / 2 <= 1e-9 * size:
        margin = max(0.5, 1e-3 * size)
        return np.array([low - margin, high + margin])
    return 2 * np.linspace(low / 2, high / 2, _BARS + 1)  # the width itself may be infinite
