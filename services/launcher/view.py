"""What a run looks like at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from troupe.common.config import Config
from troupe.common.stats.played import levels_missed
from troupe.services.launcher.curves import Points


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
    """The run at one moment: the learner's status, the processes where they are known, and what was set."""

    total_steps: int
    steps: int = 0
    frames: int = 0
    updates: int = 0
    version: int = -1  # of the parameters published last
    note: str = ""
    actors: int | None = None  # that have joined; None: unknown
    trouble: str = ""
    environments: Mapping[str, Any] = field(default_factory=dict)  # what the learner has heard of them
    disk: str = ""  # why the run directory cannot be written; empty: it can
    silent: Mapping[str, float] = field(default_factory=dict)  # seconds by service
    metrics: dict[str, float] = field(default_factory=dict)
    by_service: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # metrics of each
    returns: dict[str, Points] = field(default_factory=dict)  # by metric
    services: Sequence[ServiceView] = ()
    elapsed_s: float = 0.0
    eta_s: float | None = None
    config: Config | None = None
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
    def unevaluated(self) -> str:
        """Why games of the last evaluation could not be played; empty where all were."""
        return str(self.environments.get("unevaluated", ""))

    @property
    def last_evaluation(self) -> str:
        """The last evaluation in words, or that there was none."""
        score = self.metrics.get("eval/episode_return")
        why = f" ({self.unevaluated})" if self.unevaluated else ""
        if score is None:
            return f"none{why}"
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
            return f"{words}; the last version, {self.version}, has not been evaluated{why}"
        return words
