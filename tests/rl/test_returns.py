from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from troupe.common.rl import returns
from troupe.common.rl.importance import annealed, importance_weights


def test_double_q_target_by_hand():
    reward, discount = np.array([1.0, -2.0, 3.0]), np.array([0.97, 0.0, 0.5])
    online = np.array([[1.0, 2.0], [5.0, 4.0], [0.0, -1.0]])
    target = np.array([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]])
    want = [reward[i] + discount[i] * target[i, online[i].argmax()] for i in range(3)]
    got = returns.double_q_target(*map(torch.from_numpy, (reward, discount, online, target)))
    np.testing.assert_allclose(got.numpy(), want)
    np.testing.assert_allclose(
        returns.q_target(*map(torch.from_numpy, (reward, discount, target))).numpy(),
        reward + discount * target.max(1),
    )


@given(st.floats(-1e4, 1e4), st.sampled_from([1e-3, 1e-2, 0.1]))
def test_rescaling_has_its_inverse(x, epsilon):
    value = torch.tensor(x, dtype=torch.float64)
    h = returns.signed_hyperbolic(value, epsilon)
    assert h.item() == pytest.approx(
        np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + epsilon * x, rel=1e-9, abs=1e-12
    )
    assert returns.signed_parabolic(h, epsilon).item() == pytest.approx(x, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3, 1e-2])
def test_rescaling_keeps_its_digits_in_float32(epsilon):
    """Against decimals of 50 digits: of tiny values, of which differences leave nothing, and large ones."""
    with localcontext(prec=50):
        for size in (1e-30, 1e-7, 1e-4, 0.01, 1.0, 300.0, 1e6):
            x = torch.tensor(size)
            exact, e = Decimal(x.item()), Decimal(epsilon)
            h = (exact + 1).sqrt() - 1 + e * exact
            inverse = (((1 + 4 * e * (exact + 1 + e)).sqrt() - 1) / (2 * e)) ** 2 - 1
            for got, want in (
                (returns.signed_hyperbolic(x, epsilon), h),
                (returns.signed_parabolic(x, epsilon), inverse),
                (-returns.signed_hyperbolic(-x, epsilon), h),
                (-returns.signed_parabolic(-x, epsilon), inverse),
            ):
                assert got.item() == pytest.approx(float(want), rel=1e-6, abs=0)


@given(st.floats(-50, 50), st.sampled_from([0.5, 1.0, 3.0]))
def test_huber(error, delta):
    want = 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)
    assert returns.huber(torch.tensor(error, dtype=torch.float64), delta).item() == pytest.approx(want)


def test_importance_weights_by_hand():
    probabilities, beta = np.array([0.5, 0.1, 0.001, 0.399]), 0.4  # of four items
    raw = (4 * probabilities) ** -beta
    weights = importance_weights(probabilities[:2], 0.001, beta)
    # The item that would weigh 1 is in another shard's batch.
    np.testing.assert_allclose(weights, raw[:2] / raw.max(), rtol=1e-6)
    assert weights.dtype == np.float32
    assert importance_weights(np.array([0.001]), 0.001, beta) == 1.0
    np.testing.assert_array_equal(importance_weights(probabilities, 0.001, 0.0), 1.0)


def test_full_correction_makes_the_estimate_unbiased():
    """Batch by batch, for all batches are scaled alike."""
    rng = np.random.default_rng(0)
    values, probabilities = rng.normal(3.0, 1.0, 50), rng.dirichlet(np.ones(50))
    drawn = rng.choice(50, (50_000, 4), p=probabilities)
    weights = importance_weights(probabilities[drawn], probabilities.min(), 1.0).astype(np.float64)
    estimate = (weights * values[drawn]).mean(axis=1).sum() / weights.mean(axis=1).sum()
    assert estimate == pytest.approx(values.mean(), abs=0.1)
    assert abs(values[drawn].mean() - values.mean()) > 0.1


def test_annealing():
    assert annealed(0.4, 1.0, 0, 100) == 0.4
    assert annealed(0.4, 1.0, 50, 100) == pytest.approx(0.7)
    assert annealed(0.4, 1.0, 500, 100) == 1.0
    assert annealed(0.4, 1.0, 500, 0) == 0.4


def test_munchausen_targets_are_the_papers():
    """Equation 2 of Vieillard et al. 2020, action by action in plain numpy."""
    rng = np.random.default_rng(0)
    q, next_q = rng.normal(size=(2, 6, 3))
    reward, action, discount = rng.normal(size=6), rng.integers(0, 3, 6), np.array([0.9] * 5 + [0.0])
    q[0] = [9.0, 0.0, 0.0]
    action[0] = 1  # its log-policy is below the clip
    wanted = []
    for b in range(6):
        policy = np.exp(q[b] / 0.5) / np.exp(q[b] / 0.5).sum()
        next_policy = np.exp(next_q[b] / 0.5) / np.exp(next_q[b] / 0.5).sum()
        bonus = max(-1.0, 0.5 * np.log(policy[action[b]]))
        value = sum(next_policy[a] * (next_q[b, a] - 0.5 * np.log(next_policy[a])) for a in range(3))
        wanted.append(reward[b] + 0.8 * bonus + discount[b] * value)
    tensors = map(torch.from_numpy, (reward, discount, action, q, next_q))
    targets = returns.munchausen_target(*tensors, alpha=0.8, tau=0.5, least=-1.0)
    np.testing.assert_allclose(targets.numpy(), wanted, rtol=1e-9)


def test_quantile_losses_are_the_papers():
    """Equation 3 of Dabney et al. 2018, pair by pair in plain numpy."""
    rng = np.random.default_rng(0)
    values, targets, shares = rng.normal(size=(2, 3)), 2 * rng.normal(size=(2, 4)), rng.random((2, 3))
    wanted = np.zeros(2)
    for b in range(2):
        for i in range(3):
            for j in range(4):
                error = targets[b, j] - values[b, i]
                size = abs(error)
                huber = 0.5 * error**2 if size <= 0.5 else 0.5 * (size - 0.25)
                wanted[b] += abs(shares[b, i] - (error < 0)) * huber / 0.5 / 4
    losses = returns.quantile_losses(*map(torch.from_numpy, (values, shares, targets)), delta=0.5)
    np.testing.assert_allclose(losses.numpy(), wanted, rtol=1e-9)
