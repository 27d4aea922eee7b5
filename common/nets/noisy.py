"""Linear layers whose weights are noisy: exploration that is learned (Fortunato et al. 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class NoisyLinear(nn.Linear):
    """`nn.Linear` with factorised noise in weights and biases (section 3, equations 9 to 11).

    The weight from input i to output o is `weight + deviation * f(e_o) f(e_i)`, the bias `bias + deviation *
    f(e_o)`, with `f(x) = sgn(x) sqrt(|x|)` and e standard normal. Without noise it is that of the means.

    Args:
        inputs: their number.
        outputs: their number.
        deviation: of each weight at the beginning, times the root of the number of inputs: sigma_0.
    """

    def __init__(self, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__(inputs, outputs)
        first = deviation / math.sqrt(inputs)
        self.weight_deviation = nn.Parameter(torch.full((outputs, inputs), first))
        self.bias_deviation = nn.Parameter(torch.full((outputs,), first))
        self.draws = inputs + outputs

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`; `noise` `[..., draws]` may be one for many rows."""
        means = super().forward(x)
        if noise is None:
            return means
        noise = noise.sign() * noise.abs().sqrt()
        of_inputs, of_outputs = noise.split((self.in_features, self.out_features), dim=-1)
        # Factors, not weights: rows may then have noise of their own without a matrix for each.
        noisy = nn.functional.linear(x * of_inputs, self.weight_deviation, self.bias_deviation)
        return means + of_outputs * noisy
