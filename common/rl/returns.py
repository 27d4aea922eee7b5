"""Targets and transforms of value learning. All functions are pure and broadcast over leading dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from troupe.common.rl.fixed import shapes_are_fixed


def explained_variance(errors: Tensor, targets: Tensor, counts: Tensor | None = None) -> Tensor:
    """`1 - Var(error) / Var(target)`, a scalar without gradient; an error is a target minus its value.

    1: values say all that there is to say of the targets. 0: no more than their mean. Below: they mislead.
    At least -1, so that targets that are nearly all alike, and leave nothing to explain, are not loud; 0 of
    none. All are of one shape; only those count where `counts` is true.
    """
    # One call for both: this is part of every update.
    both = torch.stack([errors.detach(), targets.detach()]).flatten(1)
    if counts is not None and not shapes_are_fixed():
        both, counts = both[:, counts.flatten()], None
    if not both.numel():
        return targets.new_zeros(())
    if counts is None:
        error, spread = torch.var(both, 1, correction=0).unbind()
    else:
        weights = counts.flatten() / counts.sum().clamp(min=1)
        means = (both * weights).sum(1, keepdim=True)
        error, spread = ((both - means).square() * weights).sum(1).unbind()
    return (1.0 - error / spread.clamp(min=1e-12)).clamp(min=-1.0)


def double_q_target(reward: Tensor, discount: Tensor, q_next_online: Tensor, q_next_target: Tensor) -> Tensor:
    """n-step double Q-learning target, `R + discount * Q_target(s', argmax_a Q_online(s', a))`.

    Args:
        reward: `[B]` float, discounted sum of the rewards up to the bootstrap.
        discount: `[B]` float, `gamma ** n`, or 0 where the episode terminated.
        q_next_online: `[B, A]` float, chooses the action.
        q_next_target: `[B, A]` float, values it.

    Returns:
        `[B]` float. Source: van Hasselt et al. 2016, equation 4; n-step as Horgan et al. 2018, section 3.
    """
    return reward + discount * double_q_value(q_next_online, q_next_target)


def double_q_value(q_online: Tensor, q_target: Tensor) -> Tensor:
    """`Q_target(s, argmax_a Q_online(s, a))`: `[..., A]` twice to `[...]` (van Hasselt et al. 2016)."""
    # One network chooses, the other values: the maximum of one noisy estimate would be too large on average.
    return q_target.gather(-1, q_online.argmax(dim=-1, keepdim=True)).squeeze(-1)


def q_target(reward: Tensor, discount: Tensor, q_next_target: Tensor) -> Tensor:
    """n-step Q-learning target, `R + discount * max_a Q_target(s', a)`; shapes as `double_q_target`."""
    return reward + discount * q_next_target.amax(dim=-1)


def munchausen_target(
    reward: Tensor,
    discount: Tensor,
    action: Tensor,
    q: Tensor,
    next_q: Tensor,
    *,
    alpha: float,
    tau: float,
    least: float,
    next_values: Tensor | None = None,
) -> Tensor:
    """`r + alpha [tau log pi(a|s)] + discount sum_a' pi(a'|s') (Q(s', a') - tau log pi(a'|s'))`.

    The policy is a softmax of the target network's Q at temperature tau, and the bracket is cut to
    `[least, 0]` (Vieillard et al. 2020, equation 2 and section 4).

    Args:
        reward: `[B]` float; of several steps the bonus is that of the first.
        discount: `[B]` float, 0 where the episode terminated.
        action: `[B]` int64.
        q: `[B, A]` float, the target network's at the observation.
        next_q: `[B, A]` float, the target network's at the next one.
        alpha: weight of the bonus.
        tau: temperature.
        least: of the bonus before it is weighted, 0 or below.
        next_values: `[B, N, A]` float, N quantiles of the return at the next observation, of which `next_q`
          is the mean: they take its place as values, and the policy stays that of the mean (M-IQN: ibid.,
          section 4). None: `next_q`.

    Returns:
        `[B]` float, or `[B, N]` of quantiles.
    """
    # tau log pi is computed as a whole: at the paper's tau of 0.03, Q / tau is large, and the softmax of it
    # underflows for all but the best action.
    log_policy = tau * torch.log_softmax(q / tau, dim=1)
    bonus = log_policy.gather(1, action[:, None]).squeeze(1).clamp(least, 0.0)
    next_log_policy = tau * torch.log_softmax(next_q / tau, dim=1)
    chances, now = torch.softmax(next_q / tau, dim=1), reward + alpha * bonus
    if next_values is None:
        return now + discount * (chances * (next_q - next_log_policy)).sum(dim=1)
    values = (chances[:, None] * (next_values - next_log_policy[:, None])).sum(dim=2)
    return now[:, None] + discount[:, None] * values


def quantile_losses(values: Tensor, shares: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    """Quantile Huber loss of each transition (Dabney et al. 2018b, equation 3).

    Args:
        values: `[B, N]`, of the quantiles at `shares`.
        shares: `[B, N]`, in (0, 1).
        targets: `[B, M]`, draws of what should be distributed so.
        delta: errors beyond this size count linearly; kappa in the paper.

    Returns:
        `[B]`: the sum over the N quantiles of means over the M targets.
    """
    # `[B, N, M]`: every quantile against every draw.
    errors = targets[:, None] - values[:, :, None]
    sides = (shares[:, :, None] - (errors < 0).to(shares.dtype)).abs()
    return (sides * huber(errors, delta) / delta).mean(dim=2).sum(dim=1)


def signed_hyperbolic(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Value rescaling `sign(x) (sqrt(|x| + 1) - 1) + epsilon x` (Pohlen et al. 2018, proposition A.2)."""
    # `sqrt(|x| + 1) - 1` without the difference, of which float32 has no digits where x is small.
    return x / (torch.sqrt(torch.abs(x) + 1.0) + 1.0) + epsilon * x


def signed_parabolic(x: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Inverse of `signed_hyperbolic` for the same `epsilon` > 0 (Pohlen et al. 2018, proposition A.2)."""
    root = torch.sqrt(1.0 + 4.0 * epsilon * (torch.abs(x) + 1.0 + epsilon))
    # The paper's `((root - 1) / (2 epsilon))^2 - 1` is `(s + 1)^2 - 1` with this s. Its differences lose the
    # digits of a small epsilon and of a small x.
    s = 2.0 * x / (root + 1.0 + 2.0 * epsilon)
    return s * (torch.abs(s) + 2.0)


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """Huber loss of each error: quadratic within `delta`, linear with slope `delta` beyond (Huber 1964)."""
    size = error.abs()
    # Two terms instead of a `where`: no branch is computed for nothing, and the gradient at `delta` is the
    # same from both sides.
    quadratic = size.clamp(max=delta)
    return 0.5 * quadratic.square() + delta * (size - quadratic)
