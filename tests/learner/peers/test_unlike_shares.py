"""Learners whose shares differ, or that have none: all make the same update, to the last bit."""

import contextlib
import threading

import numpy as np
import pytest
import torch.distributed as dist

from tests.agents.soft import CONTINUOUS
from tests.agents.unrolled import VECTOR
from tests.learner.peers.test_once import Given
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.config.algorithms import agent_model
from troupe.common.wire.control.messages import Seat
from troupe.services.learner.control.budget import StepBudget
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
    fields["ended"][:, 0] = steps == FIRST
    return Batch(fields, np.ones(ROWS, np.float32), np.full(ROWS, steps, np.int32), progress=PROGRESS)


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
                while team.updates == update:
                    team.learn(share, progress=PROGRESS)
            states[rank] = agent.state()[0]

    threads = [threading.Thread(target=learn, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name
