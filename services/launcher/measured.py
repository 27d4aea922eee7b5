"""The figures of a run that findings compare."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from troupe.common.data.table_config import TableConfig
from troupe.services.launcher.view import RunView

_KINDS = {"evaluator": "eval"}


class Measured:
    """A `RunView`, with figures over services of a kind. A metric that nobody reports is 0.

    Attributes:
        wait: share of the time in which the learner waits for batches.
        blocked: the same of actors, or of inference for them, that wait for replay.
        waits: both in words.
    """

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.wait = view.metrics.get("learner/wait_share", 0.0)
        self.waits = f"learner waits for batches {self.wait:.0%} of the time"
        own = list(self.of("actor", "actor/insert_blocked_share").values())
        actors = statistics.fmean(own) if own else self["actor/insert_blocked_share"]
        self.blocked = max(actors, self["inference/insert_blocked_share"])
        if (
            self.blocked >= 0.1
        ):  # by the limit on samples per insert, or because replay is full of unsent work
            self.waits += f", actors for replay {self.blocked:.0%}"

    def __getitem__(self, metric: str) -> float:
        return self.view.metrics.get(metric, 0.0)

    def of(self, kind: str, metric: str) -> dict[str, float]:
        """A metric of each service of a kind that reports it, by name."""
        found = ((name, values) for name, values in self.view.by_service.items() if _is(name, kind))
        return {name: values[metric] for name, values in found if metric in values}

    def typical(self, metric: str) -> float:
        """The median over actors."""
        values = self.of("actor", metric).values()
        return statistics.median(values) if values else self[metric]

    def most(self, kind: str, metric: str) -> float:
        """The largest of a kind."""
        return max(self.of(kind, metric).values(), default=self[metric])

    def cores(self, kind: str) -> float:
        """Cores that services of a kind have."""
        return sum(cpu for name, cpu, _ in self._processes() if _is(name, kind))

    @property
    def busy(self) -> float:
        """Cores that the run has on this machine, or all machines where no process of it is known."""
        return sum(cpu for _, cpu, _ in self._processes())

    @property
    def starved(self) -> float:
        """Cores that it could also have used."""
        return sum(starved for _, _, starved in self._processes())

    def missed(self, kind: str) -> float:
        """Cores that services of a kind could also have used."""
        return sum(starved for name, _, starved in self._processes() if _is(name, kind))

    @property
    def actors(self) -> int:
        """How many there are."""
        return max(1, sum(1 for name, _, _ in self._processes() if _is(name, "actor")))

    @property
    def offline(self) -> bool:
        """Whether the run learns from a data set: then nobody acts."""
        return self.view.config is not None and bool(self.view.config.run.offline)

    @property
    def queue(self) -> TableConfig | None:
        """The queue that is learned from, with its capacity over all shards; None where there is none."""
        config = self.view.config
        tables = config.replay.sampled_tables() if config is not None else []
        return next((table for table in tables if table.is_queue), None)

    def _processes(self) -> Iterator[tuple[str, float, float]]:
        """Name, cores and cores missed: as measured beside them, or as they say themselves."""
        if self.view.services:
            for service in self.view.services:
                yield service.name, service.cpu, service.starved
            return
        for name, values in self.view.by_service.items():
            kind = name.split("-")[0]
            prefix = _KINDS.get(kind, kind)
            if f"{prefix}/cpu_cores" in values:
                yield name, values[f"{prefix}/cpu_cores"], values.get(f"{prefix}/starved_cores", 0.0)


def _is(name: str, kind: str) -> bool:
    return name.split("-")[0] == kind
