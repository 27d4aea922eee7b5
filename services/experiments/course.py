"""What decides which runs of a sweep pause and go on, while they are under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from troupe.services.experiments.jobs import Job

if TYPE_CHECKING:
    from troupe.services.experiments.sweep import Runner


class Course(ABC):
    """How the runs of one sweep depend on each other.

    Attributes:
        key: of its record in that of the sweep.
    """

    key: ClassVar[str]

    def __init__(self, runner: Runner, record: Mapping[str, Any], totals: Mapping[str, int]) -> None:
        """Begin, or go on.

        Args:
            runner: of the sweep.
            record: what an earlier call has recorded; empty: none.
            totals: steps of every run.
        """
        self._runner, self._total = runner, min(totals.values())

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Everything that the next call needs, as JSON values."""

    def planned(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields that a run has now, of those that it was planned with."""
        return fields

    @abstractmethod
    def take_up(self, job: Job) -> None:
        """Give a run of an earlier call the state that it waits in."""

    @abstractmethod
    def look(self, job: Job) -> None:
        """A run is under way: pause it, if it should."""

    @abstractmethod
    def ended(self, job: Job) -> None:
        """The process of a run has ended."""

    @abstractmethod
    def go_on(self) -> None:
        """Have paused runs go on, if they should."""

    def table(self) -> list[str]:
        """What it has decided, for the end of the sweep; empty where states of runs say it."""
        return []
