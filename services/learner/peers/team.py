"""One update by several learners: who is in it, what each brings, and what is left where one is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch.distributed as dist

from troupe.common.agents import Agent, Batch, Pending, Update
from troupe.common.agents.inspection import Inspection
from troupe.common.agents.learners.hearsay import MisledError, check_all, is_count
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.common.config import Config
from troupe.common.errors import ConfigError
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup
from troupe.services.learner.peers.network import check_meeting, own_address
from troupe.services.learner.peers.state import equalize
from troupe.services.learner.saving.counters import RunCounters

_log = logging.getLogger(__name__)

MOST_UPDATES = 1 << 53
"""Of a run, and of its versions."""
MOST_BETA = 100.0
MOST_TIMES_BATCH = 16
"""A share is at most so many times a batch: the owner may have begun again with a larger one."""
ASK_S = 0.1
"""How long one call waits for a seat."""


class Share(NamedTuple):
    """What a learner brings to an update.

    Attributes:
        batch: its rows as the agent takes them, for this progress of the run and exponent of importance.
        rows: how many.
        window: steps of the longest.
        learned_steps: what they add to `RunCounters.learned_steps`.
    """

    batch: Callable[[float, float], Batch]
    rows: int
    window: int
    learned_steps: float


class Learned(NamedTuple):
    """What has become of a share.

    Attributes:
        taken: it has been learned from, or others have with it: it is done with.
        moved: there was an update.
        update: of this share, if it was in that.
    """

    taken: bool = False
    moved: bool = False
    update: Update | Pending | None = None


class Seats(Protocol):
    """Where a learner gets its seats."""

    def next(self, ended: int, timeout_s: float) -> Seat | None:
        """That in an epoch after `ended`, if there is one within `timeout_s`."""

    def wanted(self) -> bool:
        """Whether the epoch has to end for the next one. Rank 0 is asked, which knows."""

    def begun(self, group: ProcessGroup, seat: Seat) -> None:
        """Prepare for the end of this epoch, as all in it do. Raises GroupLostError."""

    def failed(self, seat: Seat) -> None:
        """Take note that this epoch did not begin."""

    def misled(self, ranks: Collection[int]) -> None:
        """Take note that one of these in this epoch, or of all, has said what cannot be."""

    def store(self, seat: Seat) -> dist.Store:
        """Where those with a seat in this epoch find each other. Raises GroupLostError where it is gone."""


@dataclass(frozen=True)
class Rules:
    """What a team goes by.

    Attributes:
        owner: has the run: it says what the others go by.
        batch_rows: of an update; a learner without rows of its own need not be waited for when there are so
            many.
        network: `net.learner_network`.
        timeout_s: after which a learner that does not answer is lost.
        bfloat16: gradients are exchanged in that.
    """

    owner: bool
    batch_rows: int
    network: str = ""
    timeout_s: float = 15.0
    bfloat16: bool = False

    @classmethod
    def of(cls, config: Config, *, owner: bool) -> Rules:
        """Those of a run."""
        net, learner = config.net, config.learner
        return cls(
            owner,
            config.replay.batch_size,
            net.learner_network,
            net.liveness_s,
            learner.gradient_dtype == "bfloat16",
        )


class Team:
    """The learners of a run, as one of them sees them. An update is made by all of them, or by none.

    Attributes:
        moved: the state of another learner has been taken over since this was last set to False.
        learners: how many share a batch now; 0 between two epochs.
        lost: epochs that ended because a learner was lost.
    """

    def __init__(
        self,
        agent: Agent,
        counters: RunCounters,
        seats: Seats,
        rules: Rules,
        update: Callable[[Batch], Update | Pending] | None = None,
    ) -> None:
        """Take no seat yet. `update` is the agent's own, or one that does the same: see `Inspection`."""
        self.moved = False
        self.learners = self.lost = 0
        self._agent, self._counters, self._seats, self._rules = agent, counters, seats, rules
        self._inspection = Inspection(agent, update=update)
        self._group: ProcessGroup | None = None
        self._seat: Seat | None = None
        self._ended = -1
        self._reduction: Reduction = ALONE
        self._tried = False  # whether the share at hand was in an update that was not completed here
        self._behind = 0  # that update's number
        self._nothing: Batch | None = None
        self._told = 0.0, 0.0  # progress and beta, as the owner said last
        self._most_rows = MOST_TIMES_BATCH * rules.batch_rows
        self._most_steps = self._most_rows * agent.item_steps[1]
        # Before anybody waits for it: the first optimiser of a process imports much of torch.
        if not rules.owner:
            agent.state()

    @property
    def rank(self) -> int:
        """Of this learner; 0 is the owner's."""
        return 0 if self._seat is None else self._seat.rank

    @property
    def updates(self) -> int:
        """Of the run."""
        return self._counters.updates

    @property
    def several(self) -> bool:
        """Whether others wait for this learner."""
        return self._seat is None or self._group is not None or self._seats.wanted()

    def learn(self, share: Share | None, *, progress: float = 0.0, beta: float = 0.0) -> Learned:
        """Make an update of all shares, if there are enough rows; None stands for no rows now.

        Args:
            share: of this learner; the same again until it is taken.
            progress: of the run; the owner's counts.
            beta: exponent of importance; likewise.
        """
        if self._seat is None and not self._sit_down():
            return Learned()
        if self._tried and share is not None and self._counters.updates > self._behind:
            # Others have completed the update in which this learner lost one of them.
            self._tried = False
            return Learned(taken=True)
        try:
            if self._rules.owner:
                self._told = progress, beta
            return self._learn_alone(share) if self._group is None else self._learn_together(share)
        except (GroupLostError, MisledError) as error:
            self.lost += 1
            _log.warning("%s: going on without, after update %d", error, self._counters.updates)
            if isinstance(error, MisledError):
                self._seats.misled(error.ranks)
            self._leave()
            return Learned()

    def close(self) -> None:
        """Leave: the others go on."""
        self._leave()

    # ------------------------------------------------------------------ updates

    def _learn_alone(self, share: Share | None) -> Learned:
        if self._seats.wanted():
            self._leave()
            return Learned()
        if share is None:
            return Learned()
        update = self._inspection.update(share.batch(*self._told))
        self._tried = False
        self._counters.updates += 1
        self._counters.learned_steps += share.learned_steps
        return Learned(True, True, update)

    def _learn_together(self, share: Share | None) -> Learned:
        counters, rows = self._counters, 0 if share is None else share.rows
        said = [
            counters.updates,
            self.rank == 0 and self._seats.wanted(),
            *self._told,
            counters.version,
            0.0 if share is None else share.learned_steps,
        ]
        table = self._reduction.exchange(rows, 0 if share is None else share.window, said)
        self._check(table)
        _, leaves, progress, beta, version, _ = table[0]
        if leaves:  # another learner has come, or the owner is back
            self._leave()
            return Learned()
        self._told = float(progress), float(beta)
        counters.version = int(version)
        everyone = all(self._reduction.rows_of)
        if not self._reduction.all_rows or not (
            everyone or self._reduction.all_rows >= self._rules.batch_rows
        ):
            return Learned()
        update = self._whole_or_not(share)
        counters.updates += 1
        counters.learned_steps += float(table[:, -1].sum())
        return Learned(share is not None, True, None if share is None else update)

    def _check(self, table: np.ndarray) -> None:
        """Raise MisledError where what the others say `[learners, said]` cannot be."""
        updates, leaves, progress, beta, version, steps = table.T
        check_all(updates == self._counters.updates, "that it is at another update")
        check_all((steps >= 0) & (steps <= self._most_steps), "that it learns from more steps than there are")
        told = (
            is_count(leaves, 1)
            & (progress >= 0)
            & (progress <= 1)
            & (beta >= 0)
            & (beta <= MOST_BETA)
            & is_count(version, MOST_UPDATES)
            & (version >= self._counters.version)
        )
        if not told[0]:
            raise MisledError("a progress of the run that cannot be", [0])

    def _whole_or_not(self, share: Share | None) -> Update | Pending:
        """The update; the agent is as before where a learner is lost within."""
        self._tried, self._behind = share is not None, self._counters.updates
        arrays, meta = self._agent.state()
        try:
            batch = self._no_rows() if share is None else share.batch(*self._told)
            update = self._inspection.update(batch)
        except (GroupLostError, MisledError):
            # An update takes several messages, and the others may have had fewer of them: half of it is in
            # no state that all could go on from.
            self._agent.load_state(arrays, meta)
            raise
        self._tried = False
        return update

    def _no_rows(self) -> Batch:
        """A batch to go through the motions with, of an item of zeros that weighs nothing."""
        if self._nothing is None:
            steps = self._agent.item_steps[0]
            fields = {
                spec.name: np.zeros((1, spec.entries(steps), *spec.shape), spec.dtype)
                for spec in self._agent.fields
            }
            self._nothing = Batch(
                fields, np.zeros(1, np.float32), np.full(1, steps, np.int32), np.zeros(1, bool), measure=False
            )
        return self._nothing

    # ------------------------------------------------------------------- epochs

    def _sit_down(self) -> bool:
        """Take the next seat, if there is one, and the state of whoever is furthest."""
        seat = self._seats.next(self._ended, ASK_S)
        if seat is None:
            return False
        if seat.learners == 1:
            self._seat, self.learners = seat, 1
            self._with(ALONE)
            return True
        try:
            self._group = self._connected(seat)
            self._seat = seat
            self._with(
                Reduction(
                    self._group,
                    bfloat16=self._rules.bfloat16,
                    most_rows=self._most_rows,
                    most_window=self._agent.item_steps[1],
                )
            )
            self._seats.begun(self._group, seat)
            changed = equalize(self._group, self._agent, self._counters)
        except (GroupLostError, MisledError) as error:
            _log.warning("%s", error)
            if isinstance(error, MisledError):
                self._seats.misled(error.ranks)
            else:
                self._seats.failed(seat)
            self._seat = seat
            self._leave()
            return False
        self.moved |= changed
        self.learners = seat.learners
        _log.info(
            "epoch %d: %d learners share each batch, at update %d%s",
            seat.epoch,
            seat.learners,
            self._counters.updates,
            "; took over the state of another" if changed else "",
        )
        return True

    def _connected(self, seat: Seat) -> ProcessGroup:
        rules = self._rules
        try:
            check_meeting(seat.host, rules.network)
            address = own_address(rules.network)
        except ConfigError as error:
            if not rules.owner:
                raise
            raise GroupLostError(str(error)) from None  # it goes on alone
        store = self._seats.store(seat)
        return ProcessGroup(store, seat.epoch, seat.rank, seat.learners, address, rules.timeout_s)

    def _leave(self) -> None:
        if self._seat is not None:
            self._ended = self._seat.epoch
        group, self._group, self._seat, self.learners = self._group, None, None, 0
        self._with(ALONE)
        if group is not None:
            group.close()

    def _with(self, reduction: Reduction) -> None:
        if reduction.alone and self._reduction.alone:
            return  # an agent that knows nothing of others need not hear of it
        self._reduction = reduction
        self._agent.learn_with(reduction)  # type: ignore[attr-defined]
