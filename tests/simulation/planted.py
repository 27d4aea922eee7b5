"""Bugs to be found: each changes one thing that a protocol relies on."""

from __future__ import annotations

from typing import Any

from tests.simulation import planted_learner, planted_learners, planted_power
from tests.simulation.plants import BUGS, Change, around, bug, near, planted, seeds_for
from troupe.common import system
from troupe.common.data.inserts import GapError
from troupe.common.wire import messages
from troupe.common.wire.control import membership
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.link import Link
from troupe.common.wire.replay.client import ReplayClient
from troupe.common.wire.replay.outbox import Outbox
from troupe.common.wire.replay.pending import NOT_SENT, Inserts, SampleRequests
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.control.roster import Roster
from troupe.services.learner.control.server import ControlServer
from troupe.services.replay.held import HeldInserts
from troupe.services.replay.requests import RequestHandlers
from troupe.services.replay.storage.limiter import Limiter
from troupe.services.replay.storage.producers import Producers
from troupe.services.replay.storage.replay import Replay
from troupe.services.replay.storage.store import ChunkStore
from troupe.services.replay.storage.table import Table

__all__ = ["BUGS", "planted", "planted_learner", "planted_learners", "planted_power", "seeds_for"]


# -- replay --


@bug
def repeated_inserts_are_stored_again() -> Change:
    return around(Producers, "newest", lambda real, self, incarnation: 0)


@near("", "reset", "isolate")
def inserts_may_have_gaps() -> Change:
    def insert(real: Any, self: Any, insert: Any) -> Any:
        try:
            return real(self, insert)
        except GapError:
            insert.oldest = insert.sequence
            return real(self, insert)

    return around(Replay, "insert", insert)


@bug
def inserts_are_acknowledged_before_they_are_stored() -> Change:
    def store(real: Any, self: Any, peer: bytes, insert: Any) -> Any:
        self.server.send(peer, messages.Inserted(credit=self._credit_of(peer)), insert.sequence)
        return real(self, peer, insert)

    return around(RequestHandlers, "_store", store)


@near("queue")
def held_inserts_are_acknowledged() -> Change:
    def add(real: Any, self: Any, peer: bytes, insert: Any) -> Any:
        handlers = self.handlers
        handlers.server.send(peer, messages.Inserted(credit=2), insert.sequence)

    real_init = RequestHandlers.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        real_init(self, *args, **options)
        self.held.handlers = self
        self.held.add = lambda peer, insert: add(None, self.held, peer, insert)

    return RequestHandlers, "__init__", init


@near("queue", calm_s=8.0)
def held_inserts_are_forgotten_in_credit() -> Change:
    return around(HeldInserts, "first", lambda real, self, incarnation: None)


@near("small")
def a_full_table_drops_more_than_it_has_to() -> Change:
    def remove_excess(real: Any, self: Any, count: int, rng: Any) -> None:
        real(self, count + 3, rng)

    return around(Table, "_remove_excess", remove_excess)


@near("plenty", "torn")
def the_number_is_settled_before_the_commit() -> Change:
    def store(real: Any, self: Any, store: Any, starts: Any, insert: Any, admitted: Any) -> Any:
        self._producers.settle(insert.incarnation, insert.sequence, stored=True)
        return real(self, store, starts, insert, admitted)

    return around(Replay, "_store", store)


@near("plenty", "torn")
def a_restart_does_not_look_for_unsettled_inserts() -> Change:
    return around(Producers, "restore", lambda real, self, incarnations, sequences: None)


@near("plenty", "torn")
def the_commit_is_written_first() -> Change:
    def write(real: Any, self: Any, *args: Any) -> Any:
        row, commit = real(self, *args)
        self.commits[row] = commit
        return row, commit

    return around(ChunkStore, "write", write)


@near("", "kill repla")
def a_restart_reuses_commits() -> Change:
    def restore(real: Any, self: Any, path: Any) -> Any:
        damaged = real(self, path)
        self._last_commit -= 2
        self.raise_commit = lambda commit: None
        return damaged

    return around(ChunkStore, "_restore", restore)


@near("queue")
def batches_of_a_queue_are_sent_before_they_are_taken() -> Change:
    return around(Replay, "take", lambda real, self, sample: None)


@near("queue", "kill learn", "reset")
def undelivered_batches_are_not_put_back() -> Change:
    return around(Replay, "put_back", lambda real, self, sample: self.count_sampled(sample))


@near("ratio")
def the_limiter_is_off_by_a_batch() -> Change:
    return around(
        Limiter, "sample_blocked", lambda real, self, items, batch: real(self, items, -(self.error + 1))
    )


@near("queue", calm_s=8.0)
def writers_are_not_told_to_go_on() -> Change:
    def grant(real: Any, self: Any) -> None:
        if self._replay.insert_blocked() or not self.paused:
            real(self)
        else:
            self.paused = self.paused

    return around(RequestHandlers, "grant_credit", grant)


@near("", calm_s=8.0)
def parked_requests_are_lost_in_time() -> Change:
    def parked(real: Any, self: Any) -> None:
        before = len(self._parked)
        if before:
            each = self._parked[0]
            if each.deadline_s < system.monotonic():
                self._parked.popleft()
                self._leave(each.envelope.peer)
        real(self)

    return around(RequestHandlers, "serve_parked", parked)


# -- clients of replay --


@near("", "reset", "kill repla")
def nothing_is_sent_again_after_a_reconnection() -> Change:
    return around(Inserts, "repeat", lambda real, self, start=0: 0)


