"""Where an actor's time goes: running totals, and reports of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from troupe.common import system
from troupe.common.envs import Episode, means_told
from troupe.common.wire.control.messages import Game, TelemetryFields


@dataclass
class Timing:
    """Running totals since the actor started."""

    steps: int = 0
    """Of every slot, but for those whose agent took no part in them, or was played by another policy."""
    calls: int = 0
    """Of the environments: each steps several slots."""
    inference_s: float = 0.0
    env_s: float = 0.0
    accumulate_s: float = 0.0
    blocked_s: float = 0.0
    """In which the actor stood still because others took no more."""
    chunks: int = 0
    pack_s: float = 0.0
    entry_bytes: int = 0
    """Of what was packed for replay."""
    block_bytes: int = 0
    """The same, packed."""
    episodes: list[Episode] = field(default_factory=list)
    """Games that finished since the list was cleared; their `slot` is that of the run."""
    opponents: Callable[[], dict[str, float]] = dict
    """What a report says of games against earlier versions."""

    def packed(self, counters: Mapping[str, int]) -> None:
        """Take in the totals of what packs chunks, `ReplayClient.counters`."""
        self.pack_s = counters["pack_us"] / 1e6
        self.entry_bytes, self.block_bytes = counters["entry_bytes"], counters["block_bytes"]

    def take(self, episodes: list[Episode], slots: list[int]) -> None:
        """Take in games of copies that have these numbers among the slots of the run."""
        self.episodes += [episode._replace(slot=slots[episode.slot]) for episode in episodes]


def fields_of(episodes: Sequence[Episode]) -> TelemetryFields:
    """Finished games and, where the environment has several levels, the level of each."""
    games = [Game(episode.return_raw, episode.steps, episode.slot, episode.score) for episode in episodes]
    several = any(episode.task for episode in episodes)
    return TelemetryFields(games, [episode.task for episode in episodes] if several else [])


class Blocked:
    """A clock for the time in which an actor stands still."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._last_s: float | None = None

    def set(self, blocked: bool) -> None:
        """Say whether it stands still now; to be said again in every round."""
        now_s = system.monotonic()
        if blocked and self._last_s is not None:
            self._timing.blocked_s += now_s - self._last_s
        self._last_s = now_s if blocked else None


class TimingReports:
    """Makes reports of an actor's running totals."""

    def __init__(self) -> None:
        self._last_s = system.monotonic()
        self._last = Timing()

    def due(self, period_s: float) -> bool:
        """Whether the last report was so long ago."""
        return system.monotonic() - self._last_s >= period_s

    def report(self, timing: Timing, staleness: int) -> tuple[dict[str, float], TelemetryFields]:
        """Metrics and other fields since the last report; takes the episodes out of `timing`.

        `actor/steps` and `actor/insert_blocked_s` are totals since the process started, so that a lost
        report does no harm; the rest are means over the time since the last one.
        """
        now, last = system.monotonic(), self._last
        # A report may follow another at once, as the last one does at the end.
        elapsed = max(1e-9, now - self._last_s)
        calls = max(1, timing.calls - last.calls)
        metrics = {
            "actor/steps": float(timing.steps),
            "actor/steps_per_s": (timing.steps - last.steps) / elapsed,
            "actor/env_ms": (timing.env_s - last.env_s) / calls * 1e3,
            "actor/inference_ms": (timing.inference_s - last.inference_s) / calls * 1e3,
            "actor/accumulate_ms": (timing.accumulate_s - last.accumulate_s) / calls * 1e3,
            "actor/env_share": min(1.0, (timing.env_s - last.env_s) / elapsed),
            "actor/inference_share": min(1.0, (timing.inference_s - last.inference_s) / elapsed),
            "actor/accumulate_share": min(1.0, (timing.accumulate_s - last.accumulate_s) / elapsed),
            "actor/insert_blocked_s": timing.blocked_s,
            "actor/insert_blocked_share": min(1.0, (timing.blocked_s - last.blocked_s) / elapsed),
            "actor/chunks_total": float(timing.chunks),
            "actor/pack_share": min(1.0, (timing.pack_s - last.pack_s) / elapsed),
            "params/staleness": float(staleness),
        }
        if packed := timing.block_bytes - last.block_bytes:
            metrics["actor/compression_ratio"] = (timing.entry_bytes - last.entry_bytes) / packed
        fields = fields_of(timing.episodes)
        metrics |= {f"env/{name}": value for name, value in means_told(timing.episodes).items()}
        metrics |= timing.opponents()
        timing.episodes.clear()
        # A copy: `timing` itself goes on counting.
        self._last_s, self._last = now, replace(timing)
        return metrics, fields
