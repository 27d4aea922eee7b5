"""Collects what every service measured and writes it: CSV, TensorBoard, the status file for the panel."""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from msgspec import UNSET

from troupe.common import system
from troupe.common.runtime import health
from troupe.common.runtime.files import write_status
from troupe.common.runtime.metrics import (
    CSV_FILE,
    EVALUATION_AGE,
    EVALUATION_RETURN,
    OF_SERVICES,
    TRAINING_RETURN,
    ClosedRecord,
    MetricsWriter,
    read_rows,
)
from troupe.common.runtime.usage import OwnUsage
from troupe.common.stats.played import LEVELS, LEVELS_PLAYED, levels_missed
from troupe.common.wire.control.params import Published
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.control.reports import Report
from troupe.services.learner.control.server import ControlServer
from troupe.services.learner.record.actor_returns import ActorReturns, Explores
from troupe.services.learner.record.curve import Curve
from troupe.services.learner.record.episodes import EpisodesFile
from troupe.services.learner.record.films import FilmWriter
from troupe.services.learner.record.gathered import Evaluation, Gathered
from troupe.services.learner.record.links import Links
from troupe.services.learner.record.ratings import Ratings
from troupe.services.learner.record.restarts import Restarts
from troupe.services.learner.record.totals import StoredSteps, Troubles
from troupe.services.learner.record.tracking import Trackers
from troupe.services.learner.record.training_returns import TrainingReturns
from troupe.services.learner.saving.counters import RunCounters
from troupe.services.learner.saving.kept import Best

_log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
RATE_WINDOW_S = 30.0
SHARDED = (
    *("replay/items", "replay/restored_items", "replay/bytes"),
    *("replay/inserts_per_s", "replay/samples_per_s"),
)
"""What the status shows as a sum over replay shards."""
RATINGS_S = 30.0
"""How long the end of a run waits for the rated versions to be on the disk."""
MAX_SERVICES = 256
"""Services of which the status has values one by one: those that have reported last."""
MAX_RECORDED = 64
"""Actors with curves of their own in the record: the first by number of those that report."""
MAX_SHARDS = 1000
"""Shards that are in it: those that have reported last."""
LAST_EVALUATION = (EVALUATION_RETURN, "eval/human_normalized", LEVELS_PLAYED, LEVELS, "eval/version")
"""What a resumed run shows of the last evaluation before it, until there is a new one."""


class Moment(TypedDict):
    """What a row of the record is dated by, see `MetricsWriter.add`."""

    steps: int
    frames: int
    updates: int
    ago_s: float


