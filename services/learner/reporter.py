"""Collects what every service measured and writes it: CSV, TensorBoard, the status file for the panel."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

from common.runtime import health
from common.runtime.files import write_status
from common.runtime.metrics import MetricsWriter
from common.stats import human_normalized
from common.wire.codec import WireError
from common.wire.control import ControlServer, Telemetry
from services.learner.counters import RunCounters

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
RATE_WINDOW_S = 30.0
MOST_STEPS = 2**53
"""Counters above this cannot be told apart as floats."""
OWNERS = {"actor/": "actor", "train/": "actor", "eval/": "evaluator"}
"""Who may report names with these beginnings: they move the run's counters and its end."""
SHARDED = ("replay/items", "replay/bytes", "replay/inserts_per_s", "replay/samples_per_s")
"""What the status shows as a sum over replay shards."""
IMMEDIATE = ("eval/",)
"""Metrics that are written when they arrive; others once per `run.log_every_s`, with their newest value."""


class Reporter:
    """The run's record. Called from the learner's loop; does something only a few times a second."""

    def __init__(
        self,
        run_dir: Path,
        env_id: str,
        total_steps: int,
        log_every_s: float,
        counters: RunCounters,
        resumed_steps: int | None,
    ) -> None:
        self.writer = MetricsWriter(run_dir, resumed_steps=resumed_steps)
        self._run_dir = run_dir
        self._env_id = env_id
        self._total_steps = total_steps
        self._log_every_s = log_every_s
        self._counters = counters
        self._newest: dict[str, dict[str, float]] = defaultdict(dict)
        self._of_shards: dict[str, dict[str, float]] = defaultdict(dict)
        self._episodes: list[tuple[float, float]] = []
        self._history: deque[tuple[float, int, int, float]] = deque()
        self._next_rows = time.monotonic() + log_every_s
        self._next_status = 0.0
        self.evaluated_version = -1

    def note(self, source: str, metrics: dict[str, float]) -> None:
        """Keeps values until the next row is due."""
        self._newest[source].update(metrics)
        for name, value in metrics.items():
            if name.startswith(SHARDED):
                self._of_shards[name][source] = value

    def collect(self, telemetry: Telemetry) -> None:
        """Takes in one message of a service; `WireError` where it says what its sender cannot know."""
        metrics, episodes = _checked(telemetry)
        steps = metrics.pop("actor/steps", None)
        if steps is not None:
            self._counters.report_steps(telemetry.incarnation, int(steps))
        self._episodes += episodes
        immediate = {k: v for k, v in metrics.items() if k.startswith(IMMEDIATE)}
        if immediate:
            self._write(telemetry.source, immediate)
            self.evaluated_version = max(self.evaluated_version, int(immediate.get("eval/version", -1)))
            log.info(
                "evaluation of version %d: return %.2f",
                immediate.get("eval/version", -1),
                immediate.get("eval/episode_return", float("nan")),
            )
        self.note(telemetry.source, {k: v for k, v in metrics.items() if k not in immediate})
        video = telemetry.blobs.get("video")
        if video is not None:
            self.writer.add_video(telemetry.source, "eval/video", video, steps=self._counters.steps)

    def tick(self, control: ControlServer, waited_s: float, note: str = "", force: bool = False) -> None:
        """Writes what is due. `waited_s` is how long the learner has waited for batches in all."""
        now = time.monotonic()
        if force or now >= self._next_status:
            self._next_status = now + STATUS_PERIOD_S
            self._measure_rates(now, waited_s)
            self._write_status(control, note)
        if force or now >= self._next_rows:
            self._next_rows = now + self._log_every_s
            self._write_rows()

    def close(self) -> None:
        """Writes the rest and closes the files."""
        self._write_rows()
        self.writer.close()

    def _measure_rates(self, now: float, waited_s: float) -> None:
        counters = self._counters
        self._history.append((now, counters.steps, counters.updates, waited_s))
        while now - self._history[0][0] > RATE_WINDOW_S:
            self._history.popleft()
        then, steps, updates, waited = self._history[0]
        if now > then:
            span = now - then
            rates = {
                "speed/steps_per_s": (counters.steps - steps) / span,
                "speed/frames_per_s": (counters.steps - steps) / span * counters.frames_per_step,
                "speed/updates_per_s": (counters.updates - updates) / span,
                "learner/wait_share": min(1.0, (waited_s - waited) / span),
                "params/version": float(counters.version),
            }
            self.note("learner", rates)

    def _write_rows(self) -> None:
        if self._episodes:
            count = len(self._episodes)
            score = sum(e[0] for e in self._episodes) / count
            row = {
                "train/episode_return": score,
                "train/episode_length": sum(e[1] for e in self._episodes) / count,
                "train/episodes": float(count),
            }
            normalized = human_normalized(self._env_id, score)
            if normalized is not None:
                row["train/human_normalized"] = normalized
            self._write("actors", row)
            self._episodes.clear()
        for source, metrics in self._newest.items():
            self._write(source, metrics)
        self._newest.clear()
        self.writer.flush()

    def _write(self, source: str, metrics: dict[str, float]) -> None:
        counters = self._counters
        self.writer.add(
            source, metrics, steps=counters.steps, frames=counters.frames, updates=counters.updates
        )

    def _write_status(self, control: ControlServer, note: str) -> None:
        metrics = dict(self.writer.last)
        for newest in self._newest.values():
            metrics.update(newest)
        metrics.update({name: sum(values.values()) for name, values in self._of_shards.items()})
        counters = self._counters
        health.report({"run/steps_total": counters.steps, "run/updates_total": counters.updates})
        health.report(self._newest["learner"])
        status: dict[str, Any] = {
            "wall_s": self.writer.wall_s,
            "steps": counters.steps,
            "frames": counters.frames,
            "updates": counters.updates,
            "version": counters.version,
            "total_steps": self._total_steps,
            "note": note,
            "metrics": metrics,
            "peers": control.peers(),
        }
        try:
            write_status(self._run_dir, status)
        except OSError as error:
            log.warning("cannot write the status into %s: %s", self._run_dir, error)


def _checked(telemetry: Telemetry) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """Metrics and episodes (return, steps) of a message; `WireError` where they cannot be right."""
    for name, value in telemetry.metrics.items():
        for beginning, role in OWNERS.items():
            if name.startswith(beginning) and telemetry.role != role:
                raise WireError("bad_field", f"{name} comes from a {telemetry.role}, not from an {role}")
        if name in ("actor/steps", "eval/version") and not 0 <= value <= MOST_STEPS:
            raise WireError("bad_field", f"{name} is {value}")
    episodes = telemetry.fields.get("episodes", [])
    if episodes and telemetry.role != "actor":
        raise WireError("bad_field", f"episodes come from a {telemetry.role}, not from an actor")
    if not isinstance(episodes, list) or not all(_is_episode(episode) for episode in episodes):
        raise WireError("bad_field", "episodes is not a list of [return, steps]")
    return dict(telemetry.metrics), [(float(score), float(steps)) for score, steps in episodes]


def _is_episode(value: Any) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(isinstance(x, int | float) and math.isfinite(x) for x in value)
    )
