"""Heads: from features to values and policies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from troupe.common.nets.initializers import orthogonal, output_layer


def dueling_q(value: Tensor, advantage: Tensor) -> Tensor:
    """`Q = V + A - mean_a A` (Wang et al. 2016, equation 9): `[..., 1]` and `[..., A]` to `[..., A]`."""
    return value + advantage - advantage.mean(dim=-1, keepdim=True)


class DuelingHead(nn.Module):
    """Value and advantage streams, each with one hidden ReLU layer.

    Args:
      features: width of the input.
      num_actions: A.
      hidden_units: width of each stream's hidden layer.
    """

    def __init__(self, features: int, num_actions: int, hidden_units: int) -> None:
        super().__init__()
        # One matrix for both streams' hidden layers: the same arithmetic as two layers, in one call.
        self.hidden = orthogonal(nn.Linear(features, 2 * hidden_units))
        self.advantage = output_layer(nn.Linear(hidden_units, num_actions), "values")
        self.value = output_layer(nn.Linear(hidden_units, 1), "values")

    def forward(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to Q values `[..., A]`."""
        left, right = torch.relu(self.hidden(features)).chunk(2, dim=-1)
        return dueling_q(self.value(right), self.advantage(left))


class PolicyHead(nn.Module):
    """Parameters of a policy's distribution over actions, and the baseline, straight from the features.

    Args:
      features: width of the input.
      size: P.
      free: how many of the parameters, the last ones, are the same for every input.
    """

    def __init__(self, features: int, size: int, free: int = 0) -> None:
        super().__init__()
        self.policy = output_layer(nn.Linear(features, size - free), "policy")
        self.free = nn.Parameter(torch.zeros(free)) if free else None
        self.baseline = output_layer(nn.Linear(features, 1), "values")

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[..., features]` to parameters `[..., P]` and values `[...]`."""
        return self.params(features), self.value(features)

    def params(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to parameters `[..., P]`."""
        params: Tensor = self.policy(features)
        if self.free is None:
            return params
        return torch.cat([params, self.free.expand(*params.shape[:-1], -1)], dim=-1)

    def value(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to values `[...]`."""
        return self.baseline(features).squeeze(-1)