class Reporter:
    """The run's record. Called from the learner's loop; does something only a few times a second.

    Attributes:
        evaluated_version: the newest version that was evaluated.
    """

    def __init__(
        self,
        run_dir: Path,
        env_id: str,
        total_steps: int,
        log_every_s: float,
        counters: RunCounters,
        resumed_steps: int | None,
        trackers: Trackers | None = None,
        explores: Explores | None = None,
        *,
        gathered: Gathered,
        tasks: Sequence[str] = (),
        ratings: Ratings | None = None,
        best: Best | None = None,
    ) -> None:
        self._trackers = trackers
        self._ratings, self._best = ratings, best
        self._gathered = gathered
        self._actor_returns = ActorReturns(explores)
        self._leases: dict[int, set[int]] = {}
        track = None if trackers is None else trackers.add
        self._closed = resumed_steps is not None and resumed_steps >= total_steps  # complete before
        self.writer: MetricsWriter = (
            ClosedRecord(run_dir)
            if self._closed
            else MetricsWriter(run_dir, resumed_steps=resumed_steps, track=track)
        )
        self.films = FilmWriter(self.writer)
        self._games = EpisodesFile(run_dir, self.writer, counters.steps)
        self._run_dir = run_dir
        self._training = TrainingReturns(env_id, tasks)
        self._total_steps = total_steps
        self._log_every_s = log_every_s
        self._counters = counters
        self._newest: dict[str, dict[str, float]] = defaultdict(dict)
        self._of_shards: dict[str, dict[str, float]] = defaultdict(dict)
        self._services: dict[str, dict[str, float]] = {}
        self._usage = OwnUsage("learner")
        self._links = Links()
        self._troubles = Troubles()
        self._restarts = Restarts(run_dir, is_resumed=resumed_steps is not None)
        self._stored = StoredSteps(counters.steps)
        self._first_updates = counters.updates
        self._returns = {EVALUATION_RETURN: Curve(), TRAINING_RETURN: Curve()}
        if resumed_steps is not None:
            for row in read_rows(run_dir / CSV_FILE):
                # The session before had gone beyond its last checkpoint; those steps are made again.
                if row.steps > resumed_steps:
                    continue
                if row.name in self._returns:
                    self._returns[row.name].add(row.steps, row.value)
                if row.name in LAST_EVALUATION:
                    self.writer.last[row.name] = row.value
        self._history: deque[tuple[float, int, int, float]] = deque()
        self._next_rows = system.monotonic() + log_every_s
        self._next_status = 0.0
        self.evaluated_version = -1

    def note(self, source: str, metrics: dict[str, float]) -> None:
        """Keep values until the next row is due."""
        self._newest[source].update(metrics)
        if limits := {name: value for name, value in metrics.items() if name in OF_SERVICES}:
            self._services[source] = self._services.pop(source, {}) | limits
            if len(self._services) > MAX_SERVICES:
                del self._services[next(iter(self._services))]
        for name, value in metrics.items():
            if name in SHARDED:
                values = self._of_shards[name]
                # Out and in again, so that the first entry is the shard not heard for longest.
                values.pop(source, None)
                values[source] = value
                if len(values) > MAX_SHARDS:
                    del values[next(iter(values))]

    def collect(self, report: Report) -> None:
        """Take in one report of a service."""
        if self._closed:  # an evaluator that comes late would play, and keep, another evaluation
            return
        if report.fields.part is not UNSET:
            complete = self._counters.steps >= self._total_steps
            self._take_evaluations(self._gathered.add(report, report.fields.part, complete=complete))
            return
        if report.role != "evaluator":
            self._training.take(report.fields)
        self._actor_returns.take(report)
        self._games.take(report, steps=self._counters.steps, version=self._counters.version)
        self._troubles.take(report)
        self._stored.take(report, self._counters.steps)
        self.note(report.source, report.metrics)
        video = report.blobs.get("video")
        if video is not None:
            self.films.put(
                report.source, video, report.blobs.get("mp4"), self._moment(report.played)["steps"]
            )

    def is_evaluated(self, version: int) -> bool:
        """Whether nothing more comes of the evaluation of a version: it is here, or it cannot be played."""
        return max(self.evaluated_version, self._gathered.given_up) >= version

    def end_evaluation(self) -> None:
        """Take in what has come of an evaluation, if there will be no more of it."""
        self._take_evaluations(self._gathered.end())

    def _take_evaluations(self, evaluations: list[Evaluation]) -> None:
        for evaluation in evaluations:
            self._evaluated(evaluation)

    def _evaluated(self, evaluation: Evaluation) -> None:
        """Write an evaluation at once, dated by when its version was published."""
        version, metrics, games = evaluation.version, evaluation.metrics, evaluation.games
        played = evaluation.played
        if self._ratings is not None and played is not None:
            metrics = metrics | self._ratings.evaluated(played, metrics)
        moment = self._moment(played)
        age = {} if played is None else {EVALUATION_AGE: moment["ago_s"]}
        self._write("evaluator", metrics | age, moment)
        self.evaluated_version = max(self.evaluated_version, version)
        # Of few games it may be luck.
        if self._best is not None and played is not None and len(games) >= self._gathered.episodes:
            self._best.evaluated(played, metrics[EVALUATION_RETURN])
        pairs = [(game.episode_return, game.steps) for game in games]
        levels = int(metrics.get(LEVELS, 0))
        self.writer.add_evaluation(version, pairs, **moment, tasks=evaluation.tasks, levels=levels)
        missed = levels_missed(metrics)
        _log.info(
            "evaluation of version %d: return %.2f%s",
            version,
            metrics[EVALUATION_RETURN],
            missed and f", {missed}",
        )

    def look(self, values: Mapping[str, np.ndarray], metrics: dict[str, float]) -> None:
        """Show histograms of values in TensorBoard, and write metrics, at once."""
        self.writer.add_histograms(values, steps=self._counters.steps)
        self._write("learner", metrics)

    def note_links(self, control: ControlServer, prefetch: Prefetcher) -> None:
        """Keep what batches took on their way from each shard, if that is to be measured anew."""
        if self._links.due():
            names = {peer["endpoint"]: peer["name"] for peer in control.peers() if peer["endpoint"]}
            for source, metrics in self._links.metrics(prefetch, names).items():
                self.note(source, metrics)

    def tick(
        self,
        control: ControlServer,
        waited_s: float,
        note: str = "",
        *,
        force: bool = False,
        ended: bool = False,
    ) -> None:
        """Write what is due.

        Args:
            control: knows who is in the run.
            waited_s: how long the learner has waited for batches in all.
            note: what it does now, where that is not to train.
            force: write everything, due or not.
            ended: the learner ends in order: one that goes on later is no restart.
        """
        now = system.monotonic()
        status_due, rows_due = force or now >= self._next_status, force or now >= self._next_rows
        if status_due:
            self._next_status = now + STATUS_PERIOD_S
            self._take_evaluations(self._gathered.expired())
            self._measure_rates(now, waited_s)
            if not force:
                self._write_status(control, note, ended=False)
        if rows_due:
            self._next_rows = now + self._log_every_s
            self._leases = control.leases()
            self._write_rows()
        if force:  # the last status of a run has what is in its last rows
            self._write_status(control, note, ended=ended)

    def close(self) -> None:
        """Write the rest and close the files."""
        self._write_rows()
        if self._ratings is not None:
            self._ratings.wait(RATINGS_S)
        self.films.close()
        self.writer.close()
        if self._trackers is not None:
            complete = self._counters.steps >= self._total_steps
            with self.writer.tolerant("end the trackers of"):
                self._trackers.close(self._summary(), complete=complete)

    def _summary(self) -> dict[str, float]:
        """How far the run has come, and its newest returns."""
        returns = {"final/evaluation_return": EVALUATION_RETURN, "final/training_return": TRAINING_RETURN}
        last = self.writer.last
        summary = {"final/steps": float(self._counters.steps), "final/updates": float(self._counters.updates)}
        summary |= {name: last[metric] for name, metric in returns.items() if metric in last}
        return summary | {"final/wall_s": self.writer.wall_s}

    def _measure_rates(self, now: float, waited_s: float) -> None:
        counters = self._counters
        # Rates over a window: over the whole run they would hide that training has come to a halt.
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
            if self.writer.failed_writes_total:
                rates["learner/failed_writes_total"] = float(self.writer.failed_writes_total)
            self.note("learner", rates | self._usage.metrics())

    def _write_rows(self) -> None:
        if row := self._training.row():
            self._write("actors", row)
        for source, row in self._actor_returns.rows(self._leases).items():
            self._write(source, row)
        actors = [source for source, metrics in self._newest.items() if any(map(_is_of_actor, metrics))]
        left_out = set(sorted(actors, key=lambda source: (len(source), source))[MAX_RECORDED:])
        for source, metrics in self._newest.items():
            if source in left_out:
                metrics = {name: value for name, value in metrics.items() if not _is_of_actor(name)}
            self._write(source, metrics)
        self._newest.clear()
        self.writer.flush()

    def _write(self, source: str, metrics: dict[str, float], moment: Moment | None = None) -> None:
        moment = moment or self._moment()
        self.writer.add(source, metrics, **moment)
        for name in self._returns.keys() & metrics.keys():
            if math.isfinite(metrics[name]):
                self._returns[name].add(moment["steps"], metrics[name])

    def _moment(self, played: Published | None = None) -> Moment:
        """Where the run is; or where it was when these parameters were published, which tell of no later."""
        counters = self._counters
        if played is None:
            return {
                "steps": counters.steps,
                "frames": counters.frames,
                "updates": counters.updates,
                "ago_s": 0.0,
            }
        frames = played.steps * counters.frames_per_step
        ago_s = system.monotonic() - played.at_s
        return {"steps": played.steps, "frames": frames, "updates": played.updates, "ago_s": ago_s}

    def _write_status(self, control: ControlServer, note: str, *, ended: bool) -> None:
        with self.writer.tolerant("write the status into"):
            status = self._status(control, note) | {"ended": ended}
            control.tell(status)
            write_status(self._run_dir, status)

    def _status(self, control: ControlServer, note: str) -> dict[str, Any]:
        # What was written last, under it what has been measured since: the panel shows every metric at all
        # times.
        metrics = dict(self.writer.last)
        for newest in self._newest.values():
            metrics.update(newest)
        metrics.update({name: sum(values.values()) for name, values in self._of_shards.items()})
        counters, peers = self._counters, control.peers()
        self._restarts.add_to(peers)
        present = {"learner", *(peer["name"] for peer in peers)}
        health.report({"run/steps_total": counters.steps, "run/updates_total": counters.updates})
        health.report(self._newest["learner"])
        return {
            "wall_s": self.writer.wall_s,
            "steps": counters.steps,
            "frames": counters.frames,
            "updates": counters.updates,
            "updates_since_start": counters.updates - self._first_updates,
            "version": counters.version,
            "total_steps": self._total_steps,
            "note": note,
            "metrics": metrics,
            "shards": len(self._of_shards["replay/items"]),
            "returns": {name: curve.points() for name, curve in self._returns.items()},
            "environments": self._troubles.status() | {"unevaluated": self._gathered.trouble},
            "host": system.hostname(),
            "restarts": self._restarts.of_learner,
            "services": {name: metrics for name, metrics in self._services.items() if name in present},
            "peers": peers,
        }


def _is_of_actor(name: str) -> bool:
    """Whether a metric tells of one actor process."""
    return name.startswith("actor/") or name == "params/staleness"
