"""Agreement with DeepMind's rlax, where it is installed (`pip install rlax`); it is no dependency."""

import numpy as np
import pytest
import torch

from tests.rl import oracles
from troupe.common.rl import policy, policy_losses, returns, sequences
from troupe.common.rl.vtrace import vtrace

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


def test_clipped_surrogate():
    rng = np.random.default_rng(1)
    log_ratio, advantages = rng.normal(size=(2, 50)) * 0.4
    got = policy_losses.clipped_surrogate(torch.from_numpy(log_ratio), torch.from_numpy(advantages), 0.2)
    want = rlax.clipped_surrogate_pg_loss(jax.numpy.exp(log_ratio), jax.numpy.asarray(advantages), 0.2)
    np.testing.assert_allclose(got.mean(), want, rtol=1e-6)


def test_vmpo():
    rng = np.random.default_rng(2)
    log_probs, advantages = -rng.random(40), rng.normal(size=40)
    got = policy_losses.vmpo_loss(
        torch.from_numpy(log_probs),
        torch.from_numpy(advantages),
        torch.tensor(0.7, dtype=torch.float64),
        0.1,
    )
    ones, constraint = np.ones(40), rlax.LagrangePenalty(jax.numpy.asarray(0.7), jax.numpy.asarray(0.1))
    temperature_loss, weights, _ = rlax.vmpo_compute_weights_and_temperature_loss(
        *map(jax.numpy.asarray, (advantages, ones, ones)), constraint, lambda x: x, 0.5
    )
    np.testing.assert_allclose(got[0], -(np.asarray(weights) * log_probs).sum(), rtol=1e-6)
    np.testing.assert_allclose(got[1], temperature_loss, rtol=1e-6)


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_targets_of_pqn_are_those_of_q_lambda(s, lambda_):
    rng = np.random.default_rng(3)
    q, actions = rng.normal(size=(STEPS + 1, BATCH, 4)), rng.integers(0, 4, (STEPS, BATCH))
    rewards, discounts, continues = tensors(s, "rewards", "discounts", "continues")
    best = torch.from_numpy(q[1:].max(-1))
    got = sequences.lambda_returns(rewards, discounts, best, continues, lambda_).numpy()
    for b in range(BATCH):
        want = rlax.q_lambda(
            column(q[:-1], b), column(actions, b), column(s["rewards"], b), column(s["discounts"], b),
            column(q[1:], b), lambda_,
        )  # fmt: skip
        taken = np.take_along_axis(q[:-1, b], actions[:, b, None], -1)[:, 0]
        np.testing.assert_allclose(got[:, b] - taken, want, rtol=1e-6, atol=1e-9)


def test_divergence():
    logits, others = np.random.default_rng(4).normal(size=(2, 4, 6))
    want = rlax.categorical_kl_divergence(*map(jax.numpy.asarray, (logits, others)))
    np.testing.assert_allclose(policy.kl(*map(torch.from_numpy, (logits, others))), want, rtol=1e-6)
