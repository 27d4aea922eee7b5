"""Learners come and leave while the others go on: nobody is lost for it, and nobody waits."""

import logging
import threading

import numpy as np
import pytest

from tests.agents.unrolled import SMALL, VECTOR, random_batch
from tests.harness import Context, until
from tests.learner.peers.clients import joined, state_hash
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config.algorithms import agent_model
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control import seating
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers import change
from troupe.services.learner.peers.change import Change, Step
from troupe.services.learner.peers.group import GroupLostError
from troupe.services.learner.peers.seats import GivenSeats, OwnSeats
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROWS = 3


class One:
    """A learner in a thread, that learns until it is told to leave, or to die."""

    def __init__(self, server, context, name, timeout_s):
        self.name, self.hashes, self.sizes = name, {}, []
        self.stood = 0  # times that it was in no epoch, since the first
        self.agent = make_agent(agent_model("impala")(**SMALL), VECTOR, seed=len(name))
        self.counters = RunCounters(1, StepBudget(1 << 40))
        self.client = None
        if name == "learner":
            seats = OwnSeats(server, "", StopSignal())
        else:
            self.client = joined(context, server, name)
            seats = GivenSeats(self.client, "", 60.0)
        rules = Rules(name == "learner", ROWS, timeout_s=timeout_s)
        self.team = Team(self.agent, self.counters, seats, rules)
        self.leaves, self.dies = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        batch = Batch(random_batch(np.random.default_rng(1), self.agent, ROWS), np.ones(ROWS, np.float32))
        share = Share(lambda *told: batch, ROWS, 0.0)
        while not self.dies.is_set() and not (self.leaves.is_set() and self.team.let_go()):
            if self.team.learn(share).moved:
                self.hashes[self.counters.updates] = state_hash(self.agent, self.counters)
                self.sizes.append(self.team.learners)
            self.stood += bool(self.sizes) and not self.team.learners
        self.team.close()
        if self.client is not None:
            self.client.close("done")


@pytest.fixture
def start(server):
    context, started = Context(), []

    def start(*names, timeout_s=60.0):
        started.extend(One(server, context, name, timeout_s) for name in names)
        return started[-len(names) :]

    yield start
    for each in started[::-1]:
        each.dies.set()
        each.thread.join()
    context.destroy(linger=0)


def together(learners):
    """Whether each has made an update with all the others."""
    size = len(learners)
    return lambda: all(each.sizes[-1:] == [size] for each in learners)


def check_alike(*learners):
    for one in learners:
        for update in one.hashes.keys() & learners[0].hashes.keys():
            assert one.hashes[update] == learners[0].hashes[update], (one.name, update)


def test_learners_come_and_leave_and_the_others_lose_nobody(start, caplog, monkeypatch):
    monkeypatch.setattr(change, "PATIENCE_S", 240.0)  # of a machine that is busy
    caplog.set_level(logging.INFO)
    (owner,) = start("learner")
    until(lambda: owner.sizes)
    (second,) = start("learner-1")
    until(together([owner, second]))
    (third,) = start("learner-2")
    until(together([owner, second, third]))

    second.leaves.set()
    second.thread.join()
    until(together([owner, third]))
    third.leaves.set()
    third.thread.join()
    until(together([owner]))

    assert [each.team.lost for each in (owner, second, third)] == [0, 0, 0]
    assert owner.stood == 0
    assert (second.stood, third.stood) == (1, 1), "as they left"
    assert "learner 1 of the previous epoch has left" in caplog.text
    assert not [line for line in caplog.messages if "lost" in line or "does not" in line]
    check_alike(owner, second, third)
    assert sorted(owner.hashes) == list(range(1, max(owner.hashes) + 1)), "an update is missing"


def test_the_others_go_on_while_one_is_waited_for_and_take_it_in_when_it_comes(start, server, monkeypatch):
    monkeypatch.setattr(change, "PATIENCE_S", 1.0)
    owner, second = start("learner", "learner-1")
    until(together([owner, second]))
    context = Context()
    silent = joined(context, server, "silent")
    until(lambda: silent.next_seat(-1, 0.1))
    before = len(owner.sizes)
    until(lambda: len(owner.sizes) > before + 20)
    assert owner.sizes[before:] == [2] * len(owner.sizes[before:]), "it has not come"
    silent.close("done")
    monkeypatch.setattr(change, "PATIENCE_S", 240.0)  # of a machine that is busy
    (third,) = start("learner-2")
    until(together([owner, second, third]))
    assert (owner.team.lost, second.team.lost) == (0, 0)
    check_alike(owner, second, third)
    context.destroy(linger=0)


