"""One update by several learners: who is in it, what each brings, and what is left where one is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from troupe.common.agents import Agent, Batch, Pending, Update
from troupe.common.agents.inspection import Inspection
from troupe.common.agents.learners.hearsay import MisledError, check_all, is_count
from troupe.common.agents.learners.reduction import ALONE, Reduction
from troupe.common.config import Config
from troupe.common.errors import ConfigError
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.peers.change import COLUMNS, Change, Coming, Step
from troupe.services.learner.peers.group import GroupLostError, ProcessGroup
from troupe.services.learner.peers.network import check_meeting, own_address
from troupe.services.learner.peers.seats import SILENT_S, Seats
from troupe.services.learner.peers.state import equalize
from troupe.services.learner.saving.counters import RunCounters

_log = logging.getLogger(__name__)

MAX_UPDATES = 1 << 53
"""Of a run, and of its versions."""
MAX_BETA = 100.0
MAX_TIMES_BATCH = 16
"""A share is at most so many times a batch: the owner may have begun again with a larger one."""
_CHANGE = 5
"""Columns of what learners say before each update; what is said of the next epoch follows."""
_LEAST = _CHANGE + COLUMNS
"""Behind that, the least probability of a row of each table."""
ASK_S = 0.1
"""How long one call waits for a seat, or for others to come to theirs."""
MAX_TIMES_TIMEOUT = 10
"""Who comes waits for the others so many times as long as they do for each other: an update may be long."""


class Share(NamedTuple):
    """What a learner brings to an update.

    Attributes:
        batch: its rows as the agent takes them, for this progress of the run, exponent of importance, and
            `least` of the whole batch.
        rows: how many.
        learned_steps: what they add to `RunCounters.learned_steps`.
        least: by table, the least probability with which one of them was drawn.
    """

    batch: Callable[[float, float, Mapping[str, float]], Batch]
    rows: int
    learned_steps: float
    least: Mapping[str, float] = {}


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
        tables: that a batch has rows of.
    """

    owner: bool
    batch_rows: int
    network: str = ""
    timeout_s: float = 15.0
    bfloat16: bool = False
    tables: tuple[str, ...] = ()

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
            tuple(config.replay.shares()),
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
        self._change = Change(seats, self._connected)
        self._coming: Coming | None = None  # where this learner has no epoch yet
        self._group: ProcessGroup | None = None
        self._seat: Seat | None = None
        self._ended = -1
        self._reduction: Reduction = ALONE
        self._tried = False  # whether the share at hand was in an update that was not completed here
        self._behind = 0  # that update's number
        self._nothing: Batch | None = None
        self._told = 0.0, 0.0  # progress and beta, as the owner said last
        self._least: Mapping[str, float] = {}  # of the whole batch
        self._max_rows = MAX_TIMES_BATCH * rules.batch_rows
        self._most_steps = self._max_rows * agent.item_steps[1]
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
        if self._seat is None or self._group is not None:
            return True
        return self._change.coming is not None or self._seats.wanted()

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
            _log.warning("%s: continuing without it, after update %d", error, self._counters.updates)
            if isinstance(error, MisledError):
                self._seats.misled(error.ranks)
            self._leave()
            return Learned()

    def let_go(self) -> bool:
        """Ask the others to go on without this learner; whether they do. Go on learning until then."""
        self._change.leaving = True
        # Without the owner nobody prepares another epoch: there is nothing to wait for.
        return self._group is None or self._seats.silent_s() is None

    def close(self) -> None:
        """Leave: the others go on, and find that this learner is gone."""
        self._leave()

    # ------------------------------------------------------------------ updates

    def _learn_alone(self, share: Share | None) -> Learned:
        if self._changes(np.array([self._change.said(0, 1)], np.float64)) or share is None:
            return Learned()
        update = self._inspection.update(share.batch(*self._told, share.least))
        self._tried = False
        self._counters.updates += 1
        self._counters.learned_steps += share.learned_steps
        return Learned(True, True, update)

    def _learn_together(self, share: Share | None) -> Learned:
        counters, rows, tables = self._counters, 0 if share is None else share.rows, self._rules.tables
        least = {} if share is None else share.least
        said = [
            counters.updates,
            *self._told,
            counters.version,
            0.0 if share is None else share.learned_steps,
            *self._change.said(self.rank, self.learners),
            *(min(1.0, least.get(name, 1.0)) for name in tables),
        ]
        table = self._reduction.exchange(rows, said)
        self._check(table)
        _, progress, beta, version, *_ = table[0].tolist()
        self._told = progress, beta
        counters.version = int(version)
        self._least = dict(zip(tables, table[:, _LEAST:].min(0).tolist(), strict=True))
        if self._changes(table[:, _CHANGE:_LEAST]):
            return Learned()
        everyone = all(self._reduction.rows_of)
        if not self._reduction.all_rows or not (
            everyone or self._reduction.all_rows >= self._rules.batch_rows
        ):
            return Learned()
        update = self._whole_or_not(share)
        counters.updates += 1
        counters.learned_steps += float(table[:, _CHANGE - 1].sum())
        return Learned(share is not None, True, None if share is None else update)

    def _check(self, table: np.ndarray) -> None:
        """Raise MisledError where what the others say `[learners, said]` cannot be."""
        updates, progress, beta, version, steps = table[:, :_CHANGE].T
        check_all(updates == self._counters.updates, "is at another update")
        check_all((steps >= 0) & (steps <= self._most_steps), "claims more steps than there are")
        least = table[:, _LEAST:]
        check_all(np.all((least > 0) & (least <= 1), axis=1), "sent an impossible probability")
        told = (
            (progress >= 0)
            & (progress <= 1)
            & (beta >= 0)
            & (beta <= MAX_BETA)
            & is_count(version, MAX_UPDATES)
            & (version >= self._counters.version)
        )
        if not told[0]:
            raise MisledError("sent an impossible progress of the run", [0])

    def _whole_or_not(self, share: Share | None) -> Update | Pending:
        """The update; the agent is as before where a learner is lost within."""
        self._tried, self._behind = share is not None, self._counters.updates
        arrays, meta = self._agent.state()
        try:
            batch = self._no_rows() if share is None else share.batch(*self._told, self._least)
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
        # What follows the progress of the run is not what the rows say.
        return replace(self._nothing, progress=self._told[0])

    # ------------------------------------------------------------------- epochs

    def _sit_down(self) -> bool:
        """Take the next seat, if there is one, and the state of whoever is furthest."""
        if self._coming is None:
            seat = self._seats.next(self._ended, ASK_S)
            if seat is None:
                return False
            self._coming = Coming(seat, self._connected, self._wait_for_all)
        coming = self._coming
        try:
            if not coming.done(ASK_S):
                if (self._seats.silent_s() or 0.0) < SILENT_S:
                    return False
                raise GroupLostError(f"no other learner joined epoch {coming.seat.epoch}")
            self._coming, self._seat = None, coming.seat
            self._begin(coming)
        except (GroupLostError, MisledError) as error:
            self._coming, self._seat = None, coming.seat
            coming.close()
            self._did_not_begin(error, coming.seat)
            return False
        return True

    def _connected(self, seat: Seat) -> ProcessGroup | None:
        """The group of those with this seat; None for a learner that is alone. Raises GroupLostError."""
        if seat.learners == 1:
            return None
        rules = self._rules
        try:
            check_meeting(seat.host, rules.network)
            address = own_address(rules.network)
        except ConfigError as error:
            if not rules.owner:
                raise
            raise GroupLostError(str(error)) from None  # it goes on alone
        store = self._seats.store(seat)
        over = self._seats.over
        return ProcessGroup(store, seat.epoch, seat.rank, seat.learners, address, rules.timeout_s, over)

    def _wait_for_all(self, group: ProcessGroup, seat: Seat) -> None:
        """Exchange with the others what the end of the epoch takes."""
        timeout_s = self._rules.timeout_s
        patient = self._seats.silent_s() is not None  # else none of them has an epoch
        group.wait_at_most(timeout_s * (MAX_TIMES_TIMEOUT if patient else 1))
        self._seats.begun(group, seat)
        group.wait_at_most(timeout_s)

    def _changes(self, said: np.ndarray) -> bool:
        """Do what all say of the next epoch `[learners, 6]`; whether it has taken the place of this one."""
        assert self._seat is not None
        step = self._change.heard(said, self._seat)
        if step == Step.END or self._change.released:
            self._leave()
        elif step == Step.SWITCH:
            self._switch()
        return step in (Step.END, Step.SWITCH)

    def _switch(self) -> None:
        """Go on in the epoch that was prepared; the others of this one do so too, or have left."""
        coming, before = self._change.coming, self._group
        if coming is None or not coming.done(0.0):
            raise MisledError("claims that this learner is ready for another epoch", [0])
        self._seats.changed()
        self._group = coming.group
        self._change.coming = None
        try:
            if coming.group is not None:
                self._seats.begun(coming.group, coming.seat)
            self._seat = coming.seat
            self._begin(coming)
        except (GroupLostError, MisledError) as error:
            self._did_not_begin(error, coming.seat)
        finally:
            # Not before: one that has not heard yet would take this learner for lost.
            if before is not None:
                before.close()

    def _begin(self, coming: Coming) -> None:
        """Share batches with those of this epoch, all of whom have come."""
        self._group, seat = coming.group, coming.seat
        changed = False
        if self._group is None:
            self._with(ALONE)
        else:
            self._with(Reduction(self._group, bfloat16=self._rules.bfloat16, max_rows=self._max_rows))
            changed = equalize(self._group, self._agent, self._counters)
        left = self._change.begin(seat.learners)
        self.moved |= changed
        self.learners = seat.learners
        if seat.learners > 1 or left:
            words = [f"epoch {seat.epoch}: {seat.learners} learners share each batch"]
            if seat.learners == 1:
                words = [f"epoch {seat.epoch}: no other learner is left"]
            words[0] += f", at update {self._counters.updates}"
            words += [f"learner {rank} of the previous epoch has left" for rank in left]
            words += ["took over the state of another learner"] * changed
            _log.info("; ".join(words))

    def _did_not_begin(self, error: GroupLostError | MisledError, seat: Seat) -> None:
        _log.warning("%s", error)
        if isinstance(error, MisledError):
            self._seats.misled(error.ranks)
        else:
            self._seats.failed(seat)
        self._leave()

    def _leave(self) -> None:
        if self._seat is not None:
            self._ended = self._seat.epoch
        self._change.close()
        if self._coming is not None:
            self._coming.close()
        group, self._group, self._seat, self.learners = self._group, None, None, 0
        self._coming = None
        self._with(ALONE)
        if group is not None:
            group.close()

    def _with(self, reduction: Reduction) -> None:
        if reduction.alone and self._reduction.alone:
            return  # an agent that knows nothing of others need not hear of it
        self._reduction = reduction
        self._agent.learn_with(reduction)  # type: ignore[attr-defined]
