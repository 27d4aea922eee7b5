"""A line for every training episode, `RUN/episodes.csv`: a short run has few rows of means and many games."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from troupe.common.runtime.files import EPISODES_FILE
from troupe.common.runtime.metrics import MetricsWriter, cut_half_line
from troupe.services.learner.control.reports import Report

_log = logging.getLogger(__name__)

EPISODES_HEADER = ("wall_s", "steps", "actor", "slot", "version", "return", "length")
MAX_BYTES = 1 << 28
"""Some five million games. Cheap environments end thousands a second, and an actor may claim as many."""

MAX_ACTORS = 4096
"""Actors whose last report is remembered."""


class EpisodesFile:
    """Appends the games that actors report, in the order of their arrival.

    An actor reports every few seconds, and not when each game ended: `wall_s` and `steps` of its games are
    spread evenly between its last report and this one. `version` is that of the actor's parameters,
    `return` is unclipped.
    """

    def __init__(self, run_dir: Path, writer: MetricsWriter, steps: int = 0) -> None:
        """Go on with the file of a run that has one.

        Args:
            run_dir: of the run.
            writer: says the time, and takes note of what fails.
            steps: of the run so far.
        """
        self._path = run_dir / EPISODES_FILE
        self._writer = writer
        self._full = False
        self._begin = writer.wall_s, steps
        self._reported: dict[str, tuple[float, int]] = {}  # when each actor reported last
        with writer.tolerant():
            cut_half_line(self._path)
            self._append([])

    def take(self, report: Report, *, steps: int, version: int) -> None:
        """Write the games of an actor's report; `version` is the newest of the run."""
        games = report.fields.episodes
        if report.role != "actor":
            return
        before_s, before = self._reported.pop(report.source, self._begin)
        now_s = self._writer.wall_s
        self._reported[report.source] = now_s, steps
        if len(self._reported) > MAX_ACTORS:
            del self._reported[next(iter(self._reported))]
        if not games or self._full:
            return
        # The report says how far behind its parameters were, not which they were.
        acted = version - int(max(0.0, report.metrics.get("params/staleness", 0.0)))
        rows = [
            (
                *(f"{before_s + share * (now_s - before_s):.3f}", round(before + share * (steps - before))),
                *(report.source, "" if game.slot is None else game.slot, acted),
                *(f"{game.episode_return:.9g}", game.steps),
            )
            for share, game in zip(np.arange(1, len(games) + 1) / len(games), games, strict=True)
        ]
        with self._writer.tolerant():
            self._append(rows)
            if self._path.stat().st_size > MAX_BYTES:
                self._full = True
                _log.warning("%s has reached its maximum size: no more episodes are added", self._path)

    def _append(self, rows: Sequence[Sequence[object]]) -> None:
        """Write `rows`; under the header, which a full disk or a kill may have kept from an empty file."""
        text = io.StringIO()
        try:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                head = [] if file.tell() else [EPISODES_HEADER]
                csv.writer(text, lineterminator="\n").writerows([*head, *rows])
                file.write(text.getvalue())
        except OSError:
            cut_half_line(self._path)  # of a row for which the disk had no room
            raise