def test_one_that_dies_while_another_comes_does_not_stop_the_rest(start, server, monkeypatch):
    owner, second, third = start("learner", "learner-1", "learner-2")
    until(together([owner, second, third]))
    connecting, real = threading.Event(), change.Change._begin_to_connect

    def begin(self, *args):
        real(self, *args)
        if self is third.team._change:
            third.dies.set()
            connecting.set()

    monkeypatch.setattr(change.Change, "_begin_to_connect", begin)
    (fourth,) = start("learner-3")
    assert connecting.wait(60)
    third.thread.join()
    until(together([owner, second, fourth]))
    check_alike(owner, second, fourth)
    assert sorted(owner.hashes) == list(range(1, max(owner.hashes) + 1)), "an update is missing"


def test_one_that_dies_with_its_seat_does_not_keep_the_next_one_out(start, server, monkeypatch):
    monkeypatch.setattr(change, "PATIENCE_S", 240.0)  # it is not that which ends
    owner, second = start("learner", "learner-1")
    until(together([owner, second]))
    context = Context()
    dies = joined(context, server, "dies")
    until(lambda: dies.next_seat(-1, 0.1))
    context.destroy(linger=0)  # no BYE
    monkeypatch.setattr(seating, "GONE_S", 2.5)
    (third,) = start("learner-2")
    until(together([owner, second, third]))
    assert (owner.team.lost, second.team.lost) == (0, 0)
    check_alike(owner, second, third)
    dies.close("done")


@pytest.mark.timeout(600)
def test_one_that_can_connect_to_nobody_makes_room_for_those_who_can(start, caplog):
    owner, second = start("learner", "learner-1")
    until(together([owner, second]))

    def connect(seat):
        raise GroupLostError("no other learner joined")

    second.team._change._connect = connect
    # A guest does not hear that nobody waits for it any more: it goes on connecting for as long as this.
    guests = start("learner-2", "learner-3", "learner-4", timeout_s=10.0)
    until(together([owner, *guests]), timeout_s=480)  # of a machine that is busy
    assert "could not connect to 3 others in a row: left out" in caplog.text
    check_alike(owner, *guests)
    assert sorted(owner.hashes) == list(range(1, max(owner.hashes) + 1)), "an update is missing"


class Planned:
    """Seats of rank 0, for whom one waits; counts the epochs that did not begin, notes who was to stay."""

    def __init__(self):
        self.failures, self.staying, self.dies, self.blamed = 0, [], False, []

    def wanted(self):
        return True

    def planned(self, staying):
        self.staying.append(staying)
        return Seat(1, 0, len(staying) + 1, 0, "")

    def gone(self):
        return self.dies

    def unreached(self, ranks):
        self.blamed.append(ranks)
        return True

    def failed(self, seat):
        self.failures += 1


@pytest.mark.parametrize("comes", [True, False], ids=["it comes", "it does not come"])
def test_one_joins_also_where_an_update_takes_longer_than_the_others_wait(monkeypatch, comes):
    monkeypatch.setattr(change, "PATIENCE_S", 0.0)
    came, seats, steps = threading.Event(), Planned(), []
    rank_0 = Change(seats, lambda seat: came.wait(60) and None)
    rank_0.begin(1)
    for _ in range(3):
        steps.append(rank_0.heard(np.array([rank_0.said(0, 1)], np.float64), Seat(0, 0, 1, 0, "")))
        if comes:  # during the update
            came.set()
            rank_0.coming.done(60)
    came.set()
    assert steps == [Step.CONNECT, Step.CONNECT, Step.SWITCH if comes else Step.STAY]
    assert seats.failures == (0 if comes else 1)


