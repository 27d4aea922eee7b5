"""What a run looks like at one moment, the verdict on what limits it, and its plain one-line form."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.common.stats.played import levels_missed
from troupe.services.launcher.curves import Points

_RATE_WINDOW_S = 60.0
# Metrics that say nothing once the learner is silent.
_RATES = ("speed/", "gpu/")
_STARVED_SHARE = 0.3  # of the demand; the scheduler alone causes less where cores are free
_SLOW_STEP_MS = 5.0
_SETTLED_S = 30.0  # before, starting processes take the processor and caches are cold


@dataclass(frozen=True)
class ServiceView:
    """One child process, as shown."""

    name: str
    state: str
    cpu: float = 0.0  # cores in use
    memory_bytes: int = 0
    restarts: int = 0
    starved: float = 0.0  # cores that it could also have used, but others had them


@dataclass(frozen=True)
class RunView:
    """The run at one moment: the learner's status file, the processes, and rates measured here."""

    total_steps: int
    steps: int = 0
    frames: int = 0
    updates: int = 0
    version: int = -1  # of the parameters published last
    note: str = ""
    actors: int | None = None  # that have joined; None: unknown
    trouble: str = ""
    disk: str = ""  # why the run directory cannot be written; empty: it can
    silent: Mapping[str, float] = field(default_factory=dict)  # seconds by service
    metrics: dict[str, float] = field(default_factory=dict)
    returns: dict[str, Points] = field(default_factory=dict)  # by metric
    services: Sequence[ServiceView] = ()
    elapsed_s: float = 0.0
    eta_s: float | None = None
    min_items: int = 0
    env_rounds: float = (
        1.0  # steps that a thread of an actor takes one after the other for a step of all slots
    )
    capacity_items: int = 0
    takes_turns: bool = False  # acting waits for learning, and learning for acting
    cores: int = 1

    @property
    def share(self) -> float:
        """Part of the run that is done, 0 to 1."""
        return min(1.0, self.steps / max(1, self.total_steps))

    @property
    def evaluated(self) -> bool:
        """Whether the parameters published last have been evaluated."""
        return self.metrics.get("eval/version", -1) >= max(0, self.version)

    @property
    def last_evaluation(self) -> str:
        """The last evaluation in words, or that there was none."""
        score = self.metrics.get("eval/episode_return")
        if score is None:
            return "none"
        details = []
        normalised = self.metrics.get("eval/human_normalized")
        if normalised is not None:
            details.append(f"human-normalised {normalised:.2f}")
        if missed := levels_missed(self.metrics):
            details.append(missed)
        if "eval/version" in self.metrics:
            details.append(f"version {self.metrics['eval/version']:.0f}")
        words = f"return {score:.2f}" + (f" ({', '.join(details)})" if details else "")
        if self.metrics.get("eval/version", self.version) < self.version:
            return f"none of the last version, {self.version}; the newest one: {words}"
        return words


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
        metrics=metrics,
        returns=status.get("returns", {}),
        **values,
    )


def trouble_of(environments: dict[str, Any]) -> str:
    """What went wrong in environments, in words: how often, and the last cause; empty where nothing did."""
    counts = [(int(environments.get(name, 0)), name) for name in ("failures", "hangs")]
    counted = " and ".join(f"{n:,} {name if n > 1 else name[:-1]}" for n, name in counts if n)
    return f"{counted}, the last: {environments.get('last', '')}" if counted else ""


def verdict(view: RunView) -> tuple[str, str]:
    """Say what limits the run, and what would help (empty: nothing, or it will pass)."""
    if any(s.name == "learner" and s.state in ("done", "stopped") for s in view.services):
        left = [s.name for s in view.services if s.state == "running"]
        ended = "complete" if view.steps >= view.total_steps else "stopped"
        return (f"waiting for {', '.join(left)} to end" if left else ended), ""
    if view.disk:
        return view.disk, "make room there: until then nothing is recorded, and replay may hold actors up"
    troubled = [s for s in view.services if s.state not in ("running", "done", "stopped")]
    if troubled:
        return f"{troubled[0].name}: {troubled[0].state}", ""
    if view.silent:
        named = sorted(view.silent.items(), key=lambda item: -item[1])
        words = ", ".join(f"{name} has said nothing for {age_s:.0f} s" for name, age_s in named[:3])
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return words + more, "it hangs, or gets no processor: see its log"
    if view.note:
        return view.note, ""
    if not view.metrics:
        return "starting", ""
    items = view.metrics.get("replay/items")
    if items is None:
        return "starting", ""
    # Not only before the first update: a resumed run may have lost its items, and then waits for new ones.
    if items < view.min_items and not view.metrics.get("speed/updates_per_s"):
        if view.actors == 0:
            return "waiting for the first actor: none has joined, it may be starting still", ""
        return f"filling replay before learning starts: {items:,.0f} of {view.min_items:,} items", ""
    if view.elapsed_s < _SETTLED_S:
        return "too early to say what limits training", ""
    # From here on in the order in which causes hide each other: a full machine makes the learner wait as
    # well, and a slow environment leaves cores idle.
    wait_share = view.metrics.get("learner/wait_share", 0.0)
    learner, actors = _cores(view, "learner"), _cores(view, "actor")
    busy = sum(service.cpu for service in view.services)
    waits = f"learner waits for batches {wait_share:.0%} of the time"
    if busy > 0.9 * view.cores:
        shares = f"learner {learner:.1f}, actors {actors:.1f} of {view.cores} cores"
        return f"bottleneck: CPU ({shares}; {waits})", "more cores, or actors on other machines, would help"
    step_ms = view.metrics.get("actor/env_ms", 0.0) / max(1.0, view.env_rounds)
    actor_count = sum(service.name.startswith("actor-") for service in view.services)
    if wait_share >= 0.3 and step_ms >= _SLOW_STEP_MS and actors < 0.5 * actor_count:
        # Actors that wait for their environments use no processor, whatever else is busy on the machine.
        slow = f"bottleneck: the environment takes {step_ms:,.0f} ms a step"
        return slow, "--actor.env_threads (or --env.processes) steps several at a time"
    starved = sum(service.starved for service in view.services)
    if starved > _STARVED_SHARE * (busy + starved):
        wanted = min(busy + starved, view.cores)  # every thread that waits counts, more than there are cores
        shares = f"the run gets {busy:.1f} of the {wanted:.1f} cores that it could use"
        return f"bottleneck: this machine, busy with other programs ({shares})", "fewer of them would help"
    if wait_share >= 0.3 and view.takes_turns:
        return f"acting and learning take turns ({waits})", "agent.max_staleness = 1 would let them overlap"
    if wait_share >= 0.3:
        return f"bottleneck: actors ({waits})", "more actor.processes or actor.slots would help"
    shares_blocked = (view.metrics.get(f"{who}/insert_blocked_share", 0.0) for who in ("actor", "inference"))
    blocked = max(shares_blocked)
    if blocked >= 0.1:  # by the limit on samples per insert, or because replay is full of unsent work
        waits = f"{waits}, actors for replay {blocked:.0%}"
    return f"bottleneck: learner ({waits})", "a smaller network or batch, or a GPU, would help"


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
    parts.append(verdict(view)[0])
    if view.trouble:
        parts.append(f"environments: {view.trouble}")
    return " | ".join(parts)


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


def _cores(view: RunView, kind: str) -> float:
    return sum(service.cpu for service in view.services if service.name.split("-")[0] == kind)
