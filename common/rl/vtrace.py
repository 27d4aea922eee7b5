"""V-trace: off-policy corrected value targets and advantages (Espeholt et al. 2018, section 4.1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from troupe.common.rl.sequences import backward_sum


class VTrace(NamedTuple):
    """Results, without gradients."""

    targets: Tensor
    """`vs`, `[T, B]`: what the baseline should predict (equation 1)."""
    advantages: Tensor
    """`min(pg_rho_bar, rho_t) errors_t`, `[T, B]`: weights of the policy gradient."""
    errors: Tensor
    """`r_t + d_t vs_{t+1} - V_t`, `[T, B]`: for losses that weigh a step themselves."""


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    next_values: Tensor,
    continues: Tensor,
    *,
    rho_bar: float | None = 1.0,
    c_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lambda_: float = 1.0,
    trusted: Tensor | None = None,
) -> VTrace:
    """V-trace over time-major sequences that may hold several episodes; trailing axes are free.

    `vs_t = V_t + delta_t + d_t c_t (vs_{t+1} - V_{t+1})`, `delta_t = rho_t (r_t + d_t V_{t+1} - V_t)`,
    `rho_t = min(rho_bar, pi / mu)`, `c_t = lambda min(c_bar, pi / mu)` (remark 1 and remark 2).

    Args:
        log_rhos: `[T, B]` float, `log pi(a_t) - log mu(a_t)` of target and behaviour policy.
        rewards: `[T, B]` float.
        discounts: `[T, B]` float, gamma, or 0 where the step terminated the episode.
        values: `[T, B]` float, V of the steps' observations.
        next_values: `[T, B]` float, V of the observations that truly followed
          (`troupe.common.rl.sequences.next_values`).
        continues: `[T, B]`, 0 where the step ended an episode in either way, else 1.
        rho_bar: clips the weight of the temporal difference: which policy's value is learned; None: no clip.
        c_bar: clips the weight of the trace: how fast; None: no clip.
        pg_rho_bar: clips the weight of the policy gradient; None: no clip.
        lambda_: further shortens the trace; 1 is the paper.
        trusted: `[T, B]` bool, the steps that count (Schmitt et al. 2019, LASER); None: all do. For another
          the target is the value itself, its advantage is 0, and traces from before end there.
    """
    # What sums up backwards is `vs - V` (remark 1). A discount of 0 ends it at a termination, `continues` at
    # a truncation, whose own difference still counts its `next_values`.
    # May overflow to inf for a policy that has moved far; every use but an unclipped one is bounded by a bar.
    rhos = log_rhos.exp()
    deltas = clipped(rhos, rho_bar) * (rewards + discounts * next_values - values)
    traces = lambda_ * clipped(rhos, c_bar) * discounts * continues
    gradient_rhos = clipped(rhos, pg_rho_bar)
    if trusted is not None:
        deltas, traces, gradient_rhos = deltas * trusted, traces * trusted, gradient_rhos * trusted
    corrections = backward_sum(deltas, traces)
    targets = values + corrections
    # What follows the last step, or an episode's last step, has no target of its own: its value stands in.
    following = torch.where(continues[:-1].bool(), targets[1:], next_values[:-1])
    following = torch.cat([following, next_values[-1:]])
    errors = rewards + discounts * following - values
    return VTrace(targets, gradient_rhos * errors, errors)


def clipped(rhos: Tensor, bar: float | None) -> Tensor:
    """Importance weights of any shape, at most `bar`; None: as they are."""
    return rhos if bar is None else rhos.clamp(max=bar)
