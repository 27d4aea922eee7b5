"""Gradients of losses against their derivatives on paper, in numpy: what a loss's value alone cannot show."""

import math

import numpy as np
import pytest
import torch

from troupe.common.rl import policy, policy_losses
from troupe.common.rl.distributions import Joint, MultiCategorical, Normal, TanhNormal
from troupe.common.rl.normalizers import normalized_advantages
from troupe.common.rl.policy_losses import Multiplier

SEEDS = range(25)
ACTIONS = 4


class Case:
    """Logits of a policy and of the one that acted, what was done, and its advantages, `[T, B]`."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        shape = int(rng.integers(1, 8)), int(rng.integers(1, 6))
        scale = 10 ** rng.uniform(-1, 0.7)
        self.logits = scale * rng.normal(size=(*shape, ACTIONS))
        self.acted = self.logits + rng.normal(size=self.logits.shape)
        self.actions = rng.integers(0, ACTIONS, shape)
        self.advantages = 10 ** rng.uniform(-2, 2) * rng.normal(size=shape)
        self.pi, self.mu = softmax(self.logits), softmax(self.acted)
        self.chosen = np.eye(ACTIONS)[self.actions]
        self.ratio = (self.pi * self.chosen).sum(-1) / (self.mu * self.chosen).sum(-1)
        # Of log pi(a) by the logits.
        self.score = self.chosen - self.pi

    def gradient(self, loss):
        """Of the sum of `loss(log_probs, advantages, log_probs of what acted)` by the logits."""
        logits = torch.tensor(self.logits, requires_grad=True)
        log_probs = policy.log_prob(logits, torch.tensor(self.actions))
        acted = policy.log_prob(torch.tensor(self.acted), torch.tensor(self.actions))
        advantages = torch.tensor(self.advantages, requires_grad=True)
        loss(log_probs, advantages, acted).sum().backward()
        return logits.grad.numpy()


def softmax(logits):
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    return chances / chances.sum(-1, keepdims=True)


def equal(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lower", ["symmetric", "inverse"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_the_surrogate_pushes_only_where_the_ratio_is_not_clipped(seed, lower, dual_clip):
    case = Case(seed)
    low = 0.8 if lower == "symmetric" else 1 / 1.2
    good = case.advantages > 0
    free = np.where(good, case.ratio < 1.2, case.ratio > low)
    if dual_clip is not None:
        free &= good | (case.ratio < dual_clip)
    wanted = -(free * case.advantages * case.ratio)[..., None] * case.score
    got = case.gradient(
        lambda log_probs, advantages, acted: policy_losses.clipped_surrogate(
            log_probs - acted, advantages.detach(), 0.2, lower, dual_clip
        )
    )
    equal(got, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_likelihoods_give_their_weights_no_gradient(seed):
    case = Case(seed)
    equal(
        case.gradient(lambda log_probs, advantages, _: policy.policy_gradient(log_probs, advantages)),
        -case.advantages[..., None] * case.score,
    )
    weights = np.exp(np.minimum(case.advantages / 0.7, math.log(20.0)))
    equal(
        case.gradient(
            lambda log_probs, advantages, _: policy_losses.weighted_log_likelihood(
                log_probs, policy_losses.exponential_weights(advantages, 0.7, 20.0)
            )
        ),
        -weights[..., None] * case.score,
    )
    # Weights that are functions of the policy, as V-trace's, are constants as well.
    equal(
        case.gradient(
            lambda log_probs, advantages, acted: policy_losses.weighted_log_likelihood(
                log_probs, (log_probs - acted).exp().clamp(max=1.0) * advantages
            )
        ),
        -(np.minimum(case.ratio, 1.0) * case.advantages)[..., None] * case.score,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_vmpo_clones_the_better_half_and_moves_its_temperature(seed):
    case = Case(seed)
    temperature = torch.tensor(0.5 + seed / 10, dtype=torch.float64, requires_grad=True)
    best = case.advantages >= np.quantile(case.advantages, 0.5)
    scaled = case.advantages[best] / temperature.item()
    weights = np.zeros_like(case.advantages)
    weights[best] = softmax(scaled)
    got = case.gradient(
        lambda log_probs, advantages, _: torch.stack(
            policy_losses.vmpo_loss(log_probs, advantages, temperature, 0.1)
        )
    )
    equal(got, -weights[..., None] * case.score)
    share = weights[best][weights[best] > 0]
    divergence = (share * np.log(share * best.sum())).sum()
    assert temperature.grad.item() == pytest.approx(0.1 - divergence, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_entropies_and_divergences(seed):
    case = Case(seed)
    logits = torch.tensor(case.logits, requires_grad=True)
    others = torch.tensor(case.acted, requires_grad=True)
    (got,) = torch.autograd.grad(policy.entropy(logits).sum(), logits)
    log_pi, log_mu = np.log(case.pi), np.log(case.mu)
    equal(got, -case.pi * (log_pi - (case.pi * log_pi).sum(-1, keepdims=True)))
    one, other = torch.autograd.grad(policy.kl(logits, others).sum(), [logits, others])
    apart = log_pi - log_mu
    equal(one, case.pi * (apart - (case.pi * apart).sum(-1, keepdims=True)))
    equal(other, case.mu - case.pi)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("huber_delta", [None, 0.5])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_errors(seed, huber_delta, clip):
    rng = np.random.default_rng(seed)
    values, before, targets = rng.normal(size=(3, 6, 5))

    def error(off):
        if huber_delta is None:
            return 0.5 * off**2
        near = np.abs(off) <= huber_delta
        return np.where(near, 0.5 * off**2, huber_delta * (np.abs(off) - 0.5 * huber_delta))

    def slope(off):
        return off if huber_delta is None else np.clip(off, -huber_delta, huber_delta)

    wanted = slope(values - targets)
    if clip is not None:
        moved = values - before
        near = before + np.clip(moved, -clip, clip)
        wanted = np.where(
            (np.abs(moved) > clip) & (error(near - targets) > error(values - targets)), 0.0, wanted
        )
    tensor = torch.tensor(values, requires_grad=True)
    policy_losses.value_errors(
        tensor, torch.tensor(before), torch.tensor(targets), clip, huber_delta
    ).sum().backward()
    equal(tensor.grad.numpy(), wanted)


@pytest.mark.parametrize("at_most", [True, False])
@pytest.mark.parametrize("measured", [0.01, 0.7, 3.0])
@pytest.mark.parametrize("cost", [1e-3, 0.4, 20.0])
def test_multipliers(at_most, measured, cost):
    """Of `sign (exp(s p)) m + sign exp(s p) (target - m)`, each held where the other learns."""
    speed, target, sign = 4.0, 0.6, 1.0 if at_most else -1.0
    multiplier = Multiplier(cost, target, at_most=at_most, speed=speed).double()
    value = torch.tensor(measured, dtype=torch.float64, requires_grad=True)
    multiplier.loss(value).backward()
    assert value.grad.item() == pytest.approx(sign * cost, rel=1e-5)
    wanted = sign * speed * cost * (target - measured)
    assert multiplier.position.grad.item() == pytest.approx(wanted, rel=1e-5)


def test_normalised_advantages_have_the_moments_of_the_whole_batch():
    for seed in SEEDS:
        advantages = Case(seed).advantages
        got = normalized_advantages(torch.tensor(advantages)).numpy()
        np.testing.assert_allclose(got, (advantages - advantages.mean()) / (advantages.std() + 1e-8))


FAMILIES = {
    "choices": (MultiCategorical((2, 3, 3)), 3, 0),
    "normal": (Normal(2, start=0.6), 0, 2),
    "exp": (Normal(2, "exp", start=0.6), 0, 2),
    "squashed": (TanhNormal(2, start=0.6), 0, 2),
    "joint": (Joint((2, 3), TanhNormal(1, start=0.6)), 2, 1),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_by_finite_differences(family):
    distribution, choices, reals = FAMILIES[family]
    rng = np.random.default_rng(0)
    for _ in range(5):
        params, others = (
            torch.tensor(rng.normal(size=(3, distribution.size)), requires_grad=True) for _ in range(2)
        )
        chosen, drawn = rng.integers(0, 2, (3, choices)), rng.uniform(-0.9, 0.9, (3, reals))
        actions = torch.tensor(np.concatenate([chosen, drawn], axis=1))
        assert torch.autograd.gradcheck(lambda x, a=actions: distribution.log_prob(x, a), params)
        assert torch.autograd.gradcheck(distribution.entropy, params)
        assert torch.autograd.gradcheck(distribution.kl, (params, others))


# ----------------------------------------------------------------- what they converge to


@pytest.mark.parametrize("kind", ["surrogate", "awr", "vmpo"])
def test_a_continuous_bandit_is_pulled_where_it_pays_most(kind):
    """Rewards `-(a - 0.3)^2` at actions of the policy itself; the mean comes to 0.3 from -0.5."""
    distribution, rng = Normal(1, start=0.4, floor=0.05), np.random.default_rng(1)
    params = torch.tensor([-0.5, 0.0], requires_grad=True)
    temperature = torch.tensor(0.1)
    optimizer = torch.optim.Adam([params], lr=0.02)
    for _ in range(200):
        before = params.detach().expand(128, -1)
        actions = torch.from_numpy(distribution.sample(before.numpy(), rng))
        rewards = -(actions[:, 0] - 0.3).square()
        advantages = rewards - rewards.mean()
        log_probs = distribution.log_prob(params.expand(128, -1), actions)
        if kind == "surrogate":
            log_ratio = log_probs - distribution.log_prob(before, actions)
            loss = policy_losses.clipped_surrogate(log_ratio, normalized_advantages(advantages), 0.2).mean()
        elif kind == "awr":
            weights = policy_losses.exponential_weights(advantages, 0.05, 20.0)
            loss = policy_losses.weighted_log_likelihood(log_probs, weights).mean()
        else:
            loss = policy_losses.vmpo_loss(log_probs, advantages, temperature, 0.1)[0]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert distribution.best(params.detach()).item() == pytest.approx(0.3, abs=0.03)
