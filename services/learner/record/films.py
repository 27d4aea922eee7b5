"""Writes films from a thread of its own: a slow disk, or a large film, must not keep the learner waiting."""

from __future__ import annotations

import logging
import queue

import numpy as np

from troupe.common import system
from troupe.common.runtime.metrics import MetricsWriter

_log = logging.getLogger(__name__)

_Film = tuple[str, np.ndarray, np.ndarray | None, int]
MAX_WAITING = 2
"""Films that may wait to be written; further ones are dropped, and counted."""


class FilmWriter:
    """Takes films from the learner's loop and hands them to the record of the run.

    Attributes:
        dropped: films that were not written, for those before were not written yet.
    """

    def __init__(self, writer: MetricsWriter) -> None:
        self.dropped = 0
        self._writer = writer
        # Bounded: a film is megabytes, and a disk that hangs would let them pile up.
        self._films: system.Queue[_Film | None] = system.Queue(MAX_WAITING)
        self._thread = system.Thread(target=self._run, name="films", daemon=True)
        self._thread.start()

    def put(self, source: str, video: np.ndarray, mp4: np.ndarray | None, steps: int) -> None:
        """Take over a film of the service `source`, made at `steps`, as GIF and as MP4; never waits."""
        try:
            self._films.put_nowait((source, video, mp4, steps))
        except queue.Full:
            self.dropped += 1
            _log.warning("dropped a video of %s: others wait to be written (%d so far)", source, self.dropped)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`, and end."""
        try:
            self._films.put(None, timeout=timeout_s)
        except queue.Full:
            pass
        else:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            _log.warning("the last videos were not written within %.0f s", timeout_s)

    def _run(self) -> None:
        while (film := self._films.get()) is not None:
            source, video, mp4, steps = film
            try:
                self._writer.add_video(source, "eval/video", video, mp4, steps=steps)
            except Exception:  # a film is never worth a run
                _log.exception("could not write a video of %s", source)
