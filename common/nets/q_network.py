"""Q networks without memory: a torso and a dueling head, for means or for quantiles; the heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from troupe.common.nets.initializers import orthogonal, output_layer
from troupe.common.nets.noisy import NoisyLinear
from troupe.common.nets.parts import PartInputs, PartsTorso
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.torsos import HadamaxTorso, PixelTorso, ResidualTorso, VectorTorso, make_torso
from troupe.common.rl.normalizers import Normalizer, ReturnScale

Torso = PartsTorso | PixelTorso | HadamaxTorso | ResidualTorso | VectorTorso
COSINES = 64
"""Features of a share: cos(pi i tau), i from 0 on (equation 4)."""
ACTING_QUANTILES = 32
"""Shares over which Q is the mean where the network acts: K of the paper, at fixed, even places."""


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
        self.active = nn.ReLU()
        self.advantage = output_layer(nn.Linear(hidden_units, num_actions), "values")
        self.value = output_layer(nn.Linear(hidden_units, 1), "values")

    def forward(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to Q values `[..., A]`."""
        left, right = self.active(self.hidden(features)).chunk(2, dim=-1)
        return dueling_q(self.value(right), self.advantage(left))


class QNetwork(nn.Module):
    """Q values of every action, dueling (Wang et al. 2016, equation 9) or plain.

    Args:
        obs_shape: shape of one observation, `(C, H, W)` for pixels.
        num_actions: A.
        torso: `mlp`, or a name of `troupe.common.nets.torsos.PIXEL_TORSOS`.
        hidden_units: width of each head's hidden layer.
        mlp_units: widths of the `mlp` torso.
        dueling: separate value and advantage streams.
        inputs: what the torso sees of pixels or of several parts; None: pixels divided by 255.
        scale: what rewards are divided by, and Q is in units of; None: nothing.
        noise: first deviation of the heads' weights, see `NoisyLinear`; 0: they have none.

    Attributes:
        draws: numbers of standard normal noise that one function of the heads takes.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        num_actions: int,
        torso: str,
        hidden_units: int,
        mlp_units: tuple[int, ...],
        dueling: bool,
        inputs: NormalizedPixels | PackedPixels | Normalizer | PartInputs | None = None,
        scale: ReturnScale | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        self.scale = scale
        self.inputs: nn.Module | None = inputs if torso == "mlp" else inputs or ScaledPixels()
        if isinstance(inputs, PartInputs):
            self.torso: Torso = PartsTorso(inputs, torso, hidden_units, mlp_units)
        else:
            self.torso = make_torso(torso, obs_shape, mlp_units)
        self.dueling = dueling
        self.hidden_units = hidden_units
        streams = 2 if dueling else 1

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return NoisyLinear(inputs, outputs, noise) if noise else nn.Linear(inputs, outputs)

        # One matrix for both streams' hidden layers: the same arithmetic as two layers, in one call.
        self.hidden = orthogonal(linear(self.torso.features, streams * hidden_units))
        self.active = nn.ReLU()
        self.advantage = output_layer(linear(hidden_units, num_actions), "values")
        self.value = output_layer(linear(hidden_units, 1), "values") if dueling else None
        heads = self.hidden, self.advantage, self.value
        self._shares = [head.draws if isinstance(head, NoisyLinear) else 0 for head in heads]
        self.draws = sum(self._shares)

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Map observations `[B, *obs_shape]` to Q values `[B, A]` float32.

        `noise` `[B, draws]`, or `[1, draws]` for all rows; None: the heads' mean weights.
        """
        return self._heads(self._seen(obs), noise)

    def _seen(self, obs: Tensor) -> Tensor:
        features: Tensor = self.torso(obs if self.inputs is None else self.inputs(obs))
        return features

    def _heads(self, features: Tensor, noise: Tensor | None) -> Tensor:
        """Q values `[..., A]` of features `[..., F]`."""
        shares = [()] * 3 if noise is None else [(each,) for each in noise.split(self._shares, dim=-1)]
        hidden = self.active(self.hidden(features, *shares[0]))
        if self.value is None:
            advantage: Tensor = self.advantage(hidden, *shares[1])
            return advantage
        left, right = hidden.split(self.hidden_units, dim=-1)
        return dueling_q(self.value(right, *shares[2]), self.advantage(left, *shares[1]))

    def observe(self, obs: Tensor) -> None:
        """Take observations `[B, *obs_shape]` into the pixels' statistics."""
        if self.inputs is not None:
            self.inputs.observe(obs)  # type: ignore[operator]


class QuantileNetwork(QNetwork):
    """A `QNetwork` of quantiles (IQN: Dabney et al. 2018b); called as one, it gives their mean."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.shares = orthogonal(nn.Linear(COSINES, self.torso.features))

    def forward(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Map observations `[B, *obs_shape]` to Q values `[B, A]`: means over evenly spaced quantiles."""
        places = torch.arange(ACTING_QUANTILES, device=obs.device, dtype=torch.float32)
        # Midpoints of equal parts, not draws: acting is then a function of the observation alone.
        shares = ((places + 0.5) / ACTING_QUANTILES).expand(len(obs), -1)
        return self.quantiles(obs, shares, noise).mean(dim=1)

    def quantiles(self, obs: Tensor, shares: Tensor, noise: Tensor | None = None) -> Tensor:
        """Values `[B, N, A]` of the quantiles at `shares` `[B, N]`, in (0, 1); `noise` as in `forward`."""
        features = self._seen(obs)
        steps = torch.arange(COSINES, device=shares.device, dtype=torch.float32)
        # Equation 4 of Dabney et al. 2018b.
        cosines = torch.cos(math.pi * steps * shares[..., None])
        embedded = torch.relu(self.shares(cosines))
        return self._heads(features[:, None] * embedded, None if noise is None else noise[:, None])
