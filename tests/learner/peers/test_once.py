"""A share is learned from once, whatever becomes of the learners that it is brought to."""

import contextlib
import threading

import numpy as np
import torch.distributed as dist

from tests.agents.unrolled import SMALL, VECTOR, random_batch
from tests.harness import until
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config.algorithms import agent_model
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers.group import GroupLostError
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

ROWS = 3


class Given:
    """Seats one after the other; who sits alone is to leave again."""

    def __init__(self, store, *seats):
        self._store, self._seats = store, list(seats)
        self._seat = None

    def next(self, ended, timeout_s):
        self._seat = next((seat for seat in self._seats if seat.epoch > ended), None)
        return self._seat

    def wanted(self):
        return self._seat is not None and self._seat.learners == 1

    def planned(self, staying):
        return None

    def over(self):
        return False

    def silent_s(self):
        return None

    def begun(self, group, seat):
        pass

    def failed(self, seat):
        pass

    def store(self, seat):
        return self._store


def make_team(seed, seats, *, owner):
    agent = make_agent(agent_model("policy_gradient")(**SMALL), VECTOR, seed=seed)
    rules = Rules(owner, 2 * ROWS, timeout_s=30.0)
    return agent, Team(agent, RunCounters(1, StepBudget(1000)), seats, rules)


def make_share(agent, seed):
    batch = Batch(random_batch(np.random.default_rng(seed), agent, ROWS), np.ones(ROWS, np.float32))
    return Share(lambda *told: batch, ROWS, 0.0)


@contextlib.contextmanager
def beside(first, agent, second):
    """`first` learns on a thread; both are closed at the end, `second` before: the other may wait for it."""
    done = threading.Event()

    def learn():
        while not done.is_set():
            first.learn(make_share(agent, 1))

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        yield
    finally:
        done.set()
        second.close()
        thread.join()
        first.close()


def test_a_share_of_an_update_that_others_completed_is_not_brought_again_two_epochs_later():
    store = dist.HashStore()
    together = [Seat(epoch, rank, 2, 0, "127.0.0.1") for epoch in (0, 2) for rank in (0, 1)]
    owner, first = make_team(1, Given(store, *together[0::2]), owner=True)
    # In between it has a seat alone, and gives it up without an update.
    alone = Seat(1, 0, 1, 0, "")
    other, second = make_team(2, Given(store, together[1], alone, together[3]), owner=False)

    with beside(first, owner, second):
        learn, brought = other.update, []

        def lose(batch):
            learn(batch)  # so the other one has all that it needs of this
            brought.append(batch)
            raise GroupLostError("the connection ends at the last message")

        other.update = lose
        share = make_share(other, 2)
        assert not second.learn(share).taken
        assert (second.updates, len(brought)) == (0, 1)
        assert not second.learn(share).taken  # alone
        learned = second.learn(share)
        assert second.updates == 1, "it has what the other one made of the share"
        assert learned.taken
        assert not learned.moved
        assert len(brought) == 1


def test_one_that_leaves_while_the_owner_is_away_does_not_wait_for_it():
    store = dist.HashStore()
    teams = [
        make_team(seed, Given(store, Seat(0, seed, 2, 0, "127.0.0.1")), owner=seed == 0) for seed in (0, 1)
    ]
    (lead, first), (other, second) = teams

    with beside(first, lead, second):
        until(lambda: second.learn(make_share(other, 2)).moved)
        assert second.let_go()