def test_one_that_leaves_does_not_wait_for_one_that_does_not_come(monkeypatch):
    monkeypatch.setattr(change, "HURRY_S", 0.0)
    ended, seats, steps = threading.Event(), Planned(), []
    rank_0 = Change(seats, lambda seat: ended.wait(60) and None)
    rank_0.begin(2)
    for leaves in (False, True, True, True, True):
        table = [rank_0.said(0, 2), [Step.STAY, 0, 0, leaves, False, False]]
        steps.append(rank_0.heard(np.array(table, np.float64), Seat(0, 0, 2, 0, "")))
    ended.set()
    assert steps == [Step.CONNECT, Step.CONNECT, Step.CONNECT, Step.STAY, Step.CONNECT]
    assert (seats.failures, seats.staying) == (1, [[0, 1], [0]])


@pytest.mark.parametrize("ready", [False, True])
def test_one_that_dies_with_its_seat_is_waited_for_no_longer_unless_all_are_connected(ready):
    came, seats, steps = threading.Event(), Planned(), []
    rank_0 = Change(seats, lambda seat: came.wait(60) and None)
    rank_0.begin(1)
    for seats.dies in (False, False, True):
        if ready and steps:
            came.set()
            rank_0.coming.done(60)
        steps.append(rank_0.heard(np.array([rank_0.said(0, 1)], np.float64), Seat(0, 0, 1, 0, "")))
    came.set()
    assert steps == [Step.CONNECT, Step.CONNECT, Step.SWITCH if ready else Step.STAY]
    assert seats.failures == (0 if ready else 1)


@pytest.mark.parametrize("owner_too", [False, True])
def test_an_epoch_ends_where_one_of_it_loses_its_seat_for_connecting_to_nobody(owner_too):
    ended, seats, steps = threading.Event(), Planned(), []
    rank_0 = Change(seats, lambda seat: ended.wait(60) and None)
    rank_0.begin(2)
    for failed in (False, False, True, False):
        own = rank_0.said(0, 2)
        own[-1] = failed and owner_too
        table = np.array([own, [Step.STAY, 0, 0, False, False, failed]], np.float64)
        steps.append(rank_0.heard(table, Seat(0, 0, 2, 0, "")))
    ended.set()
    assert steps == [Step.CONNECT] * 3 + [Step.STAY if owner_too else Step.END]
    assert (seats.failures, seats.blamed) == (1, [] if owner_too else [[1]])


def test_nobody_is_blamed_where_the_owner_cannot_connect_either_a_little_later():
    asked, seats = threading.Event(), Planned()

    def connect(seat):
        asked.wait(60)
        raise GroupLostError("no other learner joined")

    rank_0, seat = Change(seats, connect), Seat(0, 0, 2, 0, "")
    rank_0.begin(2)
    for failed in (False, False, True):
        said = np.array([rank_0.said(0, 2), [Step.STAY, 0, 0, False, False, failed]], np.float64)
        assert rank_0.heard(said, seat) == Step.CONNECT
    asked.set()
    until(lambda: rank_0.coming._results.qsize())
    assert rank_0.said(0, 2)[0] == Step.STAY
    assert (seats.failures, seats.blamed) == (1, [])


@pytest.mark.parametrize("how", ["killed", "leaves"])
def test_the_owner_learns_that_one_with_a_seat_is_gone(server, monkeypatch, how):
    monkeypatch.setattr(seating, "GONE_S", 240.0)  # of a machine that is busy
    context, seats = Context(), OwnSeats(server, "", StopSignal())
    assert seats.next(-1, 0.0).learners == 1
    client = joined(context, server)

    def asked():
        client.next_seat(-1, 0.1)
        return seats.wanted()

    until(asked)
    assert not seats.gone(), "nobody was to come"
    seat = seats.planned([0])
    until(lambda: client.next_seat(-1, 0.1))
    assert not seats.gone()
    if how == "leaves":
        client.close("done")
    else:
        context.destroy(linger=0)  # no BYE
        monkeypatch.setattr(seating, "GONE_S", 2.5)
    until(seats.gone)
    seats.failed(seat)
    assert not seats.gone(), "nobody is to come now"
    client.close("done")  # its thread would go on without a socket, and say so in the log of other tests
    context.destroy(linger=0)
