"""Returns over sequences that may hold several episodes. All arrays are time-major, `[T, B]`.

Every function takes the end of an episode apart into what it means for the value and what it means for time:

* `discounts[t]`: what multiplies the value of the observation after step t: `gamma`, or 0 where step t
  *terminated* the episode, for then nothing follows. A *truncated* step keeps `gamma`.
* `next_values[t]`: value of the observation that truly followed step t: `values[t + 1]` within an episode,
  and the value of the last observation where step t truncated the episode (`next_values` makes it).
* `continues[t]`: 1 where step t + 1 belongs to the same episode, 0 where step t ended one, in either way:
  nothing of the next episode may flow back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from troupe.common.rl.returns import double_q_value, signed_hyperbolic, signed_parabolic


def next_values(values: Tensor, truncated: Tensor, final_values: Tensor) -> Tensor:
    """Value of the observation that truly followed each step.

    Args:
        values: `[T + 1, B]` float, of the observations of T steps and of the one after them.
        truncated: `[T, B]` bool, steps at which a time limit cut the episode.
        final_values: `[T, B]` float, value of the episode's last observation; read where `truncated`.

    Returns:
        `[T, B]` float. Where a step terminated the episode it is arbitrary: its discount is 0.
    """
    # Not `values[t + 1]` at a cut: that is of the next episode's first observation.
    return torch.where(truncated, final_values, values[1:])


def without_old_ends(
    rewards: Tensor, discounts: Tensor, values: Tensor, truncated: Tensor, replayed: Tensor
) -> tuple[Tensor, Tensor]:
    """Rewards and discounts `[T, B]` by which a replayed step that was cut off returns its own value.

    What followed such a step is not stored, only what it was worth to the network that acted. That may be as
    wrong as a new network, and would be the target of all steps before. So the step itself teaches nothing,
    and what came before bootstraps from today's value of it.

    Args:
        rewards: `[T, B]`.
        discounts: `[T, B]`.
        values: `[T, B]`, today's, of the steps' observations.
        truncated: `[T, B]` bool, steps at which a time limit cut the episode.
        replayed: `[B]` bool, the rows that are not fresh.
    """
    old = truncated & replayed
    return torch.where(old, values, rewards), discounts.masked_fill(old, 0.0)


def backward_sum(terms: Tensor, factors: Tensor) -> Tensor:
    """`y_t = terms_t + factors_t y_{t+1}` with `y_T = 0`, all `[T, B]`."""
    # The recursion is sequential; T is at most some hundred steps, so the loop costs little beside the
    # network's passes.
    carry = torch.zeros_like(terms[0])
    sums = torch.empty_like(terms)
    for t in range(len(terms) - 1, -1, -1):
        carry = terms[t] + factors[t] * carry
        sums[t] = carry
    return sums


def lambda_returns(
    rewards: Tensor, discounts: Tensor, next_values: Tensor, continues: Tensor, lambda_: float = 1.0
) -> Tensor:
    """`G_t = r_t + d_t ((1 - lambda) v_{t+1} + lambda G_{t+1})`, with `v` for `G` where an episode ends.

    Sutton and Barto 2018, equation 12.20. `lambda_` 0 is one step, 1 all steps up to the sequence's end.
    Returns `[T, B]`, for `[T, B]` arguments as in the module's docstring.
    """
    # Behind the last step of an episode or of the sequence there is a value and no return: lambda is 0 there.
    mixed = lambda_ * continues
    mixed = torch.cat([mixed[:-1], torch.zeros_like(mixed[-1:])])
    return backward_sum(rewards + discounts * (1.0 - mixed) * next_values, discounts * mixed)


def generalized_advantages(
    rewards: Tensor,
    discounts: Tensor,
    values: Tensor,
    next_values: Tensor,
    continues: Tensor,
    lambda_: float = 0.95,
) -> Tensor:
    """`A_t = delta_t + d_t lambda A_{t+1}`, `delta_t = r_t + d_t v_{t+1} - v_t` (Schulman et al. 2016).

    Their equation 16. All `[T, B]`; `values` are those of the steps' own observations, and `A + values` the
    lambda-returns.
    """
    deltas = rewards + discounts * next_values - values
    return backward_sum(deltas, discounts * lambda_ * continues)


def n_step_returns(
    rewards: Tensor, discounts: Tensor, next_values: Tensor, continues: Tensor, n_steps: int
) -> Tensor:
    """Rewards of up to `n_steps` steps and the value after them, `[T, B]`.

    `R_t + d_t R_{t+1} + ... + (d_t ... d_{t+n-1}) v_{t+n}`: fewer steps where the episode or the sequence
    ends before; the last `n_steps - 1` windows of a sequence bootstrap from its last value. Sutton and Barto
    2018, equation 7.1; Kapturowski et al. 2019, section 2.3.
    """
    if n_steps < 1:
        raise ValueError("n_steps should be at least 1")
    # After round k `returns` are those of k steps, made of the k - 1 steps of the step that follows. Where
    # none does, every round takes the same value, which is how windows end early; a termination has the
    # discount 0.
    goes_on = torch.cat([continues[:-1], torch.zeros_like(continues[-1:])]).bool()
    following = next_values
    returns = rewards
    for _ in range(n_steps):
        returns = rewards + discounts * torch.where(goes_on, following, next_values)
        following = torch.cat([returns[1:], next_values[-1:]])
    return returns


def n_step_q_targets(
    rewards: Tensor,
    discounts: Tensor,
    q_next_online: Tensor,
    q_next_target: Tensor,
    continues: Tensor,
    n_steps: int,
    rescaling_epsilon: float | None = 1e-3,
) -> Tensor:
    """n-step double Q targets of a sequence, on the rescaled scale of the network's outputs.

    `h(sum_k d^k r_{t+k} + d^n h^-1(Q_target(s_{t+n}, argmax_a Q_online(s_{t+n}, a))))` (Kapturowski et al.
    2019, section 2.3).

    Args:
        rewards: `[T, B]` float.
        discounts: `[T, B]` float, see the module.
        q_next_online: `[T, B, A]`, of the observations that truly followed the steps; chooses.
        q_next_target: `[T, B, A]`, of the same; values.
        continues: `[T, B]` 0 or 1.
        n_steps: steps of reward before the bootstrap.
        rescaling_epsilon: of h; None where the network's outputs are plain values.

    Returns:
        `[T, B]` float.
    """
    bootstrap = double_q_value(q_next_online, q_next_target)
    if rescaling_epsilon is None:
        return n_step_returns(rewards, discounts, bootstrap, continues, n_steps)
    # Rewards add up on their own scale: the bootstrap is brought back to it, and the sum rescaled again.
    bootstrap = signed_parabolic(bootstrap, rescaling_epsilon)
    targets = n_step_returns(rewards, discounts, bootstrap, continues, n_steps)
    return signed_hyperbolic(targets, rescaling_epsilon)


def mixed_priorities(errors: Tensor, eta: float = 0.9, mask: Tensor | None = None) -> Tensor:
    """Priority of whole sequences, `eta max_t |error| + (1 - eta) mean_t |error|`.

    Kapturowski et al. 2019, section 2.3.

    Args:
        errors: `[T, B]` TD errors.
        eta: weight of the maximum.
        mask: `[T, B]`, 1 for steps that count and 0 for padding; at least one of a sequence should count.

    Returns:
        `[B]`.
    """
    sizes = errors.abs()
    if mask is None:
        return eta * sizes.amax(dim=0) + (1.0 - eta) * sizes.mean(dim=0)
    sizes = sizes * mask
    mean = sizes.sum(dim=0) / mask.sum(dim=0).clamp(min=1)
    return eta * sizes.amax(dim=0) + (1.0 - eta) * mean
