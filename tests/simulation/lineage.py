"""An account of what several learners have made of their state: which update followed which, of what rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.simulation.actors import contents
from tests.simulation.plan import PARTING, Plan

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger
    from tests.simulation.world import Node

STILL_S = 45.0
"""At most so long a turn of a learner's loop takes, whatever has become of the others."""


@dataclass(frozen=True)
class State:
    """What an update has made.

    Attributes:
        parent: digest of the state that was updated.
        updates: of the run, with this one.
        ids: of the shares.
        rows: numbers of the steps in them.
    """

    parent: str
    updates: int
    ids: tuple[int, ...]
    rows: frozenset[int]


@dataclass(frozen=True)
class Entry:
    """A learner as it comes to an epoch: its state, and whether that is lost if the others do not have it."""

    digest: str
    updates: int
    holds: bool


class Lineage:
    """Checks what learners say of their updates and epochs.

    Attributes:
        together_after: updates by all learners of the plan since the last fault was over.
        lost: updates that only one side of a partition had.
    """

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self._ledger, self._plan = ledger, plan
        self.together_after = self.lost = 0
        self._states: dict[str, State] = {}
        self._shares: dict[int, tuple[Node, frozenset[int]]] = {}
        self._rows_of: dict[int, int] = {}  # by share: items in it
        self._within: dict[int, list[str]] = defaultdict(list)  # by step: states with it
        self._held: dict[Node, str] = {}  # what the learners that are alive have
        self._entered: dict[str, dict[int, Entry]] = defaultdict(dict)  # by epoch and rank
        self._begun: dict[str, str] = {}
        self._of_epoch: dict[tuple[str, int], str] = {}
        self._published = ""
        self._turned_s: dict[Node, float] = {}

    @property
    def parted(self) -> bool:
        """Whether learners may have been cut off from each other, and gone on without each other."""
        return any(f.kind in PARTING and f.at_s <= self._ledger.now_s for f in self._plan.faults)

    # -- what learners say --

    def begins_with(self, digest: str, updates: int) -> None:
        """A process begins with this."""
        self._states.setdefault(digest, State("", updates, (), frozenset()))

    def shares(self, node: Node, fields: dict[str, np.ndarray], lengths: np.ndarray) -> int:
        """A learner brings these rows to an update; a number of them."""
        numbers: list[int] = []
        for row, length in enumerate(lengths.tolist()):
            found = fields["number"][row, :length]
            if not np.array_equal(fields["obs"][row, :length], contents(found)):
                self._wrong(f"a row of a batch is torn: {found.tolist()}")
            numbers += found.tolist()
        if any(self._ledger.owner.get(number) is None for number in numbers):
            self._wrong(f"rows {numbers} of {node.name} were never stored")
        number = len(self._shares) + 1
        self._shares[number] = node, frozenset(numbers)
        self._rows_of[number] = len(lengths)
        return number

    def updated(
        self, node: Node, digest: str, parent: str, updates: int, ids: list[int], epoch: str, learners: int
    ) -> None:
        """A learner has completed an update of these shares, one of `learners` in this epoch."""
        before = self._states.get(parent)
        if before is None:
            self._wrong(f"{node.name} has updated a state that no update has made")
            return
        if before.updates + 1 != updates:
            self._wrong(
                f"{node.name} calls an update of a state of {before.updates} updates number {updates}"
            )
        if epoch and self._of_epoch.setdefault((epoch, updates), digest) != digest:
            self._wrong(f"learners of one epoch have different states at update {updates}")
        self._held[node] = digest
        if digest not in self._states:
            self._check_new(node, parent, updates, ids, learners)
            rows = frozenset().union(*(self._shares[each][1] for each in ids))
            self._states[digest] = State(parent, updates, tuple(ids), rows)
            for number in rows:
                self._within[number].append(digest)
        if learners == self._plan.learners and self._ledger.now_s > self._plan.end_s:
            self.together_after += 1
        for other, held in self._held.items():
            if not (self.parted or other.dead or self.related(held, digest)):
                self._wrong(f"{node.name} and {other.name} have different states of update {updates}")

    def _check_new(self, node: Node, parent: str, updates: int, ids: list[int], learners: int) -> None:
        if len({self._shares[each][0] for each in ids}) != len(ids) or len(ids) > learners or not ids:
            self._wrong(f"update {updates} of {learners} learners is of shares {ids}")
        from tests.simulation.configuration import BATCH

        rows = sum(self._rows_of[each] for each in ids)
        # Those at the beginning may be of what was asked for in an epoch of fewer.
        if self._ledger.talk.calm and learners == self._plan.learners and updates > 9 and rows > BATCH:
            self._wrong(f"update {updates} is of {rows} rows, a batch has {BATCH}")
        if self._plan.table != "queue":
            return
        for each in ids:
            for number in self._shares[each][1]:
                before = sum(self.descends(parent, digest) for digest in self._within[number])
                if before >= self._ledger.may_be_given(number):
                    self._wrong(f"step {number} of a queue is learned from twice, in update {updates} again")

    def enters(self, node: Node, epoch: str, rank: int, digest: str, updates: int) -> None:
        """A learner comes to an epoch with this."""
        self._entered[epoch][rank] = Entry(digest, updates, node in self._held)

    def begins(self, node: Node, epoch: str, learners: int, digest: str, updates: int) -> None:
        """A learner begins an epoch with this."""
        if self._begun.setdefault(epoch, digest) != digest:
            self._wrong(f"learners begin an epoch with different states of update {updates}")
        self._held[node] = digest
        entered = self._entered[epoch]
        if len(entered) != learners:
            self._wrong(f"{len(entered)} learners have come to an epoch of {learners}")
        most = max(each.updates for each in entered.values())
        if updates != most:
            self._wrong(f"learners begin an epoch at update {updates}, and one had made {most}")
        for each in entered.values():
            if each.holds and not self.descends(digest, each.digest):
                self.lost += 1
                if not self.parted:
                    self._wrong(f"update {each.updates} of a learner that is alive is lost")

    def published(self, digest: str) -> None:
        """The owner publishes this, and is in an epoch."""
        before, self._published = self._published, digest
        if not before or self.parted or self.descends(digest, before):
            return
        if any(not node.dead and self.descends(held, before) for node, held in self._held.items()):
            self._wrong("what is published does not follow from what was, which a learner has")

    def turns(self, node: Node) -> None:
        """A learner's loop turns."""
        self._turned_s[node] = self._ledger.now_s

    def rests(self, node: Node) -> None:
        """It waits for others only, from now on."""
        self._turned_s.pop(node, None)

    def look(self) -> None:
        """Whether a learner stands still."""
        for node, turned_s in self._turned_s.items():
            if not node.dead and self._ledger.now_s > max(turned_s, node.stalled_until) + STILL_S:
                self._wrong(f"{node.name} stands still for {STILL_S:.0f} s")

    def updates_of(self, digest: str) -> int | None:
        """How many updates have led to a state; None where no learner has ever had it."""
        state = self._states.get(digest)
        return None if state is None else state.updates

    # -- questions --

    def descends(self, digest: str, before: str) -> bool:
        """Whether a state has been made of another, or is it."""
        if before not in self._states:
            return False
        updates = self._states[before].updates
        while digest != before:
            state = self._states.get(digest)
            if state is None or state.updates <= updates:
                return False
            digest = state.parent
        return True

    def related(self, one: str, other: str) -> bool:
        """Whether one of two states has been made of the other."""
        return self.descends(one, other) or self.descends(other, one)

    def rows(self, digest: str) -> set[int]:
        """Of all updates that have led to a state."""
        found: set[int] = set()
        while digest in self._states:
            found |= self._states[digest].rows
            digest = self._states[digest].parent
        return found

    def check_end(self, digest: str, batch_rows: int) -> None:
        """Compare the last state of the run with what was given."""
        learned = self.rows(digest)
        if self._plan.table == "queue" and not self._plan.faults:
            # Fewer than a batch may be in the hands of learners.
            left = self._ledger.given.keys() - learned
            if len(left) >= batch_rows * 3:
                self._wrong(
                    f"{len(left)} steps of a queue were given and not learned from: {sorted(left)[:9]}"
                )

    def _wrong(self, what: str) -> None:
        self._ledger.wrong(what)
