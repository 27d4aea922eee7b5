"""Agreement with DeepMind's rlax, where it is installed (`pip install rlax`); it is no dependency."""

import numpy as np
import pytest
import torch

from common.rl import policy, returns, sequences
from common.rl.vtrace import vtrace
from tests.rl import oracles

rlax = pytest.importorskip("rlax")
jax = pytest.importorskip("jax")
jax.config.update("jax_enable_x64", True)

STEPS, BATCH = 12, 3


@pytest.fixture
def s():
    """Episodes that terminate: rlax knows no truncation inside a sequence."""
    sequence = oracles.random_sequences(np.random.default_rng(3), STEPS, BATCH, end=0.0)
    terminated = np.random.default_rng(4).random((STEPS, BATCH)) < 0.2
    return {**sequence, "discounts": 0.9 * (1.0 - terminated), "continues": 1.0 - terminated}


def column(array, b):
    return jax.numpy.asarray(array[:, b])


def tensors(s, *names):
    return [torch.from_numpy(s[name]) for name in names]


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_vtrace(s, lambda_):
    log_rhos = np.random.default_rng(5).normal(size=(STEPS, BATCH))
    got = vtrace(
        torch.from_numpy(log_rhos),
        *tensors(s, "rewards", "discounts", "values", "next_values", "continues"),
        rho_bar=0.8,
        pg_rho_bar=1.2,
        lambda_=lambda_,
    )
    for b in range(BATCH):
        want = rlax.vtrace_td_error_and_advantage(
            column(s["values"], b), column(s["next_values"], b), column(s["rewards"], b),
            column(s["discounts"], b), column(np.exp(log_rhos), b), lambda_, 0.8, 1.2,
        )  # fmt: skip
        np.testing.assert_allclose(got.targets[:, b].numpy() - s["values"][:, b], want.errors, rtol=1e-6)
        if lambda_ == 1.0:  # rlax mixes lambda into the bootstrap of its advantages; the paper does not
            np.testing.assert_allclose(got.advantages[:, b], want.pg_advantage, rtol=1e-6)


@pytest.mark.parametrize("lambda_", [0.0, 0.9, 1.0])
def test_lambda_returns_and_advantages(s, lambda_):
    got = sequences.lambda_returns(*tensors(s, "rewards", "discounts", "next_values", "continues"), lambda_)
    gae = sequences.generalized_advantages(
        *tensors(s, "rewards", "discounts", "values", "next_values", "continues"), lambda_
    )
    for b in range(BATCH):
        r, d, v = (column(s[name], b) for name in ("rewards", "discounts", "next_values"))
        np.testing.assert_allclose(got[:, b], rlax.lambda_returns(r, d, v, lambda_), rtol=1e-6)
        values = column(s["bootstrap"], b)
        want = rlax.truncated_generalized_advantage_estimation(r, d, lambda_, values)
        np.testing.assert_allclose(gae[:, b], want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [1, 3, 5])
def test_n_step_returns(s, n):
    got = sequences.n_step_returns(*tensors(s, "rewards", "discounts", "next_values", "continues"), n)
    for b in range(BATCH):
        r, d, v = (column(s[name], b) for name in ("rewards", "discounts", "next_values"))
        np.testing.assert_allclose(got[:, b], rlax.n_step_bootstrapped_returns(r, d, v, n), rtol=1e-6)


def test_value_rescaling():
    x = np.linspace(-1e3, 1e3, 101)
    h = returns.signed_hyperbolic(torch.from_numpy(x))
    np.testing.assert_allclose(h, rlax.signed_hyperbolic(jax.numpy.asarray(x)), rtol=1e-6)
    inverse = returns.signed_parabolic(torch.from_numpy(x / 30))
    np.testing.assert_allclose(inverse, rlax.signed_parabolic(jax.numpy.asarray(x / 30)), rtol=1e-6)


def test_entropy():
    logits = np.random.default_rng(0).normal(size=(4, 6))
    want = rlax.softmax().entropy(jax.numpy.asarray(logits))
    np.testing.assert_allclose(policy.entropy(torch.from_numpy(logits)), want, rtol=1e-6)
