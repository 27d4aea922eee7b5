"""Losses of policies over discrete actions, and what is done to rewards before learning."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["sum", "mean"]
RewardClip = Literal["none", "abs_one", "sign", "soft_asymmetric"]


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """`log pi(a)`: logits `[..., A]` and int64 actions `[...]` to `[...]`."""
    return torch.log_softmax(logits, dim=-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """`-sum_a pi(a) log pi(a)` in nats: logits `[..., A]` to `[...]`."""
    logs = torch.log_softmax(logits, dim=-1)
    # From log-softmax: p log p of probabilities would be 0 times -inf for an impossible action.
    return -(logs.exp() * logs).sum(dim=-1)


def kl(logits: Tensor, others: Tensor) -> Tensor:
    """`KL(p || q)` in nats of the policies with `logits` and `others`, both `[..., A]`; gives `[...]`."""
    logs = torch.log_softmax(logits, dim=-1)
    return (logs.exp() * (logs - torch.log_softmax(others, dim=-1))).sum(dim=-1)


def reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    """Sum or mean over all steps of all sequences, `[T, B]` to a scalar.

    The original IMPALA sums, so its learning rate and costs belong to one batch size and unroll length; SEED
    takes means. The two are the same up to a factor of `T B`.
    """
    return losses.sum() if reduction == "sum" else losses.mean()


def policy_gradient(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """`-log pi(a_t) A_t` for each step, `[T, B]`; no gradient flows through the advantages."""
    return -log_probs * advantages.detach()


def clip_reward(reward: Tensor, mode: RewardClip) -> Tensor:
    """Reward as the loss sees it.

    `abs_one`: clipped to [-1, 1]. `sign`: -1, 0 or 1. `soft_asymmetric`: `5 tanh(r / 5)`, and 0.3 times that
    below zero, which keeps large rewards apart and makes losses hurt less (Espeholt et al. 2018, appendix D
    and figure D.1).
    """
    if mode == "abs_one":
        return reward.clamp(-1.0, 1.0)
    if mode == "sign":
        return reward.sign()
    if mode == "soft_asymmetric":
        squeezed = torch.tanh(reward / 5.0)
        return 5.0 * torch.where(reward < 0, 0.3 * squeezed, squeezed)
    return reward
