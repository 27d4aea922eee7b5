"""Updates that go on after they were begun, as on a GPU: what waits for them, and what does not."""

import math

import numpy as np
import pytest

from tests.agents.contract import played
from tests.harness import Context, Shard, insert, until
from tests.replay.learners import learnable
from troupe.common.agents import make_agent
from troupe.common.config import load_config
from troupe.common.envs import make_spec
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.replay.client import ReplayClient
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.batches.prefetch import Prefetcher
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers.shares import Shares, Wish
from troupe.services.learner.peers.team import Rules, Team
from troupe.services.learner.saving.counters import RunCounters

ROWS = 8


class Alone:
    """Seats of a learner that stays the only one."""

    def next(self, ended, timeout_s):
        return Seat(epoch=1, rank=0, learners=1, port=0, host="")

    def wanted(self):
        return False


class Begun:
    """An update whose results are there when somebody waits for them."""

    def __init__(self, batch, update, waited):
        self._fields, self._update, self._waited = batch.fields, update, waited
        self._before = {name: array.copy() for name, array in batch.fields.items()}

    def settled(self):
        for name, array in self._fields.items():
            np.testing.assert_array_equal(array, self._before[name], err_msg="it was still learned from")
        self._waited.append(self._update)
        return self._update


@pytest.fixture
def context():
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("exponent", [0.6, 0.0])
def test_the_next_update_begins_before_the_one_before_is_waited_for(context, tmp_path, exponent):
    words = {"replay.batch_size": ROWS, "learner.prefetch": 2, "replay.priority_exponent": exponent}
    config = load_config("cartpole-apex", None, {name: str(word) for name, word in words.items()}, {})
    agent = make_agent(config.agent, make_spec(config.env), seed=1)
    shard = Shard(
        context, tmp_path / "shard", f"ipc://{tmp_path}/shard.socket", capacity=1000, min_items=ROWS
    )
    actor = ReplayClient(shard.endpoint, name="actor", ctx=context, specs=agent.fields)
    for chunk in played(agent, config.env):
        insert(actor, chunk)
    prefetch = Prefetcher(context, lambda: [shard.endpoint], kept={"default"}, depth=2)
    begun, waited = [], []

    def update(batch):
        begun.append(agent.update(batch))
        return Begun(batch, begun[-1], waited)

    team = Team(agent, RunCounters(1, StepBudget(1000)), Alone(), Rules(owner=True, batch_rows=ROWS), update)
    team._inspection._next_s = math.inf  # it would look at the first with metrics, kernel by kernel
    shares = Shares(config, agent, prefetch, Mixture(config), team)
    prefetch.start()
    try:
        lessons = []
        for count in range(1, 5):
            until(
                lambda count=count: len(begun) == count, step=lambda: lessons.append(shares.learn(5.0, Wish))
            )
            assert len(waited) == count - 1
        assert [each.update for each in lessons if each] == [None] * 4
        # One with metrics is waited for, as these are wanted now.
        lessons.clear()
        until(
            lambda: any(lessons), step=lambda: lessons.append(shares.learn(5.0, lambda: Wish(measure=True)))
        )
        assert lessons[-1].update is begun[-1]
        assert waited == begun
        until(lambda: len(begun) == 6, step=lambda: shares.learn(5.0, Wish))
        assert waited == begun[:-1]
        # Where no more come, the last one is waited for at once.
        prefetch.share({}, ahead=0, held=False)
        until(lambda: shares.learn(0.05, Wish) is None)
        assert waited == begun
        # What is drawn without regard to priorities is told none.
        told = ROWS * len(begun) if exponent else 0
        until(lambda: shard.replay.counters.updated_priorities == told)
    finally:
        prefetch.stop()
        actor.close()
        shard.end()


def test_items_that_cannot_be_learned_from_are_told_a_priority_once(context, tmp_path):
    config = load_config("cartpole-apex", None, {"replay.batch_size": str(ROWS)}, {})
    agent = make_agent(config.agent, make_spec(config.env), seed=1)
    shard = Shard(
        context, tmp_path / "shard", f"ipc://{tmp_path}/shard.socket", capacity=1000, min_items=2 * ROWS
    )
    actor = ReplayClient(shard.endpoint, name="actor", ctx=context, specs=agent.fields)
    for reward in (0.0, np.nan):
        insert(actor, learnable(agent.fields, ROWS, reward=reward))
    prefetch = Prefetcher(context, lambda: [shard.endpoint], kept={"default"}, depth=1)
    learned = []

    def update(batch):
        learned.append(len(batch.lengths))
        return agent.update(batch)

    team = Team(agent, RunCounters(1, StepBudget(1000)), Alone(), Rules(owner=True, batch_rows=ROWS), update)
    shares = Shares(config, agent, prefetch, Mixture(config), team)
    prefetch.start()
    try:
        until(lambda: shares.learn(5.0, Wish) and shares.usable.left_out)
        prefetch.share({}, ahead=0, held=False)
        until(lambda: shares.learn(0.05, Wish) is None and not prefetch._replay.outstanding_samples)
        told = sum(learned) + shares.usable.left_out
        until(lambda: shard.replay.counters.updated_priorities >= told)
        prefetch.stop()  # sends the rest
        actor.status()
        assert shard.replay.counters.updated_priorities == told
    finally:
        prefetch.stop()
        actor.close()
        shard.end()
