import numpy as np
import pytest
import torch

from tests.rl import oracles
from troupe.common.rl import returns, sequences
from troupe.common.rl.vtrace import vtrace

NAMES = ("rewards", "discounts", "next_values", "continues")


def tensors(s, *names):
    return [torch.from_numpy(np.asarray(s[name], np.float64)) for name in names]


@pytest.fixture(params=range(5))
def s(request):
    return oracles.random_sequences(np.random.default_rng(request.param), end=0.15 * request.param)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 30])
def test_n_step_returns_are_the_definition(s, n):
    got = sequences.n_step_returns(*tensors(s, *NAMES), n)
    np.testing.assert_allclose(got.numpy(), oracles.n_step(s, n), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_lambda_returns_and_advantages_are_the_forward_view(s, lambda_):
    want = oracles.lambda_return(s, lambda_)
    got = sequences.lambda_returns(*tensors(s, *NAMES), lambda_)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-9, atol=1e-9)
    arguments = tensors(s, "rewards", "discounts", "values", "next_values", "continues")
    advantages = sequences.generalized_advantages(*arguments, lambda_)
    np.testing.assert_allclose(advantages.numpy(), want - s["values"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("rho_bar", "c_bar", "pg_rho_bar", "lambda_"),
    [(1, 1, 1, 1.0), (0.7, 1.3, 2.0, 0.9), (None, 1, 1, 1.0), (1, None, 1, 0.5), (2.0, 1, None, 1.0)],
)
def test_vtrace_is_the_sum_of_products(s, rho_bar, c_bar, pg_rho_bar, lambda_):
    log_rhos = np.random.default_rng(7).normal(size=s["rewards"].shape)
    got = vtrace(
        torch.from_numpy(log_rhos),
        *tensors(s, "rewards", "discounts", "values", "next_values", "continues"),
        rho_bar=rho_bar, c_bar=c_bar, pg_rho_bar=pg_rho_bar, lambda_=lambda_,
    )  # fmt: skip
    vs, advantages = oracles.vtrace(s, log_rhos, rho_bar, c_bar, pg_rho_bar, lambda_)
    np.testing.assert_allclose(got.targets.numpy(), vs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got.advantages.numpy(), advantages, rtol=1e-9, atol=1e-9)


def test_vtrace_on_policy_is_the_lambda_return(s):
    zeros = torch.zeros(s["rewards"].shape, dtype=torch.float64)
    arguments = tensors(s, "rewards", "discounts", "values", "next_values", "continues")
    for lambda_ in (0.6, 1.0):
        got = vtrace(zeros, *arguments, lambda_=lambda_)
        np.testing.assert_allclose(got.targets.numpy(), oracles.lambda_return(s, lambda_), rtol=1e-9)


def test_vtrace_gives_no_gradient():
    arguments = [torch.randn(4, 2, requires_grad=True) for _ in range(5)]
    assert not vtrace(*arguments, torch.ones(4, 2)).advantages.requires_grad


def test_next_values_are_those_of_the_true_last_observation(s):
    values, truncated, final = tensors(s, "bootstrap", "truncated", "final")
    got = sequences.next_values(values, truncated.bool(), final)
    np.testing.assert_array_equal(got.numpy(), s["next_values"])


def test_termination_and_truncation_differ_and_both_stop_the_next_episode():
    rewards, values = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [50.0], [100.0]])
    final = torch.tensor([[7.0], [0.0]])
    ended, no = torch.tensor([[True], [False]]), torch.zeros(2, 1, dtype=torch.bool)

    def first_return(terminated, truncated):
        following = sequences.next_values(values, truncated, final)
        discounts = 0.5 * (~terminated).float()
        continues = (~(terminated | truncated)).float()
        return sequences.lambda_returns(rewards, discounts, following, continues, 1.0)[0, 0].item()

    assert first_return(ended, no) == 1.0
    assert first_return(no, ended) == 1.0 + 0.5 * 7.0
    assert first_return(no, no) == 1.0 + 0.5 * (2.0 + 0.5 * 100.0)


@pytest.mark.parametrize("epsilon", [None, 1e-3, 1e-2])
def test_n_step_q_targets(s, epsilon):
    rng = np.random.default_rng(1)
    shape = (*s["rewards"].shape, 4)
    online, target = rng.normal(size=shape) * 5, rng.normal(size=shape) * 5
    best = np.take_along_axis(target, online.argmax(-1)[..., None], -1)[..., 0]
    eps = epsilon or 0.0

    def h(x):
        return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + eps * x

    if epsilon is not None:
        root = np.sqrt(1 + 4 * eps * (np.abs(best) + 1 + eps))
        best = np.sign(best) * (((root - 1) / (2 * eps)) ** 2 - 1)
    want = oracles.n_step({**s, "next_values": best}, 3)
    got = sequences.n_step_q_targets(
        *tensors(s, "rewards", "discounts"), torch.from_numpy(online), torch.from_numpy(target),
        *tensors(s, "continues"), 3, epsilon,
    )  # fmt: skip
    np.testing.assert_allclose(got.numpy(), want if epsilon is None else h(want), rtol=1e-7, atol=1e-9)


def test_mixed_priorities_by_hand():
    errors = torch.tensor([[1.0, -4.0], [-3.0, 0.0], [2.0, 2.0]])
    np.testing.assert_allclose(
        sequences.mixed_priorities(errors, 0.9).numpy(), [0.9 * 3 + 0.1 * 2, 0.9 * 4 + 0.1 * 2], rtol=1e-6
    )
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(
        sequences.mixed_priorities(errors, 0.9, mask).numpy(), [0.9 * 3 + 0.1 * 2, 0.9 * 2 + 0.1 * 1]
    )


def test_double_q_value():
    online, target = torch.tensor([[[1.0, 2.0]], [[5.0, 4.0]]]), torch.tensor([[[3.0, 4.0]], [[5.0, 6.0]]])
    assert returns.double_q_value(online, target).tolist() == [[4.0], [5.0]]
