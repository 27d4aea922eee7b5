"""The record of a run: every service's metrics in one CSV file and one TensorBoard directory.

Only the learner writes it; the other services send their numbers to the learner. One writer per directory is
what TensorBoard needs to show everything.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from troupe.common import system
from troupe.common.errors import ConfigError
from troupe.common.runtime.events import EventFile
from troupe.common.runtime.files import check_regular
from troupe.common.runtime.gif import gif_size
from troupe.common.runtime.logging import Throttle

_log = logging.getLogger(__name__)

CSV_FILE = "metrics.csv"
EVALUATIONS_FILE = "evaluations.jsonl"
EVALUATION_RETURN, TRAINING_RETURN = "eval/episode_return", "train/episode_return"
EVALUATION_AGE = "eval/age_s"
"""How old the parameters were when their games were over. Runs without it date evaluations by that end."""
OF_SERVICES = frozenset(
    {
        *(
            f"{kind}/{what}"
            for kind in ("learner", "actor", "replay", "eval")
            for what in ("cpu_cores", "starved_cores", "memory_bytes", "memory_share")
        ),
        *("actor/steps_per_s", "actor/slots", "actor/env_ms", "actor/inference_ms", "actor/accumulate_ms"),
        *("actor/insert_blocked_share", "actor/pack_share", "actor/compression_ratio", "params/staleness"),
        *("replay/waits_for_items_share", "replay/waits_for_ratio_share", "replay/waits_for_reader_share"),
        *(
            "replay/insert_paused_share",
            "replay/evicted_early_per_s",
            "learner/batch_ms",
            "learner/link_bytes_per_s",
        ),
    }
)
"""Metrics that the status has of each service by itself: what tells which of them limits a run."""
LEAST_EXPLORING_RETURN = "train/least_exploring_return"
# TensorBoard sorts groups, capitals first: under these tags the returns stand above all other curves.
_FIRST_TAGS = {
    EVALUATION_RETURN: "Returns/evaluation",
    TRAINING_RETURN: "Returns/training",
    LEAST_EXPLORING_RETURN: "Returns/least_exploring",
}
_TAIL_BYTES = 1 << 16


class Row(NamedTuple):
    """One line of `metrics.csv`: a value, and where the run was when it was recorded.

    Evaluations (`eval/...`) say where it was when the parameters that were played had been published, so
    they stand below rows that are later than they are. Before `eval/age_s` was recorded with them they said
    when their games were over.

    Attributes:
        wall_s: seconds that the run had been running.
        steps: environment steps of the run.
        frames: emulator frames of the run.
        updates: learner updates of the run.
        source: name of the service that measured it.
        name: of the metric.
        value: of the metric.
    """

    wall_s: float
    steps: int
    frames: int
    updates: int
    source: str
    name: str
    value: float


CSV_HEADER = ",".join(Row._fields)


class MetricsWriter:
    """Appends metrics to `RUN/metrics.csv` (flushed line by line) and `RUN/tensorboard`.

    Opened on a run that has metrics already, it goes on: `wall_s` continues from the last row, so it counts
    the time that the run was running; in TensorBoard, older points at or after `resumed_steps` are hidden.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        resumed_steps: int | None = None,
        keep_videos: int = 20,
        track: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        """Open both files.

        Args:
            run_dir: the run directory.
            resumed_steps: the checkpoint's step count when a run is resumed.
            keep_videos: how many files of `RUN/videos` to leave, 0 for all.
            track: is given steps of the run and values by their names in TensorBoard, too.

        Raises:
            ConfigError: the directory cannot be written.
        """
        self._run_dir = Path(run_dir)
        self._keep_videos = keep_videos
        self._track = track
        self.last: dict[str, float] = {}
        self.failed_writes_total = 0
        self._throttle = Throttle(60.0)
        csv_path = self._run_dir / CSV_FILE
        try:
            wall_before_s = _repair_and_last_wall_s(csv_path)
            # Line by line: what was recorded before a kill is in the kernel's hands.
            self._csv = csv_path.open("a", buffering=1, encoding="utf-8", newline="\n")
            cut_half_line(self._run_dir / EVALUATIONS_FILE)
            if csv_path.stat().st_size == 0:
                self._csv.write(CSV_HEADER + "\n")
            self._events = EventFile(self._run_dir / "tensorboard", resumed_steps)
        except OSError as error:
            raise ConfigError(f"cannot write metrics into {run_dir}: {error.strerror or error}") from error
        self._started = system.monotonic() - wall_before_s

    @property
    def wall_s(self) -> float:
        """Seconds that this run has been running, over all resumptions."""
        return self._wall_s(0.0)

    def _wall_s(self, ago_s: float) -> float:
        return max(0.0, system.monotonic() - self._started - ago_s)

    def add(
        self,
        source: str,
        metrics: Mapping[str, float],
        *,
        steps: int,
        frames: int,
        updates: int,
        ago_s: float = 0.0,
    ) -> None:
        """Record values at the given counters.

        Args:
            source: name of the service that measured them, for example `actor-0`.
            metrics: values by name (`train/episode_return`).
            steps: environment steps of the run.
            frames: emulator frames of the run.
            updates: learner updates of the run.
            ago_s: how long ago the run was there.
        """
        if not metrics:
            return
        prefix = f"{self._wall_s(ago_s):.3f},{steps},{frames},{updates},{_csv_word(source)},"
        rows = []
        for name, value in metrics.items():
            number = float(value)
            self.last[name] = number
            rows.append(f"{prefix}{_csv_word(name)},{number:.9g}\n")
        with self.tolerant():
            self._csv.write("".join(rows))
        with self.tolerant():
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._events.scalar(tensorboard_tag(source, name), float(value), steps, ago_s)
                    if name in _FIRST_TAGS:
                        self._events.scalar(_FIRST_TAGS[name], float(value), steps, ago_s)
        if self._track is not None:
            with self.tolerant("pass metrics to the trackers of"):
                self._track(steps, {tensorboard_tag(source, name): value for name, value in metrics.items()})

    def add_evaluation(
        self,
        version: int,
        games: Sequence[Sequence[float]],
        *,
        steps: int,
        frames: int,
        updates: int,
        ago_s: float = 0.0,
        tasks: Sequence[str] = (),
        levels: int = 0,
    ) -> None:
        """Append the games of one evaluation to `RUN/evaluations.jsonl`, a JSON object a line.

        `age_s` is how old the parameters were when the games were over. Rows without it are of former
        versions of Troupe, and say when that was.

        Args:
            version: of the parameters that played.
            games: unclipped return and length in agent steps of each game.
            steps: environment steps of the run when that version was published.
            frames: emulator frames of the run then.
            updates: learner updates of the run then.
            ago_s: how long ago that was.
            tasks: which level of several each game was.
            levels: how many levels there are.
        """
        row: dict[str, Any] = {"wall_s": round(self._wall_s(ago_s), 3), "steps": steps, "frames": frames}
        row |= {"updates": updates, "version": version, "age_s": round(ago_s, 3)}
        row |= {"returns": [float(game[0]) for game in games]}
        row |= {"lengths": [int(game[1]) for game in games]}
        if tasks:
            row |= {"levels_played": len(set(tasks)), "levels": levels, "level_of_game": list(tasks)}
        path = self._run_dir / EVALUATIONS_FILE
        with self.tolerant():
            cut_half_line(path)  # of a row for which the disk had no room
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.add_histograms({"eval/returns": np.asarray(row["returns"])}, steps=steps)

    def add_histograms(self, values: Mapping[str, np.ndarray], *, steps: int) -> None:
        """Show how finite values of any shape are distributed, in TensorBoard; whole numbers one by one."""
        with self.tolerant():
            for name, array in values.items():
                finite = array[np.isfinite(array)]
                if finite.size:
                    self._events.histogram(name, finite, steps)

    @contextmanager
    def tolerant(self, what: str = "write metrics into") -> Iterator[None]:
        """Log and count what fails, whatever it is: a record never ends the training that it describes.

        A full disk is one cause. The libraries behind TensorBoard are another: they raise what they like for
        values that they have not met. The log says `cannot WHAT RUN_DIR: cause`.
        """
        try:
            yield
        except Exception as error:
            self.failed_writes_total += 1
            if self._throttle(what):
                if isinstance(error, OSError):
                    why, trace = str(error.strerror or error), None
                else:
                    why, trace = f"{type(error).__name__}: {error}", error
                _log.error(
                    "cannot %s %s: %s (%d failed writes so far)",
                    what,
                    self._run_dir,
                    why,
                    self.failed_writes_total,
                    exc_info=trace,
                )

    def add_video(
        self, source: str, name: str, video: np.ndarray | bytes, mp4: np.ndarray | None = None, *, steps: int
    ) -> Path | None:
        """Show a short film in TensorBoard and write it to `RUN/videos`. May be called from any thread.

        Args:
            source: name of the service that made it.
            name: tag, for example `eval/video`.
            video: an encoded GIF, bytes or uint8 `[N]`.
            mp4: the same film, uint8 `[N]`, to be written instead of the GIF, which TensorBoard shows.
            steps: environment steps of the run.

        Returns:
            The file, or None if the data is not a film (logged, never an error: it came from a peer).
        """
        try:
            gif, height, width = gif_size(video)
        except ValueError as error:
            _log.warning("ignored a video from %s: %s", source, error)
            return None
        directory = self._run_dir / "videos"
        kind, film = ("gif", gif) if mp4 is None else ("mp4", mp4.tobytes())
        path = directory / f"{_csv_word(name).replace('/', '-')}-{steps:012d}.{kind}"
        with self.tolerant():
            self._events.image(tensorboard_tag(source, name), gif, height, width, steps)
        with self.tolerant("write a video into"):
            directory.mkdir(exist_ok=True)
            try:
                path.write_bytes(film)
            except OSError:
                path.unlink(missing_ok=True)  # half a film takes room and cannot be played
                raise
            films = [path for kind in ("gif", "mp4") for path in directory.glob(f"*.{kind}")]
            # By time, since a resumed run may film at fewer steps than the files that are there.
            films.sort(key=lambda film: film.stat().st_mtime)
            for old in films[: -self._keep_videos] if self._keep_videos else []:
                old.unlink(missing_ok=True)
            return path
        return None

    def add_text(self, name: str, text: str) -> None:
        """Show a text, such as the configuration, in TensorBoard."""
        with self.tolerant():
            self._events.text(name, text)

    def flush(self) -> None:
        """Make TensorBoard see what was added (CSV rows are visible at once)."""
        with self.tolerant():
            self._events.flush()

    def close(self) -> None:
        """Flush and close both files."""
        with self.tolerant():
            self._csv.close()
        with self.tolerant():
            self._events.close()


