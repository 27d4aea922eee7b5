import numpy as np
import pytest
import torch

from tests.rl import oracles
from troupe.common.rl.replayed import cloning, implied_kl, trusted_steps
from troupe.common.rl.sequences import lambda_returns, n_step_returns, without_old_ends
from troupe.common.rl.vtrace import vtrace

STEPS, ROWS = 7, 4
REPLAYED = np.array([True, False, True, False])


def numbers(seed):
    return np.random.default_rng(seed).normal(size=(STEPS, ROWS))


def test_replayed_rows_are_held_to_what_they_were_and_fresh_ones_are_not():
    divergence, values, stored = abs(numbers(0)), numbers(1), numbers(2)
    got = cloning(
        *map(torch.tensor, (divergence, values, stored, REPLAYED)), policy_cost=0.3, value_cost=0.7
    ).numpy()
    for t in range(STEPS):
        for b in range(ROWS):
            want = 0.3 * divergence[t, b] + 0.7 * (values[t, b] - stored[t, b]) ** 2 if REPLAYED[b] else 0.0
            assert np.isclose(got[t, b], want)
    only = cloning(
        torch.tensor(divergence),
        torch.tensor(values),
        None,
        torch.tensor(REPLAYED),
        policy_cost=0.3,
        value_cost=0.7,
    )
    np.testing.assert_allclose(only.numpy(), 0.3 * divergence * REPLAYED)


def test_only_replayed_steps_can_leave_the_trust_region():
    divergence = np.array([[0.1, 0.9, 0.5, 0.1], [0.51, 0.2, 0.5, 9.0]])
    got = trusted_steps(torch.tensor(divergence), 0.5, torch.tensor(REPLAYED))
    assert got.tolist() == [[True, True, True, True], [False, True, True, True]]


@pytest.mark.parametrize("rho_bar", [0.5, 1.0, 2.0])
def test_the_implied_policy_is_the_normalised_lesser_of_both(rho_bar):
    rng = np.random.default_rng(4)
    logits, behaviour = 2.0 * rng.normal(size=(2, STEPS, ROWS, 5))
    got = implied_kl(torch.tensor(logits), torch.tensor(behaviour), rho_bar).numpy()
    for t in range(STEPS):
        for b in range(ROWS):
            pi, mu = (np.exp(x[t, b]) / np.exp(x[t, b]).sum() for x in (logits, behaviour))
            implied = np.minimum(rho_bar * mu, pi)
            implied /= implied.sum()
            assert np.isclose(got[t, b], (pi * np.log(pi / implied)).sum())


def test_no_clipped_weight_is_no_divergence():
    logits = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]], dtype=torch.float64)
    assert not implied_kl(logits, -logits, None).any()
    assert np.allclose(implied_kl(logits, logits + 7.0, 1.0), 0.0)
    assert np.allclose(implied_kl(logits, torch.zeros_like(logits), 2.0), 0.0), "no weight is above 2"
    far = implied_kl(torch.tensor([80.0, -80.0]), torch.tensor([-80.0, 80.0]), 1.0)
    assert torch.isfinite(far)
    assert far >= 0


def test_vtrace_of_trusted_steps_is_the_sum_of_products():
    rng = np.random.default_rng(3)
    s = oracles.random_sequences(rng, steps=9, batch=5)
    log_rhos, trusted = rng.normal(size=(9, 5)), rng.random((9, 5)) < 0.7
    arguments = ("rewards", "discounts", "values", "next_values", "continues")
    got = vtrace(
        torch.tensor(log_rhos),
        *(torch.tensor(np.asarray(s[name], float)) for name in arguments),
        rho_bar=1.2,
        c_bar=1.0,
        pg_rho_bar=1.5,
        lambda_=0.9,
        trusted=torch.tensor(trusted),
    )
    vs, advantages = oracles.vtrace(s, log_rhos, 1.2, 1.0, 1.5, 0.9, trusted)
    np.testing.assert_allclose(got.targets, vs)
    np.testing.assert_allclose(got.advantages, advantages)
    np.testing.assert_array_equal(got.targets.numpy()[~trusted], s["values"][~trusted])
    assert not got.advantages.numpy()[~trusted].any()


@pytest.mark.parametrize("estimator", ["vtrace", "lambda", "n_step"])
def test_a_replayed_episode_that_was_cut_off_ends_one_step_earlier(estimator):
    """With today's value of the observation before its last step, whatever was thought of the one after."""
    rng = np.random.default_rng(5)
    s, log_rhos = oracles.random_sequences(rng, 9, 6, end=0.7), rng.normal(size=(9, 6))
    replayed = np.array([True, False, True, True, False, True])
    old = s["truncated"] & replayed
    assert old[1:].any()
    earlier = np.vstack([old[1:], np.zeros((1, 6), bool)]) & (s["continues"] == 1)
    shorter = s | {
        "continues": np.where(earlier, 0.0, s["continues"]),
        "next_values": np.where(earlier, s["bootstrap"][1:], s["next_values"]),
    }
    rewards, discounts = without_old_ends(
        *map(torch.tensor, (s["rewards"], s["discounts"], s["values"], s["truncated"], replayed))
    )
    values, following, continues = (torch.tensor(s[name]) for name in ("values", "next_values", "continues"))
    if estimator == "vtrace":
        clips = {"rho_bar": 1.2, "c_bar": 1.0, "pg_rho_bar": 1.5, "lambda_": 0.9}
        got = vtrace(torch.tensor(log_rhos), rewards, discounts, values, following, continues, **clips)
        want, advantages = oracles.vtrace(shorter, log_rhos, *clips.values())
        np.testing.assert_allclose(got.advantages, np.where(old, 0.0, advantages), atol=1e-12)
        got = got.targets
    elif estimator == "lambda":
        got = lambda_returns(rewards, discounts, following, continues, 0.8)
        want = oracles.lambda_return(shorter, 0.8)
    else:
        got = n_step_returns(rewards, discounts, following, continues, 3)
        want = oracles.n_step(shorter, 3)
    np.testing.assert_allclose(got, np.where(old, s["values"], want), atol=1e-12)
