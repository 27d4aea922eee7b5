"""How far all actor processes may go beyond what they have reported: sums, kept up to date one by one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Process:
    place: str
    slots: int
    ahead: int = 0


@dataclass(slots=True)
class _Place:
    """All processes that have, or had, one name."""

    processes: int = 0
    slots: int = 0
    ahead: int = 0

    @property
    def reserved(self) -> int:
        return max(0, self.ahead - self.slots)


class Ahead:
    """Steps that processes may make beyond those that they have reported, and sums over all of them.

    A learner hears every process once a second, so none of these methods goes through the others.

    Attributes:
        total: steps ahead of all processes.
        replaced: those of processes that hold no slots, because another has their place.
        slots: slots of all processes.
        holders: processes that hold some.
    """

    def __init__(self) -> None:
        """Begin without any process."""
        self.total = self.replaced = self.slots = self.holders = 0
        self._reserved = 0  # of all places
        self._processes: dict[int, _Process] = {}
        self._places: dict[str, _Place] = {}

    def hold(self, incarnation: int, place: str, slots: int) -> None:
        """Note which place and how many slots a process has; 0 where another has its place.

        One that holds slots in another place keeps that: who claims its incarnation is somebody else.
        """
        process = _Process(place, slots, self.of(incarnation))
        known = self._processes.get(incarnation)
        if known is not None:
            if known.slots and known.place != place:
                return
            self._count(known, -1)
        self._processes[incarnation] = process
        self._count(process, 1)

    def set(self, incarnation: int, ahead: int) -> None:
        """Note how far a process may go; of one that has no place, nothing."""
        if process := self._processes.get(incarnation):
            self._count(process, -1)
            process.ahead = ahead
            self._count(process, 1)

    def forget(self, incarnation: int, place: str) -> bool:
        """Leave a process out from now on; False where it has no place, or another one."""
        process = self._processes.get(incarnation)
        if process is None or process.place != place:
            return False
        del self._processes[incarnation]
        self._count(process, -1)
        return True

    def of(self, incarnation: int) -> int:
        """How far a process may go."""
        process = self._processes.get(incarnation)
        return 0 if process is None else process.ahead

    def slots_of(self, incarnation: int) -> int:
        """How many slots a process holds."""
        process = self._processes.get(incarnation)
        return 0 if process is None else process.slots

    def reserved_beside(self, incarnation: int) -> int:
        """Steps that the others may make beyond a round each, a process and those it replaced as one.

        What may be made by those whose place this process has counts in full: they have no round beside its.
        """
        process = self._processes[incarnation]
        place = self._places[process.place]
        return self._reserved - place.reserved + place.ahead - process.ahead

    def _count(self, process: _Process, sign: int) -> None:
        """Add what a process has to all sums, or take it out again."""
        place = self._places.setdefault(process.place, _Place())
        self._reserved -= place.reserved
        place.processes += sign
        place.slots += sign * process.slots
        place.ahead += sign * process.ahead
        self._reserved += place.reserved
        self.total += sign * process.ahead
        self.slots += sign * process.slots
        self.holders += sign * bool(process.slots)
        if not process.slots:
            self.replaced += sign * process.ahead
        if not place.processes:
            del self._places[process.place]
