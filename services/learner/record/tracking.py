"""The learner's end of trackers: rows go to a process each, and whatever happens there, training goes on."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from troupe.common.installation import check_trackers
from troupe.common.runtime import Deadline
from troupe.common.runtime.logging import peer_text
from troupe.services.learner.record.trackers import END_S, Run

_log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Rows that wait for one tracker; further ones are dropped, and counted."""


class Trackers:
    """All trackers of a run. Nothing here waits but `close`, and that not for long.

    Args:
        names: of `trackers.TRACKERS`.
        run: what they are told of it.

    Raises:
        ConfigError: one is not installed.
    """

    def __init__(self, names: Sequence[str], run: Run) -> None:
        check_trackers(names)
        self._each = [_TrackerProcess(name, run) for name in dict.fromkeys(names)]

    def add(self, steps: int, values: Mapping[str, float]) -> None:
        """Pass on what was measured at this step count of the run; what is not finite is left out."""
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        if finite:
            for each in self._each:
                each.put({"steps": steps, "values": finite})

    def close(self, summary: Mapping[str, float], *, complete: bool, timeout_s: float = END_S) -> None:
        """Send the last values and end all trackers within `timeout_s`."""
        deadline = Deadline(timeout_s)
        for each in self._each:
            each.put_last({"summary": dict(summary), "complete": complete})
            each.put_last(None)
        for each in self._each:
            each.close(deadline)
        self._each.clear()


def _command(name: str) -> list[str]:
    return [sys.executable, "-P", "-m", "troupe.services.learner.record.trackers", name]


class _TrackerProcess:
    """One tracker: a queue, a thread that writes it into a pipe, a thread that logs what comes back."""

    def __init__(self, name: str, run: Run) -> None:
        self._name = name
        self._dropped = 0
        self._closing = False
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._process = subprocess.Popen(
            _command(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Libraries write there what they like, keys included.
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            errors="replace",
            # Signals to the learner's group are not for it: it ends when its input does.
            start_new_session=True,
        )
        # First in the queue: it is the line that `serve` begins with.
        self._rows.put(asdict(run))
        threads = {"feed": self._feed, "listen": self._listen}
        self._threads = [
            threading.Thread(target=work, name=f"{name}-{what}", daemon=True)
            for what, work in threads.items()
        ]
        for thread in self._threads:
            thread.start()

    def put(self, row: dict[str, Any]) -> None:
        """Hand over a row; never waits."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                _log.warning("%s does not keep up: what does not fit is in metrics.csv only", self._name)

    def put_last(self, row: dict[str, Any] | None) -> None:
        """Hand over what must not be missing, None for the end, in the place of older rows."""
        while True:
            try:
                return self._rows.put_nowait(row)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._rows.get_nowait()
                    self._dropped += 1

    def close(self, deadline: Deadline) -> None:
        """Wait until the tracker has ended, or end it."""
        self._closing = True
        try:
            self._process.wait(deadline.remaining_s)
        except subprocess.TimeoutExpired:
            _log.warning("%s did not stop within %.0f s and was killed", self._name, deadline.elapsed_s)
            with contextlib.suppress(ProcessLookupError):  # it has ended in this moment
                os.killpg(self._process.pid, signal.SIGKILL)  # with what it has started itself
            self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        if self._dropped:
            _log.warning("%s did not get %d rows", self._name, self._dropped)

    def _feed(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        while (row := self._rows.get()) is not None:
            try:
                stdin.write(json.dumps(row) + "\n")
                stdin.flush()
            except (OSError, ValueError):  # it has ended: `_listen` says so
                break
        with contextlib.suppress(OSError):
            stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                _log.warning("%s %s", self._name, peer_text(line.rstrip("\n")))
        if self._process.wait() and not self._closing:
            _log.warning("%s has exited: training continues without it", self._name)
