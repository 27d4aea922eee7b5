"""Against the papers' formulas, worked out step by step in plain Python."""

import math

import numpy as np
import pytest
import torch

from troupe.common.rl import policy, policy_losses
from troupe.common.rl.policy_losses import Multiplier

RATIOS = [0.1, 0.75, 0.9, 1.0, 1.1, 1.3, 5.0]
ADVANTAGES = [-2.0, 0.0, 3.0]
PAIRS = [(ratio, advantage) for ratio in RATIOS for advantage in ADVANTAGES]


def surrogate(ratio, advantage, **options):
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    loss = policy_losses.clipped_surrogate(
        log_ratio, torch.tensor(advantage, dtype=torch.float64), 0.2, **options
    )
    loss.backward()
    return loss.item(), log_ratio.grad.item()


@pytest.mark.parametrize(("ratio", "advantage"), PAIRS)
def test_the_surrogate_is_the_worse_of_clipped_and_unclipped(ratio, advantage):
    for lower, low in (("symmetric", 0.8), ("inverse", 1 / 1.2)):
        clipped = min(max(ratio, low), 1.2)
        loss, gradient = surrogate(ratio, advantage, lower=lower)
        assert loss == pytest.approx(-min(ratio * advantage, clipped * advantage))
        # Nothing pulls further where the clipped ratio is the worse one: that is the trust region.
        moves = not ((advantage > 0 and ratio > 1.2) or (advantage < 0 and ratio < low))
        assert gradient == pytest.approx(-ratio * advantage * moves)


def test_a_dual_clip_bounds_what_a_bad_step_costs():
    assert surrogate(5.0, -2.0)[0] == pytest.approx(10.0)
    assert surrogate(5.0, -2.0, dual_clip=3.0) == (pytest.approx(6.0), 0.0)
    assert surrogate(1.1, -2.0, dual_clip=3.0)[0] == pytest.approx(2.2)
    assert surrogate(5.0, 2.0, dual_clip=3.0)[0] == pytest.approx(-2.4)


def test_exponential_weights_stop_at_the_largest():
    weights = policy_losses.exponential_weights(torch.tensor([-1.0, 0.0, 1.0, 100.0]), 0.5, 20.0)
    np.testing.assert_allclose(weights.numpy(), [math.exp(-2), 1.0, math.exp(2), 20.0], rtol=1e-6)


def test_vmpo_clones_the_better_half_by_softmax_weights():
    rng = np.random.default_rng(1)
    advantages, logs = rng.normal(size=7), np.log(rng.uniform(0.1, 0.9, 7))
    log_probs = torch.tensor(logs, requires_grad=True)
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    losses = policy_losses.vmpo_loss(log_probs, torch.tensor(advantages), temperature, 0.1)
    best = np.sort(advantages)[3:]  # 4 of 7: the median is among them
    chosen = np.argsort(advantages)[3:]
    weights = np.exp(best / 0.7) / np.exp(best / 0.7).sum()
    assert losses[0].item() == pytest.approx(-(weights * logs[chosen]).sum())
    assert losses[1].item() == pytest.approx(0.7 * (0.1 + np.log(np.exp(best / 0.7).mean())))
    sum(losses).backward()
    expected = np.zeros(7)
    expected[chosen] = -weights
    np.testing.assert_allclose(log_probs.grad.numpy(), expected)
    # Of the temperature loss alone: epsilon minus the divergence of the weights from uniform ones.
    divergence = (weights * np.log(weights * 4)).sum()
    assert temperature.grad.item() == pytest.approx(0.1 - divergence)


def test_the_better_half_is_half():
    advantages = torch.tensor([[3.0, -1.0, 2.0, 0.5], [4.0, -7.0, 1.0, 9.0]])
    assert policy_losses.top_half(advantages).tolist() == [
        [True, False, True, False],
        [True, False, False, True],
    ]


