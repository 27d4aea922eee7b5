import numpy as np
import pytest
import torch

from troupe.common.rl import policy


def test_probabilities_and_entropy_by_hand():
    rng = np.random.default_rng(0)
    logits, actions = rng.normal(size=(3, 2, 5)) * 3, rng.integers(0, 5, (3, 2))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(
        policy.log_prob(torch.from_numpy(logits), torch.from_numpy(actions)).numpy(),
        np.log(np.take_along_axis(p, actions[..., None], -1)[..., 0]),
    )
    np.testing.assert_allclose(policy.entropy(torch.from_numpy(logits)).numpy(), -(p * np.log(p)).sum(-1))


def test_entropy_of_a_certain_policy_is_zero_and_not_nan():
    assert policy.entropy(torch.tensor([200.0, -200.0])).item() == 0.0


def test_reductions():
    losses = torch.arange(6.0).reshape(3, 2)
    assert policy.reduced(losses, "sum").item() == 15.0
    assert policy.reduced(losses, "mean").item() == 2.5


def test_policy_gradient_raises_what_was_good():
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    advantages = torch.ones(1, 1, requires_grad=True)
    policy.policy_gradient(policy.log_prob(logits, torch.tensor([[1]])), advantages).sum().backward()
    np.testing.assert_allclose(logits.grad[0, 0].numpy(), [1 / 3, -2 / 3, 1 / 3], rtol=1e-6)
    assert advantages.grad is None


@pytest.mark.parametrize("reward", [-20.0, -1.0, -0.2, 0.0, 0.5, 3.0, 100.0])
def test_reward_clipping(reward):
    def clip(mode):
        return policy.clip_reward(torch.tensor(reward, dtype=torch.float64), mode).item()

    assert clip("none") == reward
    assert clip("abs_one") == max(-1.0, min(1.0, reward))
    assert clip("sign") == np.sign(reward)
    scale = 5.0 if reward >= 0 else 1.5
    assert clip("soft_asymmetric") == pytest.approx(scale * np.tanh(reward / 5.0))
