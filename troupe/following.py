"""What a run records, told to functions of the program while it is written."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from troupe.common.runtime.checkpoint import newest_first, steps_of
from troupe.common.runtime.metrics import CSV_FILE, EVALUATION_RETURN, Row, rows_of


@dataclass(frozen=True)
class Metrics:
    """What one service measured at one time.

    Attributes:
        steps: environment steps of the run by then; of an evaluation, when its parameters were published.
        frames: emulator frames of the run by then.
        updates: learner updates of the run by then.
        wall_s: seconds that the run had been running.
        source: name of the service, such as `learner`, `actor-0`, `evaluator`.
        values: by the names in docs/metrics.md, such as `eval/episode_return`.
    """

    steps: int
    frames: int
    updates: int
    wall_s: float
    source: str
    values: Mapping[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        """Return the value of a metric."""
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        """Return whether the service measured it this time."""
        return name in self.values

    def get(self, name: str, default: float | None = None) -> float | None:
        """Return the value of a metric, or `default` where this service has not measured it this time."""
        return self.values.get(name, default)


OnMetrics = Callable[[Metrics], Any]
OnCheckpoint = Callable[[Path], Any]


class Follower:
    """Calls functions with what is new in a run directory; one that returns False asks for the run's end.

    Args:
        run_dir: of the run, which need not be there yet.
        on_evaluation: gets the metrics of each evaluation.
        on_checkpoint: gets the directory of each new checkpoint.
        on_metrics: gets all metrics, evaluations as well.
    """

    def __init__(
        self,
        run_dir: Path,
        on_evaluation: OnMetrics | None = None,
        on_checkpoint: OnCheckpoint | None = None,
        on_metrics: OnMetrics | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._on_evaluation, self._on_checkpoint, self._on_metrics = on_evaluation, on_checkpoint, on_metrics
        self._read_bytes = 0
        self._seen: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is anyone to call."""
        return any((self._on_evaluation, self._on_checkpoint, self._on_metrics))

    def look(self) -> bool:
        """Tell what is new; returns whether the run should go on. What a function raises, this raises."""
        wanted = True
        if self._on_metrics or self._on_evaluation:
            for metrics in self._new_metrics():
                if self._on_metrics:
                    wanted &= self._on_metrics(metrics) is not False
                if self._on_evaluation and EVALUATION_RETURN in metrics.values:
                    wanted &= self._on_evaluation(metrics) is not False
        if self._on_checkpoint:
            for path in self._new_checkpoints():
                wanted &= self._on_checkpoint(path) is not False
        return wanted

    def _new_metrics(self) -> Iterator[Metrics]:
        data = b""
        with contextlib.suppress(FileNotFoundError), (self._run_dir / CSV_FILE).open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]  # the last line may be half written
        self._read_bytes += len(data)

        def when(row: Row) -> tuple[Any, ...]:
            return row.steps, row.frames, row.updates, row.wall_s, row.source

        for key, rows in itertools.groupby(rows_of(data.decode("utf-8", "replace").splitlines()), when):
            steps, frames, updates, wall_s, source = key
            yield Metrics(steps, frames, updates, wall_s, source, {row.name: row.value for row in rows})

    def _new_checkpoints(self) -> list[Path]:
        found = [path for path in newest_first(self._run_dir / "checkpoints") if path.name not in self._seen]
        self._seen |= {path.name for path in found}
        return sorted(found, key=steps_of)
