"""How many steps a run has left, and how far each actor may go: book-keeping, without sockets."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from troupe.common import system
from troupe.services.learner.control.ahead import Ahead

NO_TOTAL = 1 << 62
MAX_STEPS = 1 << 53
"""Of one process: far more than anybody makes, and a number that every JSON reader can hold."""
MAX_STEPS_PER_SLOT_S = 10_000
"""Several times what the cheapest environment makes. Nobody can claim the steps of a day in one message."""
# Limits that an actor was told and has not confirmed; beyond that two are kept as their maximum, which
# permits more and never less.
_IN_FLIGHT = 16
_REMEMBERED = 1000
_KEPT = 1 << 16
"""Processes of which anything is known at most, beside twice as many as hold slots: every HELLO may be of a
new one. Those that came first are forgotten first."""


class StepBudget:
    """Counts the steps of all actors and keeps them within `total` and one round of the slots.

    Every actor process reports the steps that it has made since it was started, as a running total. Keeping
    the last total of each incarnation makes a repeated or late report harmless, and a report that follows the
    learner's own restart is counted from where the checkpoint left off.

    In return it is told a limit for that total. Far from the end this is half of an even share of what is
    left, so that nobody waits; the share shrinks with every report, at last to one step of every slot. A
    limit may be lowered; the former one counts until the actor has said that it obeys the new one. No report
    counts for more than was permitted: by this learner, or for a process that it does not know yet by the one
    before, which gave nobody more than half of what was left; nor for more than slots can make in the time
    since the process was first heard of. What a report says beyond that is as if it had not been said; only
    a process that this learner does not know yet may go on from there. So

        steps + (what all actors may still make) <= total + slots - 1

    at any time, and an actor that hangs holds back no more than its own slots. One that was replaced may
    still tell of steps: until it is forgotten, what it may have made comes out of what is due to its
    successor. What a message costs does not depend on the number of processes: sums over all of them are kept
    up to date by `Ahead`. Methods may be called from any thread.

    Args:
        total: steps of the run.
        clock: seconds, monotonic.
    """

    def __init__(
        self, total: int = NO_TOTAL, clock: Callable[[], float] = lambda: system.monotonic()
    ) -> None:
        self.total = total
        self._clock = clock
        self._away_s = 0.0  # between the checkpoint that was loaded and now
        self._since: dict[
            int, tuple[int, float]
        ] = {}  # what it had made when it was first heard of, and when
        self._steps = 0
        self._made: dict[int, int] = {}
        # What a process had made beyond what was credible when this learner first heard of it. It is not
        # counted, and not held against it: its limits lie so much higher, or it could never go on.
        self._uncounted: dict[int, int] = {}
        self._limits: dict[int, list[int]] = {}  # obeyed first, then those that are on their way
        # The highest limit that each was ever told, also by the learner before: whoever was making steps by
        # it when its lease ended reports them later, and is no liar, whatever of them still counts.
        self._told: dict[int, int] = {}
        self._ahead = Ahead()  # of those with limits, and of those that hold slots
        self._round = 0  # most slots of all
        self._closed = False
        self._lock = threading.Lock()

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self._steps

    def count(self, steps: int) -> None:
        """Note the steps of a run in which nobody acts, but whose updates count as such."""
        with self._lock:
            self._steps = steps

    def close(self) -> None:
        """Count no more steps: for the last checkpoint, which is to hold all that are ever told of."""
        with self._lock:
            self._closed = True

    def permitted(self, incarnation: int) -> int:
        """Return the steps that a process may have made by the limits that it was told."""
        with self._lock:
            limits = self._limits.get(incarnation)
            if not limits:
                return MAX_STEPS
            return max(self._told.get(incarnation, 0), max(limits) + self._uncounted.get(incarnation, 0))

    def made(self, incarnation: int) -> int:
        """Return the steps of a process that are counted."""
        with self._lock:
            return self._made.get(incarnation, 0)

    def hold(self, incarnation: int, place: str, slots: int) -> None:
        """Note that a process holds so many slots.

        Args:
            incarnation: of the process.
            place: its name. Another process that gets it is in its place.
            slots: 0 where another process has its place, and it may still tell of steps.
        """
        with self._lock:
            self._ahead.hold(incarnation, place, slots)

    def forget(self, incarnation: int, place: str) -> None:
        """Note that a process has left its place, or its lease has ended: it may make no steps."""
        with self._lock:
            if self._ahead.forget(incarnation, place):
                self._limits.pop(incarnation, None)

    def report(self, incarnation: int, made: int, slots: int = 1) -> None:
        """Note that this actor process, with this many `slots`, has made `made` steps since its start."""
        with self._lock:
            self._report(incarnation, max(0, made - self._uncounted.get(incarnation, 0)), slots)

    def extend(self, incarnation: int, made: int, obeyed: int) -> int:
        """Take note of a report, and return how many steps the process may make since its start.

        Args:
            incarnation: of the process.
            made: steps since its start.
            obeyed: the limit that it knows; 0 for none.
        """
        with self._lock:
            ahead, own = self._ahead, self._ahead.slots_of(incarnation)
            # The most that there were: what was permitted then may be reported when others have left.
            self._round = max(self._round, ahead.slots)
            if incarnation not in self._limits:
                self._told[incarnation] = max(self._told.get(incarnation, 0), obeyed)
            made, uncounted = self._take(incarnation, made, own)
            obeyed = max(0, obeyed - uncounted)
            if not own:  # it holds no slots, or does so no more
                return made + uncounted
            left = self.total - self._steps
            # Half of an even share: the first to be told leaves as much again for those who have not been
            # heard yet.
            share = max(0, left - ahead.replaced) // (2 * ahead.holders)
            limits = self._confirm(incarnation, obeyed, at_most=made + max(own, share))
            window = min(share, left - (ahead.total - ahead.of(incarnation)))
            # Whole rounds: an actor steps all its slots at once, and could not use the rest.
            window = max(0, window - window % own)
            # One round is everybody's due, unless it is reserved: by who may make more than a round.
            if not window and ahead.reserved_beside(incarnation) < left:
                window = own
            limits.append(made + window)
            self._reckon(incarnation)
            self._told[incarnation] = max(self._told.get(incarnation, 0), limits[-1] + uncounted)
            return limits[-1] + uncounted

    def _take(self, incarnation: int, said: int, slots: int) -> tuple[int, int]:
        """Count what is credible of a report; returns the counted steps, and those that never are."""
        uncounted, known = self._uncounted.get(incarnation, 0), incarnation in self._limits
        made = self._report(incarnation, max(0, said - uncounted), slots)
        if not known and made + uncounted < said:
            uncounted = self._uncounted[incarnation] = said - made
        return made, uncounted

    def _report(self, incarnation: int, made: int, slots: int) -> int:
        """Count what is credible of a report; returns the steps of the process that are counted."""
        limits, before = self._limits.get(incarnation), self._made.get(incarnation, 0)
        now_s = self._clock()
        base, since_s = self._since.setdefault(incarnation, (before, now_s - self._away_s - 1.0))
        self._forget_some()
        if not made or self._closed:  # none are made by all but actors, and by those only once
            return before
        if limits:
            made = min(made, max(limits))
        else:  # permitted by nobody that we know of: it gets nothing of what the others may still make
            left = max(0, self.total - self._steps - self._ahead.total)
            made = min(made, before + (left if before else left // 2))
        made = min(made, base + int(max(1, slots) * MAX_STEPS_PER_SLOT_S * (now_s - since_s)))
        # Whatever was said before: claims of one process may have taken what was permitted to another.
        made = min(made, before + max(0, self.total + max(0, self._round - 1) - self._steps))
        self._made.pop(incarnation, None)
        self._made[incarnation] = max(before, made)  # moves it to the end: forgotten last
        self._steps += max(0, made - before)
        self._reckon(incarnation)
        return self._made[incarnation]

    def _forget_some(self) -> None:
        """Forget processes that hold no slots, where there are too many."""
        while len(self._since) > _KEPT + 2 * len(self._limits):
            first = next(iter(self._since))
            since = self._since.pop(first)
            if first in self._limits:
                self._since[first] = since
                continue
            for known in (self._made, self._uncounted, self._told):
                known.pop(first, None)

    def _confirm(self, incarnation: int, obeyed: int, at_most: int) -> list[int]:
        """The limits that may still hold for a process that obeys this one now."""
        limits = self._limits.setdefault(incarnation, [])
        if obeyed in limits:
            del limits[: limits.index(obeyed)]
        elif not limits:  # an earlier learner's, as it says
            limits.insert(0, min(obeyed, at_most))
        while len(limits) > _IN_FLIGHT:
            limits[:2] = [max(limits[:2])]
        self._reckon(incarnation)
        return limits

    def _reckon(self, incarnation: int) -> None:
        """Work out anew how many steps a process may make beyond those that it has reported."""
        if limits := self._limits.get(incarnation):
            self._ahead.set(incarnation, max(0, max(limits) - self._made.get(incarnation, 0)))

    def to_meta(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        with self._lock:
            # JSON keys are text; the newest actor processes are more than can still report.
            reported = {str(one): made for one, made in list(self._made.items())[-_REMEMBERED:]}
            return {"steps": self._steps, "reported": reported, "counted_unix_s": system.time()}

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Take over what `to_meta` gave. Raises ValueError, among others, for what it cannot have given."""
        steps = int(meta["steps"])
        reported = {int(one): int(made) for one, made in meta.get("reported", {}).items()}
        if min([steps, *reported, *reported.values()]) < 0:
            raise ValueError("a negative number of steps")
        counted_s = float(meta.get("counted_unix_s", 0.0))
        if not math.isfinite(counted_s):
            raise ValueError("no time at which steps were counted")
        with self._lock:
            self._steps, self._made = steps, reported
            for incarnation in self._limits:
                self._reckon(incarnation)
            self._away_s = max(0.0, system.time() - counted_s)
