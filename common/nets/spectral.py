"""Convolutions whose largest singular value is held at 1 (spectral normalisation, Miyato et al. 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from troupe.common.nets.convolution import Convolution

FIRST_ITERATIONS = 15
"""Of the power iteration on first weights."""


class SpectralConvolution(Convolution):
    """A `Convolution` by its weight over the weight's largest singular value, as a matrix `[out, rest]`.

    That is estimated by power iteration. Its vectors move only when `settle` is called, after each step of
    the optimiser, and are published with the weights: the network is one function wherever it acts.
    """

    left: Tensor
    right: Tensor

    def __init__(self, channels: int, filters: int, size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(channels, filters, size, stride, padding)
        self.register_buffer("left", nn.functional.normalize(torch.randn(filters), dim=0))
        self.register_buffer("right", torch.zeros(channels * size * size))
        self.settle(FIRST_ITERATIONS)

    @torch.no_grad()
    def settle(self, iterations: int = 1) -> None:
        """Bring the singular vectors closer to those of the weight."""
        matrix = self.weight.flatten(1)
        for _ in range(iterations):
            self.right.copy_(nn.functional.normalize(matrix.T @ self.left, dim=0))
            self.left.copy_(nn.functional.normalize(matrix @ self.right, dim=0))

    def kernel(self) -> Tensor:
        """See the base class."""
        # Elementwise: autocast would make a product of matrices in bfloat16.
        largest = (self.weight.flatten(1) * torch.outer(self.left, self.right)).sum()
        return self.weight / largest


def spectral_layers(network: nn.Module) -> list[SpectralConvolution]:
    """Return the layers of a network that have to `settle` once their weights have changed."""
    return [module for module in network.modules() if isinstance(module, SpectralConvolution)]