class ClosedRecord(MetricsWriter):
    """The record of a run that is complete: it has its time and takes nothing more."""

    def __init__(self, run_dir: str | Path) -> None:
        """Read how long the run has run."""
        self._run_dir = Path(run_dir)
        self.last: dict[str, float] = {}
        self.failed_writes_total = 0
        self._throttle = Throttle(60.0)
        self._started = system.monotonic() - _repair_and_last_wall_s(self._run_dir / CSV_FILE)

    def add(self, source: str, metrics: Mapping[str, float], **moment: Any) -> None:
        """Nothing, as with all methods below."""

    def add_evaluation(self, version: int, games: Sequence[Sequence[float]], **moment: Any) -> None:
        """See `add`."""

    def add_histograms(self, values: Mapping[str, np.ndarray], *, steps: int) -> None:
        """See `add`."""

    def add_video(
        self, source: str, name: str, video: np.ndarray | bytes, mp4: np.ndarray | None = None, *, steps: int
    ) -> Path | None:
        """See `add`."""
        return None

    def add_text(self, name: str, text: str) -> None:
        """See `add`."""

    def flush(self) -> None:
        """See `add`."""

    def close(self) -> None:
        """See `add`."""


def tensorboard_tag(source: str, name: str) -> str:
    """Name a curve: services of one kind share `train/...`, but each has its own `actor/...` or `replay/...`.

    >>> tensorboard_tag("actor-1", "train/episode_return"), tensorboard_tag("actor-1", "actor/env_ms")
    ('train/episode_return', 'actor/env_ms/actor-1')

    The first of a kind keeps the plain name, so that a run with one actor shows plain names only.
    """
    kind, _, index = source.rpartition("-")
    own = kind and index.isdecimal() and index != "0" and name.startswith(f"{kind}/")
    return f"{name}/{source}" if own else name


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a `metrics.csv` whose values are finite, in the order in which they were written.

    A damaged row is passed over, whatever is wrong with it: other columns, a number that is none, bytes that
    are no text. A kill or a full disk leaves such rows behind; those around them are as good as before.
    """
    with check_regular(path).open(encoding="utf-8", errors="replace") as file:
        yield from rows_of(file)


def rows_of(lines: Iterable[str]) -> Iterator[Row]:
    """The rows in lines of a `metrics.csv`, as `read_rows` gives them."""
    for line in lines:
        if (row := row_of(line)) is not None:
            yield row


def row_of(line: str) -> Row | None:
    """The row in a line of a `metrics.csv`; None of a damaged one, or of the header."""
    try:
        wall_s, steps, frames, updates, source, name, value = line.rstrip("\n").split(",")
        row = Row(float(wall_s), int(steps), int(frames), int(updates), source, name, float(value))
    except ValueError:
        return None
    return row if math.isfinite(row.value) and math.isfinite(row.wall_s) and row.steps >= 0 else None


def _csv_word(text: str) -> str:
    """Keep a name from breaking the table: it may come from a peer."""
    return re.sub(r"[^\w./:+-]", "_", text)


def _repair_and_last_wall_s(path: Path) -> float:
    """Cut a half-written last line (the learner was killed meanwhile); return the last row's wall_s."""
    last_s = 0.0
    for line in cut_half_line(path).decode("utf-8", "replace").splitlines():
        with suppress(ValueError):
            wall_s = float(line.split(",", 1)[0])
            if math.isfinite(wall_s):
                last_s = max(last_s, wall_s)  # evaluations stand below rows that are later
    return last_s


def cut_half_line(path: Path) -> bytes:
    """Cut the last line where it was only half written; the file's last lines, empty without a file."""
    if not path.exists():
        return b""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:  # a power cut may leave a long end of zeros
            start = file.seek(max(0, end - _TAIL_BYTES))
            whole = file.read(end - start).rfind(b"\n") + 1
            if whole:
                end = start + whole
                break
            end = start
        file.truncate(end)
        start = file.seek(max(0, end - _TAIL_BYTES))
        return file.read()