def test_divergence_by_hand():
    rng = np.random.default_rng(2)
    one, other = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (one, other))
    np.testing.assert_allclose(
        policy.kl(torch.tensor(one), torch.tensor(other)).numpy(), (p * np.log(p / q)).sum(-1)
    )


@pytest.mark.parametrize(
    ("at_most", "measured", "grows"), [(True, 2.0, True), (True, 0.5, False), (False, 0.5, True)]
)
def test_a_multiplier_grows_while_its_bound_is_broken(at_most, measured, grows):
    multiplier = Multiplier(0.3, 1.0, at_most=at_most, speed=10.0)
    optimizer = torch.optim.SGD(multiplier.parameters(), lr=0.01)
    before = multiplier.value().item()
    assert before == pytest.approx(0.3)
    value = torch.tensor(measured, requires_grad=True)
    multiplier.loss(value).backward()
    optimizer.step()
    assert (multiplier.value().item() > before) == grows
    # The measured value itself is pushed towards the bound, with the weight as it was.
    assert value.grad.item() == pytest.approx(0.3 if at_most else -0.3)


@pytest.mark.parametrize("end", [-1.0, 1.0])
@pytest.mark.parametrize("at_most", [True, False])
def test_a_multiplier_comes_back_from_its_ends_and_goes_no_further(at_most, end):
    multiplier = Multiplier(1.0, 1.0, at_most=at_most, speed=7.0)
    with torch.no_grad():
        multiplier.position.fill_(end * 20.1 / 7.0)
    assert multiplier.value().item() == pytest.approx(math.exp(20.0 * end), rel=1e-4)
    broken, kept = (3.0, 0.2) if at_most else (0.2, 3.0)
    for measured, leads_back in ((broken, end < 0), (kept, end > 0)):
        multiplier.position.grad = None
        multiplier.loss(torch.tensor(measured)).backward()
        gradient = multiplier.position.grad.item()
        assert gradient * end > 0 if leads_back else gradient == 0


def test_a_weight_that_is_not_given_grows_while_its_bound_is_broken():
    multiplier = Multiplier(0.0, 0.01, at_most=True)
    optimizer = torch.optim.Adam(multiplier.parameters(), lr=3e-4, eps=1e-5)  # PPO's
    for _ in range(2000):
        optimizer.zero_grad()
        multiplier.loss(torch.tensor(0.05)).backward()
        optimizer.step()
    assert multiplier.value().item() > 0.1


def test_a_temperature_that_is_too_low_rises():
    """Advantages that were all alike have taken it below its least."""
    log = torch.tensor(-14.2, requires_grad=True)
    temperature = policy_losses.clamped(log, 14.0).exp()
    _, loss = policy_losses.vmpo_loss(torch.zeros(8), torch.arange(8.0), temperature, 0.1)
    loss.backward()
    assert log.grad.item() < 0


def test_a_fixed_multiplier_has_nothing_to_learn():
    multiplier = Multiplier(0.25, None, at_most=True)
    assert not list(multiplier.parameters())
    assert multiplier.loss(torch.tensor(2.0)).item() == pytest.approx(0.5)
    assert not Multiplier(0.0, None, at_most=True).used


def test_values_are_clipped_round_what_they_were():
    values, before, targets = torch.tensor([0.0, 0.5, 2.0]), torch.zeros(3), torch.ones(3)
    plain = policy_losses.value_errors(values, before, targets)
    np.testing.assert_allclose(plain.numpy(), [0.5, 0.125, 0.5])
    # The worse of both: 0.5 * (1 - 0.1)^2 where the value has moved further than 0.1.
    clipped = policy_losses.value_errors(values, before, targets, clip=0.1)
    np.testing.assert_allclose(clipped.numpy(), [0.5, 0.405, 0.5])
    huber = policy_losses.value_errors(values, before, targets, huber_delta=0.5)
    np.testing.assert_allclose(huber.numpy(), [0.375, 0.125, 0.375])
