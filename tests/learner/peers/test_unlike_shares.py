"""Learners whose shares differ, or that have none: all make the same update, to the last bit."""

import contextlib
import threading

import numpy as np
import pytest
import torch.distributed as dist

from tests.agents.soft import CONTINUOUS
from tests.agents.unrolled import VECTOR
from tests.harness import until
from tests.learner.peers.test_once import Given
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config import load_config
from troupe.common.config.algorithms import agent_model
from troupe.common.data import sample as data
from troupe.common.wire.control.messages import Seat
from troupe.common.wire.replay.codec import SampleBatch
from troupe.services.learner.batches.mixture import Mixture
from troupe.services.learner.control.budget import StepBudget
from troupe.services.learner.peers.shares import Shares, Wish
from troupe.services.learner.peers.team import Rules, Share, Team
from troupe.services.learner.saving.counters import RunCounters

ROWS, PROGRESS = 3, 0.75
NETWORK = {"mlp_units": (8,), "hidden_units": 8}
UNROLLS = {"unroll_steps": 5, "learning_rate_schedule": "linear"}
SEQUENCES = {"lstm_units": 8, "sequence_steps": 6, "sequence_period_steps": 3, "burn_in_steps": 4}
FIRST = 6
"""Steps of the first sequence of an episode, which has no burn-in."""
CASES = {
    "impala": (UNROLLS, VECTOR, 0),
    "pqn": (UNROLLS, VECTOR, 0),
    "sac": (SEQUENCES, CONTINUOUS, 0),
    "sac, first sequences": (SEQUENCES, CONTINUOUS, FIRST),
}
"""Fields of the agent, what it sees, and steps of the items of the second learner, if it has any."""


def agent_for(case, seed):
    fields, spec, _ = CASES[case]
    model = agent_model(case.split(",")[0])
    return make_agent(model(**NETWORK, **fields), spec, seed=seed)


def batch_of(agent, seed, steps):
    """Items of so many steps; sequences of `FIRST` steps begin an episode."""
    rng, fields = np.random.default_rng(seed), {}
    for spec in agent.fields:
        shape = ROWS, spec.entries(steps), *spec.shape
        fields[spec.name] = rng.uniform(-0.9, 0.9, shape).astype(spec.dtype)
    if not agent.spec.actions.reals:
        fields["action"] = rng.integers(0, 4, fields["action"].shape).astype(np.int32)
    if "ended" in fields:
        fields["ended"][:, 0] = steps == FIRST
    return Batch(fields, np.ones(ROWS, np.float32), np.full(ROWS, steps, np.int32), progress=PROGRESS)


def in_threads(learn):
    """Two learners at the same time; `learn` is given the rank."""
    threads = [threading.Thread(target=learn, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("case", CASES)
def test_all_have_the_same_state_after_updates_of_shares_that_differ(case):
    store, states = dist.HashStore(), {}

    def learn(rank):
        agent = agent_for(case, rank)
        counters, seats = RunCounters(1, StepBudget(1000)), Given(store, Seat(0, rank, 2, 0, "127.0.0.1"))
        team = Team(agent, counters, seats, Rules(rank == 0, ROWS, timeout_s=30.0))
        steps = CASES[case][2] if rank else agent.item_steps[1]
        with contextlib.closing(team):
            for update in range(2):
                share = None
                if steps:
                    batch = batch_of(agent, update, steps)
                    share = Share(lambda *told, batch=batch: batch, ROWS, 0.0)
                until(
                    lambda update=update: team.updates > update,
                    step=lambda share=share: team.learn(share, progress=PROGRESS),
                )
            states[rank] = agent.state()[0]

    in_threads(learn)
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


class Drawn:
    """Gives one batch of replay, as a `Prefetcher` does."""

    def __init__(self, sample):
        self._sample = sample

    def get(self, timeout_s):
        return self._sample

    def placed(self, batch):
        return {}

    def share(self, shares, *, ahead, held):
        pass

    def permit(self):
        pass

    def put_priorities(self, batch, priorities):
        pass


def test_importance_weights_are_those_of_one_learner_with_the_whole_batch():
    config = load_config("cartpole-apex", None, {"replay.batch_size": str(2 * ROWS)}, {})
    chances = np.array([0.2, 0.05, 0.4, 0.1, 0.7, 0.3])
    store, weights = dist.HashStore(), {}

    def learn(rank):
        agent = make_agent(config.agent, VECTOR, seed=rank)
        own = chances[rank * ROWS : (rank + 1) * ROWS]
        items = batch_of(agent, rank, agent.item_steps[1])
        items.fields["discount"][:], items.fields["bootstrap_steps"][:] = 0.9, 1
        sample = SampleBatch(
            ids=np.arange(ROWS, dtype=np.uint64),
            probabilities=own,
            versions=np.zeros(ROWS, np.int64),
            lengths=items.lengths,
            table_items=100,
            min_probabilities={"default": own.min()},
            fields=items.fields,
            shares=[data.Share("default", ROWS, 100, 1.0)],
        )
        update = agent.update

        def watched(batch):
            weights[rank] = batch.weights
            return update(batch)

        counters, seats = RunCounters(1, StepBudget(1000)), Given(store, Seat(0, rank, 2, 0, "127.0.0.1"))
        team = Team(agent, counters, seats, Rules.of(config, owner=rank == 0), watched)
        shares = Shares(config, agent, Drawn(sample), Mixture(config), team)
        with contextlib.closing(team):
            wish = Wish(beta=0.0 if rank else 0.6)
            until(lambda: team.updates, step=lambda: shares.learn(1.0, lambda: wish))

    in_threads(learn)
    np.testing.assert_allclose(np.concatenate([weights[0], weights[1]]), (chances / 0.05) ** -0.6, rtol=1e-6)
