"""Which learners share batches: epochs, in each of which they are the same. Without sockets and clocks."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence

from troupe.common.errors import ConfigError, RefusedError
from troupe.common.wire import messages
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.types import MAX_LEARNERS

_log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long an epoch waits for learners that have not left the last one: they may have died, or hang."""
ASKS_S = 1.5
"""One that waits gets no seat where it has not asked for so long: it may have died, or hang."""
OWN = -1
"""Stands for the learner that has the run: no process has this as its incarnation."""
MAX_CLAIMED = 1 << 52
"""More than there ever are: one that claims to have left a later one would leave no numbers for the next."""
PAUSE_S, MAX_PAUSES = 30.0, 6
"""How long a learner is left out that twice got a seat and did not come, or that said what cannot be; doubled
so many times at most."""


MAX_UNREACHED = 3
"""A learner that could not connect to so many, one after the other, as it says, is left out itself."""


class Epochs:
    """Seats in epochs.

    A learner that loses another, or is told to, leaves its epoch and asks for the next. It begins when all
    who are alive have asked, or after PATIENCE_S without those that have not; these get a seat in the one
    after that they ask for, and are not waited for before.

    Where one comes or leaves while the others are well, the next epoch is planned: they learn in the one that
    they have until all are connected.

    Attributes:
        closed_because: why no other learner may join; empty where they may.
    """

    def __init__(self, closed_because: str = "", *, expected: int = 1, start_s: float = 0.0) -> None:
        """Begin without any.

        Args:
            closed_because: see the class.
            expected: learners with which the run begins.
            start_s: how long the first epoch waits for them.
        """
        self.closed_because = closed_because
        self._expected = expected
        self._start_s = start_s
        self._newest = -1
        self._waiting: dict[int, float] = {}  # when each has asked last
        self._given_up: set[int] = set()  # waited for in vain, though their leases have not ended
        self._seats: dict[int, Seat] = {}
        self._planned: dict[int, Seat] = {}  # the epoch that is to take the place of the newest
        self._coming: dict[int, Seat] = {}  # of those, who has to be told
        self._left_s: float | None = None
        self._failures: Counter[int] = Counter()
        self._lies: Counter[int] = Counter()
        self._unreached: defaultdict[int, set[int]] = defaultdict(set)  # by who says so
        self._paused_until_s: dict[int, float] = {}

    def asked(self, incarnation: int, ended: int, now_s: float) -> Seat | None:
        """The seat of a process that has left epoch `ended`, None while there is none: it waits for one.

        Raises RefusedError for an epoch that cannot have been.
        """
        if ended > max(self._newest, MAX_CLAIMED):
            raise RefusedError(messages.REFUSED_CLAIM, f"there was never an epoch {ended}")
        seat = self._coming.get(incarnation)
        if seat is not None and seat.epoch > ended:
            return seat
        # A restarted owner numbers on from what the others know.
        self._newest = max(self._newest, ended)
        self._waiting[incarnation] = now_s
        self._given_up.discard(incarnation)
        return None

    def waits(self, live: Collection[int], now_s: float) -> bool:
        """Whether one of those that are alive waits for a seat that it may have now."""
        return bool(self._ready(live, now_s))

    def _ready(self, live: Collection[int], now_s: float) -> list[int]:
        self._waiting = {one: asked_s for one, asked_s in self._waiting.items() if one in live}
        for gone in (self._failures.keys() | self._lies.keys() | self._unreached.keys()) - set(live):
            for known in (self._paused_until_s, self._failures, self._lies, self._unreached):
                known.pop(gone, None)
        if self.closed_because:
            return []
        ready = [
            one
            for one, asked_s in sorted(self._waiting.items())
            if now_s - asked_s <= ASKS_S and self._paused_until_s.get(one, now_s) <= now_s
        ]
        return ready[: MAX_LEARNERS - 1]

    def planned(
        self,
        staying: Collection[int],
        live: Collection[int],
        now_s: float,
        meeting: Callable[[], tuple[str, int]],
    ) -> Seat | None:
        """The seat of the owner in an epoch of the ranks `staying` of the newest one, and all who wait.

        The newest goes on until `changed`. Those who stay keep their order, and are told by the owner. None
        where there is nowhere to meet: see `formed`.
        """
        order = sorted(self._seats, key=lambda incarnation: self._seats[incarnation].rank)
        stayers = [each for each in order if self._seats[each].rank in staying]
        come = [each for each in self._ready(live, now_s) if each not in self._seats]
        everyone = [*stayers, *come][:MAX_LEARNERS]
        try:
            host, port = meeting() if len(everyone) > 1 else ("", 0)
        except ConfigError:
            return None
        self._newest += 1
        self._planned = self._numbered(everyone, host, port)
        self._coming = {each: seat for each, seat in self._planned.items() if each in come}
        self._seated(self._coming)
        return self._planned[OWN]

    @property
    def comers(self) -> Collection[int]:
        """Those who are to come to the epoch that is planned."""
        return self._coming.keys() if self._planned else ()

    def changed(self) -> None:
        """The epoch that was planned is the newest now."""
        self._seats, self._planned = self._planned, {}

    def over(self, live: Collection[int]) -> bool:
        """Whether one with a seat in the newest epoch asks for another already, or is not alive."""
        others = self._seats.keys() - {OWN}
        return bool(others & self._waiting.keys() or others - set(live))

    def _seated(self, incarnations: Collection[int]) -> None:
        for each in incarnations:
            self._waiting.pop(each, None)

    def _numbered(self, everyone: Sequence[int], host: str, port: int) -> dict[int, Seat]:
        return {
            incarnation: Seat(self._newest, rank, len(everyone), port, host)
            for rank, incarnation in enumerate(everyone)
        }

    def begun(self) -> None:
        """All who had a seat have come."""
        for incarnation in self._seats:
            self._failures.pop(incarnation, None)
            self._unreached.pop(incarnation, None)

    def unreached(self, ranks: Collection[int], now_s: float) -> bool:
        """These of the newest epoch, and not the owner, say that they cannot connect to who is to come.

        Whether one of them has lost its seat for that: the epoch has to end. Of one that does not come nobody
        knows whose fault it is. Of several it is rather that of who says so: as long as it is believed,
        nobody can join.
        """
        blamed = False
        for incarnation, seat in self._seats.items():
            if incarnation == OWN or seat.rank not in ranks:
                continue
            unreached = self._unreached[incarnation]
            # One at a time: of several who were to come at once, one may have kept it from the others.
            unreached.update([comer for comer in self.comers if comer not in unreached][:1])
            if len(unreached) >= MAX_UNREACHED:
                blamed = True
                for comer in self._unreached.pop(incarnation):
                    self._failures.pop(comer, None)
                    self._paused_until_s.pop(comer, None)
                self._lies[incarnation] += 1
                why = f"could not connect to {MAX_UNREACHED} others in a row"
                self._pause(incarnation, seat, self._lies[incarnation] - 1, now_s, why)
        return blamed

    def failed(self, absent: Collection[int], now_s: float) -> None:
        """The newest epoch did not begin: those of the ranks `absent` have not come, or it is not known who.

        Of one that was only planned, those who were to join are meant.

        While one that does not come is waited for, nobody learns: it is left out for a while. One that
        cannot reach the others, though it reaches the control server, would else hold the run up for ever.
        """
        if self._planned:
            self._planned, seats, self._coming = {}, self._coming, {}
        else:
            seats = self._seats
        for incarnation, seat in seats.items():
            if incarnation == OWN or (absent and seat.rank not in absent):
                continue
            self._failures[incarnation] += 1
            # Once may be because another has died: going on without costs what it has learned meanwhile.
            self._pause(incarnation, seat, self._failures[incarnation] - 2, now_s, "did not join")

    def misled(self, ranks: Collection[int], now_s: float) -> None:
        """One of the ranks `ranks` has said in the newest epoch what cannot be, or it is not known who.

        The update is made again without it. Where it is not known who, all but the owner are left out the
        second time. What they have said is not forgotten as long as they live: an epoch begins well with
        one that lies later.
        """
        for incarnation, seat in self._seats.items():
            if incarnation == OWN or (ranks and seat.rank not in ranks):
                continue
            self._lies[incarnation] += 1
            again = self._lies[incarnation] - (1 if ranks else 2)
            why = "sent impossible values" if ranks else "or another one sent impossible values"
            self._pause(incarnation, seat, again, now_s, why)

    def _pause(self, incarnation: int, seat: Seat, again: int, now_s: float, why: str) -> None:
        """Leave a learner out, for the time `again`, from 0; below 0: not yet."""
        if again < 0:
            return
        pause_s = PAUSE_S * 2 ** min(again, MAX_PAUSES)
        self._paused_until_s[incarnation] = now_s + pause_s
        line = "a learner of epoch %d %s: left out for %.0f s"
        _log.warning(line, seat.epoch, why, pause_s)

    def formed(
        self, live: Collection[int], now_s: float, meeting: Callable[[], tuple[str, int]]
    ) -> Seat | None:
        """The seat of the owner, which has left the last epoch; None while others may ask for one.

        Args:
            live: incarnations of the learners that are members.
            now_s: of any clock.
            meeting: gives host and port where several meet. Where it raises ConfigError nobody else may join
                from now on.
        """
        ready = self._ready(live, now_s)
        if self._left_s is None:
            self._left_s = now_s
        here = 1 + len(ready)
        self._given_up.intersection_update(live)
        late = set(live) - self._waiting.keys() - self._given_up
        missing = bool(late) or (not self._seats and here < self._expected)
        patience_s = PATIENCE_S if self._seats else max(PATIENCE_S, self._start_s)
        if missing and now_s - self._left_s < patience_s:
            return None
        self._given_up |= late
        host, port = "", 0
        try:
            if ready:
                host, port = meeting()
        except ConfigError as error:  # a reason to go on alone, not to end
            self.closed_because, ready = str(error), []
            _log.error("no other learner may join: %s", error)
        self._newest += 1
        # In the order of incarnations, which is as good as any; the owner first, who publishes.
        self._seats = self._coming = self._numbered([OWN, *ready], host, port)
        self._planned = {}
        self._seated(ready)
        self._left_s = None
        return self._seats[OWN]
