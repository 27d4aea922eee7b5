"""From one epoch to the next while updates go on: the next group connects beside them."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from enum import IntEnum

import msgspec
import numpy as np

from troupe.common import system
from troupe.common.agents.learners.hearsay import MisledError, check_all, is_count
from troupe.common.errors import TroupeError
from troupe.common.runtime import Deadline, lingering
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.types import MAX_LEARNERS
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup
from troupe.services.learner.peers.seats import Seats

_log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long the next group may take to connect, or one update if that is longer: nobody else can join then."""
HURRY_S = 2.0
"""The same where one of those who connect asks to be let go: it waits for some seconds only."""
MAX_EPOCHS = 1 << 53


class Step(IntEnum):
    """What rank 0 says of the next epoch before each update."""

    STAY = 0
    """There is none."""
    CONNECT = 1
    """Those who stay connect to those who come, and updates go on."""
    SWITCH = 2
    """All are connected: the next update is in that epoch."""
    END = 3
    """All leave, and ask for other seats."""


COLUMNS = 6
"""Numbers that `Change.said` tells."""


class Coming:
    """The group of an epoch while it connects, on a thread of its own.

    Attributes:
        seat: of this learner in it.
        group: once it is connected; None for a learner that will be alone.
    """

    def __init__(
        self,
        seat: Seat,
        connect: Callable[[Seat], ProcessGroup | None],
        then: Callable[[ProcessGroup, Seat], None] | None = None,
    ) -> None:
        """Begin to `connect`, and go on with `then`."""
        self.seat = seat
        self.group: ProcessGroup | None = None
        self._connect, self._then = connect, then
        self._closed = system.Event()
        self._results: system.Queue[Exception | None] = system.Queue()
        self._is_done = False
        lingering.start(self._run, "epoch")

    def _run(self) -> None:
        try:
            self.group = self._connect(self.seat)
            if self._closed.is_set():
                raise GroupLostError("nothing waits for this group")
            if self.group is not None and self._then is not None:
                self._then(self.group, self.seat)
        except Exception as error:
            if self.group is not None:
                self.group.close()
            self._results.put(error)
        else:
            self._results.put(None)

    def done(self, timeout_s: float) -> bool:
        """Whether it is ready, within `timeout_s`. Raises what went wrong."""
        if not self._is_done:
            try:
                error = self._results.get(timeout=timeout_s)
            except queue.Empty:
                return False
            if error is not None:
                raise error
            self._is_done = True
        return True

    def close(self) -> None:
        """Give it up: the others notice."""
        self._closed.set()
        if self.group is not None:
            self.group.close()


class Change:
    """How the learners of an epoch go on to the next, as one of them sees it.

    Rank 0 decides. Who stays follows from what all said before the last update, so all know it, and all
    change before the same update.

    Attributes:
        leaving: this learner asks to be let go.
        coming: the next group.
        released: the others go on without this learner.
    """

    def __init__(self, seats: Seats, connect: Callable[[Seat], ProcessGroup | None]) -> None:
        """Of the learner with these seats; `connect` meets the others that have one."""
        self.leaving = self.released = False
        self.coming: Coming | None = None
        self._seats, self._connect = seats, connect
        self._leavers: list[int] = []
        self.begin(1)

    def begin(self, learners: int) -> list[int]:
        """Note that an epoch of so many begins; the ranks of the last one that have left it."""
        left, self._leavers = self._leavers, []
        self.coming = None
        self._failed = self._out = self._late = False
        self._planned: Seat | None = None
        self._deadline = Deadline(PATIENCE_S)
        self._staying = list(range(learners))
        self._all_ready = self._hurried = False
        self._failing: list[int] = []  # ranks that cannot connect to those who come
        return left

    def close(self) -> None:
        """The epoch has ended before the change."""
        if self.coming is not None:
            self.coming.close()
        self.begin(1)

    def said(self, rank: int, learners: int) -> list[float]:
        """What this learner tells: step, epoch, learners, whether it leaves, is connected, has failed."""
        ready = self._ready()  # first: what has become of it here decides whom rank 0 blames
        step = self._step(learners) if rank == 0 else Step.STAY
        planned = self._planned
        epoch, size = (0, 0) if planned is None else (planned.epoch, planned.learners)
        return [step, epoch, size, self.leaving, ready, self._failed]

    def heard(self, table: np.ndarray, seat: Seat) -> Step:
        """Take in what all have said `[learners, COLUMNS]`; the step to take. Raises MisledError."""
        steps, epochs, sizes, *flags = table.T
        check_all(is_count(steps, max(Step)), "sent an unknown step")
        check_all(is_count(epochs, MAX_EPOCHS) & is_count(sizes, MAX_LEARNERS), "sent an impossible epoch")
        for flag in flags:
            check_all(is_count(flag, 1), "sent neither yes nor no")
        step = Step(int(steps[0]))
        if step == Step.STAY:
            self.close()
        elif step == Step.CONNECT and not (self.coming or self._failed or self._out):
            self._begin_to_connect(int(epochs[0]), int(sizes[0]), seat)
        leaves, ready, failed = (flag.astype(bool) for flag in flags)
        if step == Step.STAY:
            self._staying = np.flatnonzero(~leaves).tolist()
        elif leaves[self._staying].any() and not self._hurried:
            self._hurried = True
            self._deadline = Deadline(min(HURRY_S, self._deadline.remaining_s))
        self._all_ready = bool(ready[self._staying].all())
        self._failing = [rank for rank in self._staying if failed[rank]]
        if step == Step.SWITCH:
            self._leavers = [rank for rank in range(seat.learners) if rank not in self._staying]
            self.released = self._out
        return step

    def _step(self, learners: int) -> Step:
        seats, planned = self._seats, self._planned
        if planned is not None and (self._failing or self._in_vain()):
            # Where rank 0 cannot connect either, it is not for those who say so.
            own = self._failed or 0 in self._failing
            blamed = bool(self._failing) and not own and seats.unreached(self._failing)
            seats.failed(planned)
            self._planned = None
            return Step.END if blamed else Step.STAY
        if planned is None:
            wanted = seats.wanted()
            if not wanted and len(self._staying) == learners:
                return Step.STAY
            self._planned = seats.planned(self._staying)
            self._deadline, self._late = Deadline(PATIENCE_S), False
            if self._planned is None:
                return Step.END if wanted else Step.STAY
            return Step.CONNECT
        if self._all_ready:
            return Step.SWITCH
        # What all say now still counts: one update may take longer, and they are heard only between two.
        self._late = self._deadline.expired
        return Step.CONNECT

    def _in_vain(self) -> bool:
        """Whether those who connect are waited for no longer."""
        # One that has died would keep all who want to join for as long as the others try to connect to it.
        return not self._all_ready and (self._late or self._seats.gone())

    def _begin_to_connect(self, epoch: int, learners: int, seat: Seat) -> None:
        if seat.rank not in self._staying:
            self._out = True
            return
        if epoch <= seat.epoch or learners < len(self._staying):
            raise MisledError("announced an impossible epoch", [0])
        # Only rank 0 knows where, if it has been alone.
        mine = self._planned or msgspec.structs.replace(
            seat, epoch=epoch, rank=self._staying.index(seat.rank), learners=learners
        )
        self.coming = Coming(mine, self._connect)

    def _ready(self) -> bool:
        if self.coming is None:
            return False
        try:
            return self.coming.done(0.0)
        except TroupeError as error:
            _log.warning("%s: continuing as before", error)
            self._failed, self.coming = True, None
            return False
