"""How a step's advantage moves the policy: one loss for each step, and trust regions with their multipliers.

All arguments are `[...]` of one shape unless it says otherwise; no gradient flows through advantages.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

LowerBound = Literal["symmetric", "inverse"]


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    epsilon: float,
    lower: LowerBound = "symmetric",
    dual_clip: float | None = None,
) -> Tensor:
    """`-min(r A, clip(r, low, 1 + epsilon) A)`, `r = pi(a) / mu(a)` (Schulman et al. 2017, equation 7).

    Args:
        log_ratio: `log r`; the gradient flows through it.
        advantages: A.
        epsilon: how far the ratio may go.
        lower: `low` is `1 - epsilon` as in the paper (`symmetric`), or `1 / (1 + epsilon)` (`inverse`), which
          allows a step as far down as up.
        dual_clip: where A is negative the loss of a step is at most this times `-A` (Ye et al. 2020, equation
          5): an action that has become much more likely cannot push without limit; None: no limit.
    """
    ratio = log_ratio.exp()
    # `inverse` for large epsilon: 1 - epsilon reaches 0 at 1, and there would be no lower bound left.
    low = 1.0 - epsilon if lower == "symmetric" else 1.0 / (1.0 + epsilon)
    worth = torch.minimum(ratio * advantages, ratio.clamp(low, 1.0 + epsilon) * advantages)
    if dual_clip is not None:
        worth = torch.where(advantages < 0, torch.maximum(worth, dual_clip * advantages), worth)
    return -worth


def weighted_log_likelihood(log_probs: Tensor, weights: Tensor) -> Tensor:
    """`-w log pi(a)`: policy gradient with advantages as weights, cloning with ones."""
    return -log_probs * weights.detach()


def exponential_weights(advantages: Tensor, temperature: float, max_weight: float) -> Tensor:
    """`min(exp(A / temperature), max_weight)` (AWR: Peng et al. 2019, section 5)."""
    # Clipped before the exponential, which overflows beyond 88 in float32.
    return (advantages / temperature).clamp(max=math.log(max_weight)).exp()


def top_half(advantages: Tensor) -> Tensor:
    """Bool, true for the better half of all steps (Song et al. 2020, section 3.1); ties may add to it."""
    return advantages >= advantages.flatten().quantile(0.5)


def vmpo_loss(
    log_probs: Tensor, advantages: Tensor, temperature: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Policy and temperature losses of V-MPO, two scalars (Song et al. 2020, equations 3 to 5).

    The better half of the steps is cloned with weights `softmax(A / temperature)` over all of it; the
    temperature is what keeps these weights within `epsilon` nats of uniform ones.

    Args:
        log_probs: `log pi(a)`.
        advantages: A.
        temperature: positive scalar; its gradient flows only through the second loss.
        epsilon: the bound, in nats.
    """
    best = top_half(advantages)
    scaled = advantages[best].detach() / temperature
    # Detached: the policy's loss must not move the temperature, which has a loss of its own.
    weights = torch.softmax(scaled.detach(), dim=0)
    policy_loss = -(weights * log_probs[best]).sum()
    # The derivative by the temperature is `epsilon - KL(weights || uniform)`.
    log_mean = torch.logsumexp(scaled, dim=0) - math.log(len(scaled))
    return policy_loss, temperature * (epsilon + log_mean)


def value_errors(
    values: Tensor,
    before: Tensor,
    targets: Tensor,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Half the squared error of each value, or Huber's, which is linear from `huber_delta` on.

    With `clip` it is the worse of two: of the value, and of one that is at most so far from what it was
    `before` (the reference implementation of PPO: Dhariwal et al. 2017, `baselines`).
    """

    def error(of: Tensor) -> Tensor:
        if huber_delta is None:
            return 0.5 * (of - targets).square()
        return nn.functional.huber_loss(of, targets, reduction="none", delta=huber_delta)

    if clip is None:
        return error(values)
    return torch.maximum(error(values), error(before + (values - before).clamp(-clip, clip)))


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        outwards = (x >= ctx.limit) & (gradient < 0) | (x <= -ctx.limit) & (gradient > 0)
        return gradient.masked_fill(outwards, 0.0), None


def clamped(x: Tensor, limit: float) -> Tensor:
    """`x` within `[-limit, limit]`; beyond it only a gradient whose descent leads back is passed on.

    `torch.clamp` passes none at all there: a parameter that is once beyond would stay for ever.
    """
    bounded: Tensor = _Clamped.apply(x, limit)
    return bounded


class Multiplier(nn.Module):
    """The weight of a term of the loss: fixed, or a Lagrange multiplier that holds the term at a target.

    An adjusted weight is `exp(speed * p)`: it stays positive, and its own size does not slow its adjustment.

    Args:
        cost: the weight; where it begins if it is adjusted.
        target: what the measured value is held at; None: the weight is fixed.
        at_most: the value should not exceed the target, as a divergence; else it should not fall below, as an
          entropy.
        speed: of the adjustment.
    """

    MAX_LOG = 20.0
    """An adjusted weight stays between exp(-20) and exp(20)."""
    FIRST = 1e-3
    """Where an adjusted weight begins whose cost is 0. Its gradient is in proportion to it: one that is much
    smaller has less than an optimiser's epsilon, and would not move for millions of updates."""

    def __init__(self, cost: float, target: float | None, *, at_most: bool, speed: float = 10.0) -> None:
        super().__init__()
        self.target = target
        self._sign = 1.0 if at_most else -1.0
        self._speed = speed
        self._fixed = cost
        self.used = cost > 0 or target is not None
        if target is not None:
            start = math.log(cost or self.FIRST) / speed
            # Scaled by `speed`: Adam moves every parameter by about its learning rate, which is a network's
            # and would take the logarithm of a weight too long.
            self.position = nn.Parameter(torch.tensor(start))

    def value(self) -> Tensor:
        """The weight, a scalar; it has a gradient if it is adjusted."""
        if self.target is None:
            return torch.tensor(self._fixed)
        return clamped(self._speed * self.position, self.MAX_LOG).exp()

    def loss(self, measured: Tensor) -> Tensor:
        """The term of a measured scalar: its gradient moves what is measured, and the weight."""
        # Each half is detached from the other: one gradient for what is measured, the opposite one for the
        # weight, as in any Lagrangian.
        return self._sign * self.value().detach() * measured + self.adjustment(measured)

    def adjustment(self, measured: Tensor) -> Tensor:
        """A term whose gradient moves the weight alone, towards the target; 0 if it is fixed."""
        if self.target is None:
            return torch.zeros_like(measured)
        return self._sign * self.value() * (self.target - measured.detach())