@near("queue", "reset", "kill repla")
def pings_do_not_find_what_was_lost() -> Change:
    return around(Inserts, "ping_answered", lambda real, self, ping, held: 0)


@near("", "reset", "kill repla")
def requests_that_were_lost_are_not_repeated() -> Change:
    def answered(real: Any, self: Any, ping: int, parked: Any) -> None:
        pass

    owner, name, changed = around(SampleRequests, "ping_answered", answered)
    return owner, name, changed


@near("queue")
def credit_is_added_up() -> Change:
    def handle(real: Any, self: Any, message: Any) -> None:
        before = self._credit
        real(self, message)
        if message.type == messages.Inserted.TYPE:
            self._credit += before

    return around(ReplayClient, "_handle", handle)


@near("queue", calm_s=8.0)
def credit_of_zero_is_passed_over() -> Change:
    def insert(real: Any, self: Any, chunk: Any, table: str = "default") -> bool:
        before, self._credit = self._credit, max(self._credit, 8)
        done: bool = real(self, chunk, table)
        self._credit = min(before, self._credit)
        return done

    return around(ReplayClient, "insert", insert)


@near("", "forget")
def a_silent_server_is_never_given_up() -> Change:
    return around(Link, "maintain", lambda real, self, *, waiting: False)


@near("", "reset", "kill repla")
def a_new_process_begins_its_numbers_anew() -> Change:
    def lost(real: Any, self: Any, start: int = 0) -> int:
        count = real(self, start)
        renumbered = {n + 1000: each for n, each in self._inserts.items() if each.sent_at_ping == NOT_SENT}
        if start == 0 and renumbered:
            for number in [n for n, each in self._inserts.items() if each.sent_at_ping == NOT_SENT]:
                del self._inserts[number]
            self._inserts.update(renumbered)
            self._made = max(self._inserts)
            self._unsent.clear()
            self._unsent.extend(self._inserts)
        return int(count)

    return around(Inserts, "repeat", lost)


@near("queue")
def the_outbox_drops_what_waits() -> Change:
    def put(real: Any, self: Any, chunks: Any, timeout_s: float = 0.0) -> bool:
        done: bool = real(self, chunks, timeout_s)
        if len(self._waiting) > 1:
            self._waiting.clear()
        return done

    return around(Outbox, "put", put)


# -- control --


@bug
def leases_are_not_renewed() -> Change:
    def seen(real: Any, self: Any, identity: bytes, now_s: float, key: str = "") -> Any:
        return self._by_identity.get(identity)

    return around(Roster, "seen", seen)


@near("", "replace")
def leases_never_end() -> Change:
    return around(Roster, "expire", lambda real, self, now_s: [])


@bug
def slots_are_granted_twice() -> Change:
    def grant(real: Any, self: Any, peer: Any, wanted: int, preferred: list[int], now_s: float) -> Any:
        return list(range(min(wanted, self.rules.total)))

    return around(Roster, "_grant", grant)


@bug
def a_farewell_keeps_the_lease() -> Change:
    return around(Roster, "leave", lambda real, self, identity: None)


@near(actors=3)
def a_limit_counts_as_obeyed_when_it_is_told() -> Change:
    def extend(real: Any, self: Any, incarnation: int, made: int, obeyed: int) -> int:
        told: int = real(self, incarnation, made, obeyed)
        if limits := self._limits.get(incarnation):
            del limits[:-1]
            self._told[incarnation] = told
            self._reckon(incarnation)
        return told

    return around(StepBudget, "extend", extend)


@bug
def every_actor_may_make_the_rest() -> Change:
    def extend(real: Any, self: Any, incarnation: int, made: int, obeyed: int) -> int:
        real(self, incarnation, made, obeyed)
        self._limits.setdefault(incarnation, []).append(self.total + 8)
        return self.total + 8

    return around(StepBudget, "extend", extend)


@bug
def repeated_reports_count_again() -> Change:
    def report(real: Any, self: Any, incarnation: int, made: int, slots: int) -> int:
        before = self._made.get(incarnation, 0)
        result: int = real(self, incarnation, made, slots)
        if made and made == before:
            self._steps += 1
        return result

    return around(StepBudget, "_report", report)


@near("", "kill learn")
def a_restarted_learner_counts_from_nothing() -> Change:
    def load(real: Any, self: Any, meta: Any) -> None:
        real(self, meta)
        self._made.clear()

    return around(StepBudget, "load_meta", load)


@bug
def older_versions_are_taken() -> Change:
    def newer(real: Any, self: Any, version: int) -> Any:
        with self._changed:
            params = self._member.params
            if params is not None:
                return self._deliver(params)
        return real(self, version)

    return around(ControlClient, "params_if_newer", newer)


@bug
def parameters_are_called_by_the_newest_version() -> Change:
    def take(real: Any, self: Any, body: Any) -> None:
        real(self, body)
        if self._member.params is not None:
            object.__setattr__(self._member.params, "version", self._member.state.version + 1)

    return around(membership.Membership, "_on_params", take)


@bug
def the_offer_is_one_version_behind() -> Change:
    def publish(real: Any, self: Any, version: int, params: Any) -> None:
        before = self._offer.newest
        real(self, version, params)
        if before is not None:
            self._offer.newest = before

    return around(ControlServer, "publish", publish)


@near(calm_s=99.0)
def the_end_is_not_told() -> Change:
    def state(real: Any, self: Any, *, updates: Any = None, stopping: Any = None) -> None:
        real(self, updates=updates)

    return around(ControlServer, "set_state", state)


@near("", "forget", "kill learn")
def a_member_does_not_join_again() -> Change:
    return around(Link, "lost", lambda real, self, *, waiting=True: False)
