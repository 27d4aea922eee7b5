"""Losses of replayed steps: cloning what was (CLEAR), and leaving out what is too far from today (LASER)."""

from __future__ import annotations

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
    return loss * replayed


def trusted_steps(divergence: Tensor, most: float, replayed: Tensor) -> Tensor:
    """Which steps may teach, `[T, B]` bool: all fresh ones, and those whose policy was like today's.

    LASER (Schmitt et al. 2019) leaves out what lies beyond a trust region; `common.rl.vtrace` takes the
    result.

    Args:
      divergence: `[T, B]`, `KL(pi || mu)` from today's policy to the one that acted, in nats.
      most: nats that are still trusted.
      replayed: `[B]` bool, the rows that are not fresh.
    """
    return (divergence <= most) | ~replayed
