"""Agreement with torchrl, where it is installed (`pip install torchrl`); it is no dependency.

Unlike rlax it tells an episode that was cut from one that is over, so both are in these sequences.
"""

import numpy as np
import pytest
import torch

from tests.rl import oracles
from troupe.common.rl import sequences
from troupe.common.rl.distributions import TanhNormal
from troupe.common.rl.vtrace import vtrace

functional = pytest.importorskip("torchrl.objectives.value.functional")
GAMMA = 0.9  # that of the oracles' sequences


@pytest.fixture
def s():
    sequence = oracles.random_sequences(np.random.default_rng(3), 24, 4)
    assert sequence["truncated"].any()
    assert (sequence["discounts"] == 0).any()
    return {name: torch.from_numpy(array) for name, array in sequence.items()}


def theirs(s, *names):
    """Arrays `[T, B]` as `[B, T, 1]`, and how episodes end."""
    ends = {"done": s["continues"] == 0, "terminated": s["discounts"] == 0}
    laid = {name: array.T[..., None] for name, array in (s | ends).items()}
    return [laid[name] for name in names], {name: laid[name] for name in ends}


def close(ours, other):
    np.testing.assert_allclose(ours, other[..., 0].T, rtol=2e-6, atol=2e-6)  # its gamma is float32


@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_generalized_advantages(s, lambda_):
    arrays, ends = theirs(s, "values", "next_values", "rewards")
    want, _ = functional.generalized_advantage_estimate(GAMMA, lambda_, *arrays, **ends)
    names = ("rewards", "discounts", "values", "next_values", "continues")
    close(sequences.generalized_advantages(*(s[name] for name in names), lambda_), want)


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_lambda_returns(s, lambda_):
    arrays, ends = theirs(s, "next_values", "rewards")
    want = functional.td_lambda_return_estimate(GAMMA, lambda_, *arrays, **ends)
    names = ("rewards", "discounts", "next_values", "continues")
    close(sequences.lambda_returns(*(s[name] for name in names), lambda_), want)


@pytest.mark.parametrize(("rho_bar", "c_bar"), [(1.0, 1.0), (0.8, 1.2), (5.0, 0.5)])
def test_vtrace(s, rho_bar, c_bar):
    log_rhos = torch.from_numpy(np.random.default_rng(5).normal(size=(24, 4)))
    zeros = torch.zeros_like(log_rhos)
    arrays, ends = theirs(s | {"pi": log_rhos, "mu": zeros}, "pi", "mu", "values", "next_values", "rewards")
    advantages, targets = functional.vtrace_advantage_estimate(
        GAMMA, *arrays, **ends, rho_thresh=rho_bar, c_thresh=c_bar
    )
    names = ("rewards", "discounts", "values", "next_values", "continues")
    got = vtrace(log_rhos, *(s[name] for name in names), rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=rho_bar)
    close(got.targets, targets)
    close(got.advantages, advantages)


def test_density_of_squashed_normals():
    ours = TanhNormal(3, "softplus", floor=0.05, start=0.8)
    rng = np.random.default_rng(6)
    params = torch.from_numpy(rng.normal(size=(40, ours.size)))
    actions = torch.from_numpy(rng.uniform(-0.99, 0.99, size=(40, 3)))  # further out we spread the tail
    mean, deviation = ours.moments(params)
    modules = pytest.importorskip("torchrl.modules")
    want = modules.TanhNormal(mean, deviation, tanh_loc=False, event_dims=1).log_prob(actions)
    np.testing.assert_allclose(ours.log_prob(params, actions), want, rtol=1e-6)
