"""First weights of layers: those that a layer is made with, and others that are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from troupe.common.nets.spectral import FIRST_ITERATIONS, spectral_layers

Initializer = Literal[
    "auto",
    "orthogonal",
    "lecun_normal",
    "lecun_uniform",
    "glorot_normal",
    "glorot_uniform",
    "he_normal",
    "he_uniform",
]
Output = Literal["policy", "values"]
OUTPUT_GAINS: dict[Output, float] = {"policy": 0.01, "values": 1.0}
"""Of last layers. A small gain: the first policy is nearly that of zeros, which is uniform over choices."""
# Deviation of a standard normal that is truncated at two deviations.
_TRUNCATED = 0.87962566103423978
_VARIANCES: dict[str, Callable[[int, int], float]] = {
    "lecun": lambda fan_in, _: 1.0 / fan_in,
    "glorot": lambda fan_in, fan_out: 2.0 / (fan_in + fan_out),
    "he": lambda fan_in, _: 2.0 / fan_in,
}


def orthogonal(module: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Initialise a layer's weight orthogonally and its bias with zeros, and return it."""
    nn.init.orthogonal_(module.weight, gain)  # type: ignore[arg-type]
    return _begun(module)


def lecun_normal(module: nn.Module) -> nn.Module:
    """Initialise a layer's weight with variance 1 / fan-in, truncated at two deviations, its bias with 0."""
    _scaled_variance(module.weight, "lecun_normal")  # type: ignore[arg-type]
    return _begun(module)


def glorot_normal(module: nn.Module) -> nn.Module:
    """Likewise with variance 2 / (fan-in + fan-out)."""
    _scaled_variance(module.weight, "glorot_normal")  # type: ignore[arg-type]
    return _begun(module)


def output_layer(module: nn.Module, of: Output) -> nn.Module:
    """Initialise a network's last layer orthogonally, with the gain of what it gives, and return it."""
    module.output_of = of  # type: ignore[assignment]
    return orthogonal(module, OUTPUT_GAINS[of])


def initialize(network: nn.Module, initializer: Initializer, gains: dict[Output, float]) -> None:
    """Give a new network other first weights.

    Args:
        network: just made. Layers that do not begin with a function of this module are left as they are.
        initializer: of all weights; `auto` leaves them as they are. Hidden layers have a gain of sqrt(2)
          where it is `orthogonal`; the others have their own variance.
        gains: of last layers: what their weights are multiplied by; those that are left out keep their own.
    """
    for module in network.modules():
        # LSTMs and embeddings have forms of their own, which none of these initialisers is made for.
        if not getattr(module, "has_first_weights", False):
            continue
        of: Output | None = getattr(module, "output_of", None)
        weight: Tensor = module.weight  # type: ignore[assignment]
        gain = math.sqrt(2.0) if of is None else gains.get(of, OUTPUT_GAINS[of])
        if initializer == "orthogonal":
            nn.init.orthogonal_(weight, gain)
        elif initializer != "auto":
            _scaled_variance(weight, initializer)
            if of is not None:
                _multiply(weight, gain)
        elif of is not None and gain != OUTPUT_GAINS[of]:
            _multiply(weight, gain / OUTPUT_GAINS[of])
    for layer in spectral_layers(network):
        layer.settle(FIRST_ITERATIONS)


def _begun(module: nn.Module) -> nn.Module:
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    module.has_first_weights = True  # type: ignore[assignment]
    return module


@torch.no_grad()
def _multiply(weight: Tensor, factor: float) -> None:
    weight.mul_(factor)


def _scaled_variance(weight: Tensor, initializer: str) -> None:
    """Fill a weight `[out, in, ...]`; normals are truncated at two deviations."""
    family, kind = initializer.split("_")
    # Of a convolution every position of the kernel counts: fan-in is channels times area.
    area = math.prod(weight.shape[2:])
    deviation = math.sqrt(_VARIANCES[family](weight.shape[1] * area, weight.shape[0] * area))
    if kind == "uniform":
        # A uniform distribution on [-a, a] has the deviation a / sqrt(3).
        nn.init.uniform_(weight, -math.sqrt(3.0) * deviation, math.sqrt(3.0) * deviation)
    else:
        whole = deviation / _TRUNCATED
        nn.init.trunc_normal_(weight, 0.0, whole, -2.0 * whole, 2.0 * whole)
