"""Makes the view of a run, and its plain one-line form."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from troupe.common.config import Config
from troupe.common.config.fields import UntypedAgentConfig
from troupe.common.machine import usable_cores
from troupe.common.runtime.metrics import TRAINING_RETURN
from troupe.common.stats.played import levels_missed
from troupe.services.launcher.findings import TOO_EARLY, verdict
from troupe.services.launcher.refill import items_before_learning
from troupe.services.launcher.view import RunView, ServiceView

__all__ = ["Estimator", "RunView", "ServiceView", "plain_line", "run_view", "settings_of", "verdict"]

_RATE_WINDOW_S = 60.0
_LINE_SHARE, _LONGEST_LINE_S = 0.1, 60.0
# Metrics that say nothing once the learner is silent.
_RATES = ("speed/", "gpu/")


class Estimator:
    """The time left, from the steps of the last minute."""

    def __init__(self) -> None:
        self._history: deque[tuple[float, int]] = deque()

    def eta_s(self, steps: int, total_steps: int) -> float | None:
        """Take in the newest count and return the seconds left; None while there is nothing to go by."""
        now = time.monotonic()
        if self._history and steps < self._history[-1][1]:
            self._history.clear()  # the learner went back to its checkpoint
        self._history.append((now, steps))
        while now - self._history[0][0] > _RATE_WINDOW_S:
            self._history.popleft()
        then, before = self._history[0]
        if steps >= total_steps:
            return 0.0
        if now - then < 3.0 or steps <= before:
            return None
        return (total_steps - steps) * (now - then) / (steps - before)


def run_view(status: dict[str, Any], **values: Any) -> RunView:
    """Combine the learner's status (possibly empty) with what the launcher knows."""
    counters: dict[str, Any] = {name: int(status.get(name, 0)) for name in ("steps", "frames", "updates")}
    metrics = {k: float(v) for k, v in status.get("metrics", {}).items() if isinstance(v, int | float)}
    counters["version"] = int(status.get("version", -1))
    if "learner" in values.get("silent", {}):
        # The last rates would stand there for as long as it is silent, and look like a run that goes on.
        metrics = {name: value for name, value in metrics.items() if not name.startswith(_RATES)}
        values["eta_s"] = None
    return RunView(
        **counters,
        note=str(status.get("note", "")),
        actors=sum(peer["role"] == "actor" for peer in status["peers"]) if "peers" in status else None,
        trouble=trouble_of(status.get("environments", {})),
        environments=status.get("environments", {}),
        metrics=metrics,
        by_service=status.get("services", {}),
        returns=status.get("returns", {}),
        **values,
    )


def settings_of(config: Config) -> dict[str, Any]:
    """What a view has of a run's configuration."""
    tables = config.replay.sampled_tables()
    return {
        "config": config,
        "min_items": items_before_learning(tables),
        "takes_turns": _allowed_staleness(config) == 0,
        "env_rounds": max(1.0, config.actor.slots / config.actor.env_threads),
        "capacity_items": sum(table.capacity for table in tables),
    }


def recorded_view(status: Mapping[str, Any], config: Config) -> RunView:
    """The view of a run by its last status alone, as who has not started it sees it."""
    return run_view(
        dict(status),
        total_steps=config.run.total_steps,
        elapsed_s=float(status.get("wall_s", 0.0)),
        cores=usable_cores(),
        **settings_of(config),
    )


def _allowed_staleness(config: Config) -> Any:
    """How many versions actors may act behind, of an algorithm that sets a limit."""
    if isinstance(config.agent, UntypedAgentConfig):  # of one that is not imported here, by the field's name
        return (config.agent.model_extra or {}).get("max_staleness")
    return getattr(config.agent, "allowed_staleness", None)


def trouble_of(environments: dict[str, Any]) -> str:
    """What went wrong in environments, in words: how often, and the last cause; empty where nothing did."""
    counts = [(int(environments.get(name, 0)), name) for name in ("failures", "hangs")]
    counted = " and ".join(f"{n:,} {name if n > 1 else name[:-1]}" for n, name in counts if n)
    return f"{counted}, the last: {environments.get('last', '')}" if counted else ""


def line_period_s(log_every_s: float, elapsed_s: float) -> float:
    """Seconds from one plain line to the next.

    A tenth of the time that the run has taken, at most a minute, and never less than `run.log_every_s`: the
    presets of small tasks set that to two seconds for their curves, which would fill the log of a longer run.
    """
    return max(log_every_s, min(_LONGEST_LINE_S, _LINE_SHARE * elapsed_s))


def plain_line(view: RunView) -> str:
    """The run in one log line."""
    metrics = view.metrics
    parts = [f"steps {view.steps:,}/{view.total_steps:,} ({view.share:.1%})"]
    if view.frames or view.updates or not view.steps:  # of a resumed run the learner has to tell them first
        parts += [f"frames {view.frames:,}", f"updates {view.updates:,}"]
    for label, name, form in (
        ("steps/s", "speed/steps_per_s", ",.0f"),
        ("updates/s", "speed/updates_per_s", ".1f"),
        ("replay", "replay/items", ",.0f"),
        ("train return", "train/episode_return", ".2f"),
        ("eval return", "eval/episode_return", ".2f"),
        ("staleness", "params/staleness", ".1f"),
    ):
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
            if name == "eval/episode_return" and (missed := levels_missed(metrics)):
                parts[-1] += f" ({missed})"
    if gpu := gpu_line(metrics):
        parts.append(gpu)
    parts.append(f"elapsed {duration(view.elapsed_s)}")
    if view.eta_s is not None:
        parts.append(f"ETA {duration(view.eta_s)}")
    limit = verdict(view)[0]
    if limit != TOO_EARLY:  # on the panel it passes; in a log it would stand in each line
        parts.append(limit)
    if view.trouble:
        parts.append(f"environments: {view.trouble}")
    return " | ".join(parts)


def endless_line(view: RunView) -> str:
    """What to say of a run without any episode, neither one that ended nor one that failed; else nothing."""
    ended = view.returns.get(TRAINING_RETURN) or view.environments.get("episodes") or view.trouble
    if ended or view.config is None or view.config.run.offline or not (view.metrics and view.steps):
        return ""
    steps = view.steps / view.config.total_slots
    return (
        f"no episode has ended in {steps:,.0f} steps of each slot, so there is no training return: "
        "train for longer, or return truncated from the environment when its time is up"
    )


def gpu_line(metrics: Mapping[str, float]) -> str:
    """What the learner's GPU does, as far as it is measured; empty without one."""
    words = []
    if "gpu/busy_share" in metrics:
        words.append(f"{metrics['gpu/busy_share']:.0%} busy")
    if "gpu/power_w" in metrics:
        words.append(f"{metrics['gpu/power_w']:.0f} W")
    if "gpu/memory_bytes" in metrics:
        words.append(f"{metrics['gpu/memory_bytes'] / 2**30:.1f} GiB")
    return f"GPU {', '.join(words)}" if words else ""


def duration(seconds: float) -> str:
    """`h:mm:ss`."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
