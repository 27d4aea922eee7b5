"""Torsos: from one observation to a vector of features, for pixels and for vectors."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from common.nets.frames import as_images


def orthogonal(module: nn.Module, gain: float = math.sqrt(2.0)) -> nn.Module:
    """Initialises a layer's weight orthogonally and its bias with zeros, and returns it."""
    nn.init.orthogonal_(module.weight, gain)  # type: ignore[arg-type]
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


def lecun_normal(module: nn.Module) -> nn.Module:
    """Initialises a layer's weight with variance 1 / fan-in, truncated at two deviations, its bias with 0."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    # A normal that is truncated at two deviations has 0.8796 times the deviation that it was asked for.
    deviation = 1.0 / math.sqrt(weight[0].numel()) / 0.87962566103423978
    nn.init.trunc_normal_(weight, 0.0, deviation, -2.0 * deviation, 2.0 * deviation)
    nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return module


class PixelTorso(nn.Module):
    """Convolutions over `uint8 [B, C, H, W]`, scaled to [0, 1] inside; gives `float [B, F]`.

    `nature`: 32 of 8x8/4, 64 of 4x4/2, 64 of 3x3/1 (Mnih et al. 2015).
    `small`: 16 of 8x8/4, 32 of 4x4/2 (Mnih et al. 2013), a quarter of the arithmetic.
    """

    LAYERS: ClassVar = {
        "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        "small": ((16, 8, 4), (32, 4, 2)),
    }

    def __init__(self, kind: str, obs_shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width = _picture(obs_shape, kind)
        channels = math.prod(obs_shape[:-2])
        layers: list[nn.Module] = []
        for filters, size, stride in self.LAYERS[kind]:
            layers += [orthogonal(nn.Conv2d(channels, filters, size, stride)), nn.ReLU()]
            channels = filters
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        if height < 1 or width < 1:
            raise ValueError(f"observations {obs_shape} are too small for the {kind} torso")
        self.convolutions = nn.Sequential(*layers)
        self.features = channels * height * width

    def forward(self, obs: Tensor) -> Tensor:
        """Maps `[B, ..., H, W]` pixels to `[B, features]`; the axes between (stack, colour) are channels."""
        return self.convolutions(as_images(obs)).flatten(1)


class ResidualBlock(nn.Module):
    """`x + conv(relu(conv(relu(x))))` with 3x3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = lecun_normal(nn.Conv2d(channels, channels, 3, padding=1))
        self.second = lecun_normal(nn.Conv2d(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Keeps the shape `[B, C, H, W]`."""
        return x + self.second(torch.relu(self.first(torch.relu(x))))


class ResidualTorso(nn.Module):
    """Sections of a 3x3 convolution, a 3x3/2 max-pooling and two residual blocks; then a ReLU.

    `deep`: 16, 32 and 32 channels, 15 convolutions (Espeholt et al. 2018, figure 3, right).
    `football`: 16, 32, 32 and 32 channels (Kurach et al. 2020; Espeholt et al. 2020, the football network).
    """

    SECTIONS: ClassVar = {"deep": (16, 32, 32), "football": (16, 32, 32, 32)}
    BLOCKS = 2

    def __init__(self, kind: str, obs_shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width = _picture(obs_shape, kind)
        channels = math.prod(obs_shape[:-2])
        layers: list[nn.Module] = []
        for filters in self.SECTIONS[kind]:
            layers += [
                lecun_normal(nn.Conv2d(channels, filters, 3, padding=1)),
                nn.MaxPool2d(3, 2, padding=1),
            ]
            layers += [ResidualBlock(filters) for _ in range(self.BLOCKS)]
            channels = filters
            height, width = (height + 1) // 2, (width + 1) // 2
        self.sections = nn.Sequential(*layers)
        self.features = channels * height * width

    def forward(self, obs: Tensor) -> Tensor:
        """Maps `[B, ..., H, W]` pixels to `[B, features]`; the axes between (stack, colour) are channels."""
        return torch.relu(self.sections(as_images(obs))).flatten(1)


class VectorTorso(nn.Module):
    """Tanh layers over `float [B, D]`; gives `[B, units[-1]]`."""

    def __init__(self, obs_shape: tuple[int, ...], units: tuple[int, ...]) -> None:
        super().__init__()
        width = math.prod(obs_shape)
        layers: list[nn.Module] = [nn.Flatten()]
        for size in units:
            layers += [orthogonal(nn.Linear(width, size)), nn.Tanh()]
            width = size
        self.layers = nn.Sequential(*layers)
        self.features = width

    def forward(self, obs: Tensor) -> Tensor:
        """Maps `[B, *obs_shape]` to `[B, features]`."""
        return self.layers(obs.to(torch.float32))


class Projected(nn.Module):
    """A torso and one ReLU layer of `units` on top of it."""

    def __init__(self, torso: nn.Module, units: int) -> None:
        super().__init__()
        self.torso = torso
        self.project = orthogonal(nn.Linear(int(torso.features), units))  # type: ignore[arg-type]
        self.features = units

    def forward(self, obs: Tensor) -> Tensor:
        """Maps `[B, *obs_shape]` to `[B, units]`."""
        return torch.relu(self.project(self.torso(obs)))


PIXEL_TORSOS = ("nature", "small", "deep", "football")


def make_torso(kind: str, obs_shape: tuple[int, ...], mlp_units: tuple[int, ...]) -> nn.Module:
    """The torso of this name: `mlp`, or one of `PIXEL_TORSOS`; ValueError where it does not suit."""
    if kind == "mlp":
        return VectorTorso(obs_shape, mlp_units)
    torso = (PixelTorso if kind in PixelTorso.LAYERS else ResidualTorso)(kind, obs_shape)
    return torso.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _picture(obs_shape: tuple[int, ...], kind: str) -> tuple[int, int]:
    if len(obs_shape) < 3:
        raise ValueError(f"the {kind} torso needs pictures (stack, height, width), not {obs_shape}")
    return obs_shape[-2], obs_shape[-1]
