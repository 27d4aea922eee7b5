"""A time limit says nothing of what a state is worth: fixed points of what is stored in an endless chain.

Two places follow each other for ever; the first pays 1.2, the second 1.5, and gamma is 0.9. Episodes are only
cut. A table of values is replaced by the means of its own targets until it stands still; were a cut taken for
an end, or the next episode for what followed, it would stand elsewhere.
"""

import numpy as np
import pytest
import torch

from troupe.common.data.accumulators.n_step import NStepAccumulator
from troupe.common.data.accumulators.sequences import BETWEEN
from troupe.common.data.accumulators.unrolls import TERMINATED, TRUNCATED, UnrollAccumulator
from troupe.common.data.schema import SlotStep
from troupe.common.rl.sequences import (
    generalized_advantages,
    lambda_returns,
    n_step_returns,
    next_values,
    without_old_ends,
)
from troupe.common.rl.vtrace import vtrace

GAMMA = 0.9
REWARDS = np.array([1.2, 1.5])
WORTH = (REWARDS + GAMMA * REWARDS[::-1]) / (1 - GAMMA**2)
ROUNDS = 200


def played(accumulator, table, seed, steps=60, terminates=False):
    """Chunks of a slot whose episodes have 1 to 6 steps, with values of `table` as an actor has them."""
    rng, chunks, left = np.random.default_rng(seed), [], 0
    for _ in range(steps):
        if not left:
            place, left = int(rng.integers(2)), int(rng.integers(1, 7))
            accumulator.start(np.array([place], np.float32))
        follows = 1 - place
        left -= 1
        chunks += accumulator.add(SlotStep(
            0, REWARDS[place], {"value_taken": table[place], "value_max": table[place], "behaviour": [0.0]},
            np.array([follows], np.float32), terminates and not left, not terminates and not left,
            table[follows],
        ))  # fmt: skip
        place = follows
    return chunks + accumulator.flush()


def settled(targets):
    """The table that its own targets leave as it is; `targets(table, seed)` gives places and their worth."""
    table = np.zeros(2)
    for seed in range(ROUNDS):
        places, worth = targets(table, seed)
        table = np.array([worth[places == place].mean() for place in (0, 1)])
    return table


def transitions(n_steps, terminates=False):
    def targets(table, seed):
        places, worth = [], []
        for chunk in played(NStepAccumulator(n_steps, GAMMA, 7, 0), table, seed, terminates=terminates):
            for offset in chunk.offsets:
                fields = {
                    name: chunk.fields[name][offset] for name in ("reward", "discount", "bootstrap_steps")
                }
                after = chunk.fields["obs"][offset + fields["bootstrap_steps"], 0]
                places.append(chunk.fields["obs"][offset, 0])
                worth.append(fields["reward"] + fields["discount"] * table[int(after)])
        return np.array(places, int), np.array(worth)

    return targets


def unrolls(estimator, terminates=False, replayed=False):
    def targets(table, seed):
        accumulator = UnrollAccumulator(8, 0, 0)
        said = np.zeros(2) if replayed else table  # the first network has acted
        chunks = played(accumulator, said, seed, steps=64, terminates=terminates)
        stored = {
            name: np.stack([chunk.fields[name] for chunk in chunks], axis=1)
            for name in ("obs", "reward", "ended", "final_value")
        }
        places, ended = stored["obs"][..., 0].astype(int), torch.from_numpy(stored["ended"][1:])
        assert (stored["ended"] != BETWEEN).all()
        values = torch.from_numpy(table)[torch.from_numpy(places)]
        following = next_values(values, ended == TRUNCATED, torch.from_numpy(stored["final_value"]).double())
        discounts, continues = GAMMA * (ended != TERMINATED).double(), (ended == 0).double()
        rewards = torch.from_numpy(stored["reward"][1:]).double()
        if replayed:
            rows = torch.ones(ended.shape[1], dtype=torch.bool)
            rewards, discounts = without_old_ends(rewards, discounts, values[:-1], ended == TRUNCATED, rows)
        steps = rewards, discounts, following, continues
        if estimator == "gae":
            advantages = generalized_advantages(rewards, discounts, values[:-1], following, continues, 0.8)
            worth = advantages + values[:-1]
        elif estimator == "vtrace":
            zeros = torch.zeros_like(rewards)
            worth = vtrace(zeros, rewards, discounts, values[:-1], following, continues).targets
        elif estimator == "lambda":
            worth = lambda_returns(*steps, 0.7)
        else:
            worth = n_step_returns(*steps, 3)
        return places[:-1], worth.numpy()

    return targets


@pytest.mark.parametrize("n_steps", [1, 3])
def test_transitions_of_episodes_that_are_cut_are_worth_what_goes_on(n_steps):
    np.testing.assert_allclose(settled(transitions(n_steps)), WORTH, rtol=1e-5)


@pytest.mark.parametrize("replayed", [False, True], ids=["fresh", "replayed"])
@pytest.mark.parametrize("estimator", ["gae", "vtrace", "lambda", "n_step"])
def test_unrolls_of_episodes_that_are_cut_are_worth_what_goes_on(estimator, replayed):
    np.testing.assert_allclose(settled(unrolls(estimator, replayed=replayed)), WORTH, rtol=1e-5)


@pytest.mark.parametrize("targets", [transitions(3, True), unrolls("gae", True)], ids=["items", "unrolls"])
def test_an_end_is_worth_nothing(targets):
    """The same chain with ends at the same places is worth far less."""
    assert (settled(targets) < 0.6 * WORTH).all()
