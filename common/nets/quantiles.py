"""Quantiles of returns at shares that are asked for (IQN: Dabney et al. 2018b)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from troupe.common.nets.heads import dueling_q
from troupe.common.nets.initializers import orthogonal
from troupe.common.nets.q_network import QNetwork

COSINES = 64
"""Features of a share: cos(pi i tau), i from 0 on (equation 4)."""
ACTING_QUANTILES = 32
"""Shares over which Q is the mean where the network acts: K of the paper, at fixed, even places."""


class QuantileNetwork(QNetwork):
    """A `QNetwork` whose values are those of quantiles; called as one, it gives their mean."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shares = orthogonal(nn.Linear(COSINES, self.torso.features))

    def forward(self, obs: Tensor) -> Tensor:
        """Map observations `[B, *obs_shape]` to Q values `[B, A]`: means over evenly spaced quantiles."""
        places = torch.arange(ACTING_QUANTILES, device=obs.device, dtype=torch.float32)
        shares = ((places + 0.5) / ACTING_QUANTILES).expand(len(obs), -1)
        return self.quantiles(obs, shares).mean(dim=1)

    def quantiles(self, obs: Tensor, shares: Tensor) -> Tensor:
        """Values `[B, N, A]` of the quantiles at `shares` `[B, N]`, in (0, 1)."""
        seen = obs if self.inputs is None else self.inputs(obs)
        features = self.torso(seen)
        steps = torch.arange(COSINES, device=shares.device, dtype=torch.float32)
        cosines = torch.cos(math.pi * steps * shares[..., None])
        embedded = torch.relu(self.shares(cosines))
        hidden = torch.relu(self.hidden(features[:, None] * embedded))
        if self.value is None:
            advantage: Tensor = self.advantage(hidden)
            return advantage
        left, right = hidden.split(self.hidden_units, dim=-1)
        return dueling_q(self.value(right), self.advantage(left))
