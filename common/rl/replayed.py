"""Losses of replayed steps: cloning what was (CLEAR), and leaving out what is too far from today (LASER)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cloning(
    divergence: Tensor,
    values: Tensor,
    stored_values: Tensor | None,
    replayed: Tensor,
    *,
    policy_cost: float,
    value_cost: float,
) -> Tensor:
    """Loss `[T, B]` that holds policy and value to what they were when a replayed step was made; 0 elsewhere.

    `policy_cost KL(mu || pi) + value_cost (V - V_then)^2` (CLEAR: Rolnick et al. 2019, section 3).

    Args:
        divergence: `[T, B]`, `KL(mu || pi)` from the policy that acted to today's, in nats.
        values: `[T, B]`, today's.
        stored_values: `[T, B]`, of the network that acted; None where values are not cloned.
        replayed: `[B]` bool, the rows that are not fresh.
        policy_cost: weight of the policy's part.
        value_cost: weight of the value's part.
    """
    loss = policy_cost * divergence
    if stored_values is not None:
        loss = loss + value_cost * (values - stored_values).square()
    # `[B]` bool against `[T, B]`: a row is fresh or replayed as a whole.
    return loss * replayed


def trusted_steps(divergence: Tensor, most: float, replayed: Tensor) -> Tensor:
    """Which steps may teach, `[T, B]` bool: all fresh ones, and those whose policy was like today's.

    LASER (Schmitt et al. 2019) leaves out what lies beyond a trust region; `troupe.common.rl.vtrace` takes
    the result.

    Args:
        divergence: `[T, B]`, from today's policy to the one that acted or to `implied_kl`'s, in nats.
        most: nats that are still trusted.
        replayed: `[B]` bool, the rows that are not fresh.
    """
    return (divergence <= most) | ~replayed


def implied_kl(logits: Tensor, behaviour: Tensor, rho_bar: float | None) -> Tensor:
    """`KL(pi || implied)` in nats, `[...]`: LASER's behaviour relevance (Schmitt et al. 2019, section 4.3).

    The implied policy, in proportion to `min(rho_bar mu, pi)`, is the one whose values V-trace learns (their
    equation 3). It is today's where no weight is clipped, so actions that are rarer today cost nothing.

    Args:
        logits: `[..., A]`, of today's policy pi.
        behaviour: `[..., A]`, logits of the policy mu that acted.
        rho_bar: most weight of a temporal difference; None: not clipped, so the divergence is 0.
    """
    logs = torch.log_softmax(logits, dim=-1)
    if rho_bar is None:
        return torch.zeros_like(logs[..., 0])
    # implied = pi exp(-clipped) / Z, so the divergence is E_pi[clipped] + log Z, Z = E_pi[exp(-clipped)].
    # For actions that are clipped log(pi / (rho_bar mu)) is above 0; the others keep pi itself.
    clipped = (logs - torch.log_softmax(behaviour, dim=-1) - math.log(rho_bar)).clamp(min=0.0)
    return (logs.exp() * clipped).sum(-1) + torch.logsumexp(logs - clipped, dim=-1)
