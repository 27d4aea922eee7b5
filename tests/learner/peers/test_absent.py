"""A learner that asks for seats and does not come: the others must not wait for it for ever."""

import threading

import numpy as np
import pytest
import torch
from msgspec import UNSET

from tests.agents.unrolled import SMALL, VECTOR, random_batch
from tests.harness import Context, until
from tests.learner.peers.clients import joined
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config.algorithms import agent_model
from troupe.common.runtime import StopSignal
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers import seats
from troupe.services.learner.peers.group import GroupLostError, Meeting, ProcessGroup, joined_store
from troupe.services.learner.peers.seats import GivenSeats, OwnSeats
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters


@pytest.fixture
def absent(server):
    """Asks for one seat after the other, and never comes."""
    context, ended = Context(), threading.Event()
    client = joined(context, server)

    def ask():
        epoch = -1
        while not ended.is_set():
            seat = client.next_seat(epoch, 0.1)
            epoch = epoch if seat is None else seat.epoch

    thread = threading.Thread(target=ask)
    thread.start()
    yield client
    ended.set()
    thread.join()
    client.close("done")
    context.destroy(linger=0)


@pytest.mark.parametrize("network", ["", "203.0.113.0/24"], ids=["unreachable", "nowhere to meet"])
def test_the_owner_goes_on_without_one_that_does_not_come(server, absent, network):
    agent = make_agent(agent_model("policy_gradient")(**SMALL), VECTOR, seed=1)
    rng, counters = np.random.default_rng(1), RunCounters(1, StepBudget(1000))
    seats = OwnSeats(server, network, StopSignal())
    team = Team(agent, counters, seats, Rules(True, 3, network, timeout_s=0.5))
    until(lambda: server.seating.waits)
    batch = Batch(random_batch(rng, agent, 3), np.ones(3, np.float32))
    share = Share(lambda *told: batch, 3, 0.0)

    def learned():
        team.learn(share)
        return counters.updates >= 3

    until(learned)
    assert team.learners == 1
    team.close()


def test_one_that_goes_on_without_the_owner_asks_it_for_no_seat(server, monkeypatch):
    monkeypatch.setattr(seats, "SILENT_S", 0.0)
    context = Context()
    client = joined(context, server)
    given = GivenSeats(client, "", 60.0)
    monkeypatch.setattr(given._survivors, "seat", lambda ended: Seat(ended + 1, 0, 2, 1, "127.0.0.1"))
    assert given.next(3, 0.1)
    assert client._member.epoch_ended is UNSET, "every heartbeat asks"
    client.close("done")
    context.destroy(linger=0)


@pytest.mark.parametrize("ask", ["gather", "sum"])
def test_one_that_waits_goes_on_when_it_hears_that_another_has_left(ask):
    meeting, asked, ended = Meeting("127.0.0.1"), threading.Event(), threading.Event()

    def group(rank, over):
        store = joined_store("127.0.0.1", meeting.port, 60.0)
        return ProcessGroup(store, 0, rank, 2, "127.0.0.1", 240.0, over)

    def stay():  # connected, and silent
        silent = group(1, lambda: False)
        ended.wait(120)
        silent.close()

    thread = threading.Thread(target=stay)
    thread.start()
    waits = group(0, lambda: asked.is_set() or asked.set())
    with pytest.raises(GroupLostError, match="another has left the epoch"):
        getattr(waits, ask)(torch.zeros(3))
    ended.set()
    waits.close()
    thread.join()


class Late:
    """A collective that is complete just after one has stopped waiting for it."""

    def __init__(self, work):
        self._work, self._given_up = work, False

    def is_completed(self):
        return self._given_up

    def wait(self, timeout=None):
        self._work.wait()
        if not self._given_up:
            self._given_up = True
            raise RuntimeError("Operation timed out!")


def test_what_is_complete_just_after_a_look_is_not_lost():
    meeting, sums = Meeting("127.0.0.1"), {}

    def add(rank):
        store = joined_store("127.0.0.1", meeting.port, 60.0)
        group = ProcessGroup(store, 0, rank, 2, "127.0.0.1", 240.0)
        sums[rank] = torch.ones(3)
        group._wait(Late(group._group.allreduce([sums[rank]])))
        group.close()

    thread = threading.Thread(target=add, args=(1,))
    thread.start()
    add(0)
    thread.join()
    assert sums[0].tolist() == sums[1].tolist() == [2.0, 2.0, 2.0]
