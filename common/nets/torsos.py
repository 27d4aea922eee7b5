"""Torsos: from one observation to a vector of features, for pixels and for vectors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from troupe.common.nets.convolution import Convolution
from troupe.common.nets.initializers import glorot_normal, lecun_normal, orthogonal
from troupe.common.nets.spectral import SpectralConvolution

Activation = Literal["auto", "relu", "elu", "swish", "tanh", "gelu"]
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "gelu": partial(nn.GELU, approximate="tanh"),  # as JAX's: erf takes longer, and differs by thousandths
}


@dataclass(frozen=True, slots=True)
class Style:
    """What goes with the layers of a torso that has no published form of its own."""

    activation: Activation = "auto"
    """`auto`: ReLU in pixel torsos and on top of them (GELU with `hadamax`), tanh in vector torsos."""
    layer_norm: bool = False
    """Normalise what a layer brings forth, before its activation."""
    residual: bool = False
    """Vectors: add what goes into a layer to what comes out of it, where both are of one width."""

    def after(self, norm: nn.Module, auto: str) -> list[nn.Module]:
        """What follows a layer: `norm` if it is wanted, then the activation."""
        activation = ACTIVATIONS[auto if self.activation == "auto" else self.activation]()
        return [norm, activation] if self.layer_norm else [activation]


PLAIN = Style()


class PictureTorso(nn.Module, ABC):
    """What torsos over images share.

    Attributes:
        features: F, width of what it gives.
        short: compute in bfloat16, whatever autocast says; see `compute_in`.
    """

    features: int
    short = False

    def forward(self, images: Tensor) -> Tensor:
        """Map `float [B, C, H, W]` to `float [B, features]`."""
        if not self.short:
            return _features(self._layers(images))
        with torch.autocast(images.device.type, torch.bfloat16):
            # What is on top stays exact: Q values of two actions differ by less than bfloat16 can tell apart.
            return _features(self._layers(images)).float()

    @abstractmethod
    def _layers(self, images: Tensor) -> Tensor:
        """Map `[B, C, H, W]` to `[B, C', H', W']`."""


class PixelTorso(PictureTorso):
    """Convolutions over images `float [B, C, H, W]`; gives `float [B, F]`.

    `nature`: 32 of 8x8/4, 64 of 4x4/2, 64 of 3x3/1 (Mnih et al. 2015).
    `small`: 16 of 8x8/4, 32 of 4x4/2 (Mnih et al. 2013), a quarter of the arithmetic.
    `wide`: 64 of 3x3/3, 64 of 3x3/2, 128 of 3x3/2, the network of the elite-replay platform.
    `minatar`: 16 of 3x3/1 (Young & Tian 2019), for grids too small for the others.
    """

    LAYERS: ClassVar = {
        "nature": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        "small": ((16, 8, 4), (32, 4, 2)),
        "wide": ((64, 3, 3), (64, 3, 2), (128, 3, 2)),
        "minatar": ((16, 3, 1),),
    }

    def __init__(self, kind: str, obs_shape: tuple[int, ...], style: Style = PLAIN) -> None:
        super().__init__()
        height, width = _picture(obs_shape, kind)
        channels = math.prod(obs_shape[:-2])
        layers: list[nn.Module] = []
        for filters, size, stride in self.LAYERS[kind]:
            layers.append(orthogonal(Convolution(channels, filters, size, stride)))
            layers += style.after(nn.GroupNorm(1, filters), "relu")  # one group: over channels and positions
            channels = filters
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
        if height < 1 or width < 1:
            raise ValueError(f"observations {obs_shape} are too small for the {kind} torso")
        self.convolutions = nn.Sequential(*layers)
        self.features = channels * height * width

    def _layers(self, images: Tensor) -> Tensor:
        return self.convolutions(images)


class ResidualBlock(nn.Module):
    """`x + conv(relu(conv(relu(x))))` with 3x3 convolutions, which may be spectral ones."""

    def __init__(self, channels: int, convolution: type[Convolution] = Convolution) -> None:
        super().__init__()
        self.first = lecun_normal(convolution(channels, channels, 3, padding=1))
        self.second = lecun_normal(convolution(channels, channels, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape `[B, C, H, W]`."""
        return x + self.second(torch.relu(self.first(torch.relu(x))))


class PooledTo(nn.AdaptiveMaxPool2d):
    """The largest of each of `side` x `side` parts of images with these sides.

    Parts overlap where they do not divide the image.
    """

    def __init__(self, side: int, sides: tuple[int, int]) -> None:
        super().__init__(side)
        self._parts = [
            [(part * whole // side, -(-(part + 1) * whole // side)) for part in range(side)]
            for whole in sides
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Map `[B, C, H, W]` to `[B, C, side, side]`."""
        if not torch.jit.is_tracing():
            pooled: Tensor = super().forward(images)
            return pooled
        # Part by part: ONNX knows no pooling whose windows differ in size.
        for axis, parts in zip((-2, -1), self._parts, strict=True):
            largest = [images.narrow(axis, first, end - first).amax(axis) for first, end in parts]
            images = torch.stack(largest, dim=axis)
        return images


class ResidualTorso(PictureTorso):
    """Over images: sections of a 3x3 convolution, a 3x3/2 max-pooling and two residual blocks; then a ReLU.

    `deep`: 16, 32 and 32 channels, 15 convolutions (Espeholt et al. 2018, figure 3, right).
    `football`: 16, 32, 32 and 32 channels (Kurach et al. 2020; Espeholt et al. 2020, the football network).
    `btr`: 32, 64 and 64 channels, the blocks' convolutions with spectral norm, and last a pooling to 6 x 6,
    whatever the picture's size (Clark et al. 2025, "Beyond The Rainbow").
    """

    SECTIONS: ClassVar = {"deep": (16, 32, 32), "football": (16, 32, 32, 32), "btr": (32, 64, 64)}
    BLOCKS = 2
    POOLED: ClassVar = {"btr": 6}
    SPECTRAL: ClassVar = {"btr"}

    def __init__(self, kind: str, obs_shape: tuple[int, ...]) -> None:
        super().__init__()
        height, width = _picture(obs_shape, kind)
        channels = math.prod(obs_shape[:-2])
        layers: list[nn.Module] = []
        for filters in self.SECTIONS[kind]:
            layers += [
                lecun_normal(Convolution(channels, filters, 3, padding=1)),
                nn.MaxPool2d(3, 2, padding=1),
            ]
            convolution = SpectralConvolution if kind in self.SPECTRAL else Convolution
            layers += [ResidualBlock(filters, convolution) for _ in range(self.BLOCKS)]
            channels = filters
            # What pooling with stride 2 and padding 1 leaves, odd sides rounded up.
            height, width = (height + 1) // 2, (width + 1) // 2
        self.sections = nn.Sequential(*layers)
        self.pooled: nn.Module | None = None
        if kind in self.POOLED:
            self.pooled = PooledTo(self.POOLED[kind], (height, width))
            height = width = self.POOLED[kind]
        self.features = channels * height * width

    def _layers(self, images: Tensor) -> Tensor:
        seen = torch.relu(self.sections(images))
        return seen if self.pooled is None else self.pooled(seen)


class HadamaxBlock(nn.Module):
    """`max_pool(act(norm(conv(x))) * act(norm(conv'(x))))`: two convolutions of stride 1, multiplied.

    Both, and the pooling, keep sides as they are but for the stride of the pooling, which rounds them up:
    what is missing is padded on both sides, of an odd number one more behind (`SAME` of JAX), with zeros for
    the convolutions, and for the pooling with what is never the largest.

    Args:
        channels: C of the images.
        filters: of each convolution.
        size: their height and width.
        pool: height and width of what is pooled.
        stride: of the pooling.
        sides: height and width of the images.
        style: of the activations. Layer norm, of each of both by itself, is always there: without it the
          products of three blocks are a millionth of what came in.
    """

    def __init__(
        self,
        channels: int,
        filters: int,
        size: int,
        pool: int,
        stride: int,
        sides: tuple[int, int],
        style: Style = PLAIN,
    ) -> None:
        super().__init__()
        height, width = sides
        style = replace(style, layer_norm=True)
        self.padded = nn.ZeroPad2d((*_same(width, size, 1), *_same(height, size, 1)))
        self.one, self.other = (
            nn.Sequential(
                glorot_normal(Convolution(channels, filters, size)),
                *style.after(nn.GroupNorm(1, filters), "gelu"),
            )
            for _ in range(2)
        )
        around = (*_same(width, pool, stride), *_same(height, pool, stride))
        self.pooled = nn.Sequential(nn.ConstantPad2d(around, -math.inf), nn.MaxPool2d(pool, stride))
        self.sides = -(-height // stride), -(-width // stride)

    def forward(self, images: Tensor) -> Tensor:
        """Map `[B, C, H, W]` to `[B, filters, *sides]`."""
        padded = self.padded(images)
        pooled: Tensor = self.pooled(self.one(padded) * self.other(padded))
        return pooled


class HadamaxTorso(PictureTorso):
    """Over images: the three layers of `nature` as `HadamaxBlock`s (Kooi et al. 2025, "Hadamax Encoding").

    32 of 8x8 pooled 4x4/4, 64 of 4x4 pooled 2x2/2, 64 of 3x3 pooled 3x3/1. Its layers see every place of the
    picture, where those of `nature` see each fourth: some twenty times the multiplications.
    """

    BLOCKS: ClassVar = ((32, 8, 4, 4), (64, 4, 2, 2), (64, 3, 3, 1))
    AUTO = "gelu"

    def __init__(self, kind: str, obs_shape: tuple[int, ...], style: Style = PLAIN) -> None:
        super().__init__()
        sides, channels = _picture(obs_shape, kind), math.prod(obs_shape[:-2])
        blocks = []
        for filters, size, pool, stride in self.BLOCKS:
            blocks.append(HadamaxBlock(channels, filters, size, pool, stride, sides, style))
            channels, sides = filters, blocks[-1].sides
        self.blocks = nn.Sequential(*blocks)
        self.features = channels * math.prod(sides)

    def _layers(self, images: Tensor) -> Tensor:
        return self.blocks(images)


def _same(side: int, window: int, stride: int) -> tuple[int, int]:
    """What is padded before and behind, so that windows at every stride reach over the whole side."""
    missing = max(0, (-(-side // stride) - 1) * stride + window - side)
    return missing // 2, missing - missing // 2


class VectorTorso(nn.Module):
    """Layers of `units` over `float [B, D]`; gives `[B, units[-1]]`."""

    def __init__(self, obs_shape: tuple[int, ...], units: tuple[int, ...], style: Style = PLAIN) -> None:
        super().__init__()
        width = math.prod(obs_shape)
        layers: list[nn.Module] = [nn.Flatten()]
        for size in units:
            parts = [orthogonal(nn.Linear(width, size)), *style.after(nn.LayerNorm(size), "tanh")]
            layers += [Residual(*parts)] if style.residual and size == width else parts
            width = size
        self.layers = nn.Sequential(*layers)
        self.features = width

    def forward(self, obs: Tensor) -> Tensor:
        """Map `[B, *obs_shape]` to `[B, features]`."""
        return self.layers(obs.to(torch.float32))


class Residual(nn.Sequential):
    """`x + layers(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return x + super().forward(x)


class Projected(nn.Module):
    """A torso and one layer of `units` on top of it.

    Attributes:
        short: compute that layer in bfloat16, whatever autocast says; see `compute_in`.
    """

    short = False

    def __init__(self, torso: nn.Module, units: int, style: Style = PLAIN) -> None:
        super().__init__()
        self.torso = torso
        self.project = orthogonal(nn.Linear(int(torso.features), units))  # type: ignore[arg-type]
        auto = getattr(torso, "AUTO", "relu")
        self.after = nn.Sequential(*style.after(nn.LayerNorm(units), auto))
        self.features = units

    def forward(self, obs: Tensor) -> Tensor:
        """Map `[B, *obs_shape]` to `[B, units]`."""
        features = self.torso(obs)
        if not self.short:
            return self.after(self.project(features))
        with torch.autocast(features.device.type, torch.bfloat16):
            projected = self.project(features)
        return self.after(projected.float())


MIN_SIDE = 20
"""Height and width under which nothing is left of a picture behind the `small` torso's layers."""
PIXEL_TORSOS = ("nature", "small", "shallow", "wide", "minatar", "hadamax", "deep", "football", "btr")
"""`shallow` (Espeholt et al. 2018, figure 3, left) has the convolutions of `small` (Mnih et al. 2013)."""


def make_torso(
    kind: str, obs_shape: tuple[int, ...], mlp_units: tuple[int, ...], style: Style = PLAIN
) -> VectorTorso | PixelTorso | HadamaxTorso | ResidualTorso:
    """The torso of this name: `mlp`, or one of `PIXEL_TORSOS`; ValueError where it does not suit.

    Pixel torsos are given what a module of `troupe.common.nets.pixels` makes of observations of `obs_shape`.
    The residual ones are as they were published, whatever the style.
    """
    if kind == "mlp":
        return VectorTorso(obs_shape, mlp_units, style)
    # Weights as well as images: with one of the two in another layout every convolution converts.
    return pixel_torso(kind, obs_shape, style).to(memory_format=torch.channels_last)  # type: ignore


def pixel_torso(
    kind: str, obs_shape: tuple[int, ...], style: Style = PLAIN
) -> PixelTorso | HadamaxTorso | ResidualTorso:
    """The one of `PIXEL_TORSOS` of this name."""
    if kind == "hadamax":
        return HadamaxTorso(kind, obs_shape, style)
    kind = "small" if kind == "shallow" else kind
    return PixelTorso(kind, obs_shape, style) if kind in PixelTorso.LAYERS else ResidualTorso(kind, obs_shape)


def compute_in(net: nn.Module, dtype: torch.dtype) -> bool:
    """Have a network that only acts compute its torsos over images in `dtype`; whether it has any.

    So does the layer that `Projected` puts on them: of a few images, it takes half as long as `nature` does.
    """
    parts = [module for module in net.modules() if isinstance(module, PictureTorso | Projected)]
    for part in parts:
        part.short = dtype is torch.bfloat16
    return bool(parts)


def _features(images: Tensor) -> Tensor:
    """Images `[B, C, H, W]` as rows `[B, F]`, pixel by pixel: as they are stored, so nothing is copied."""
    return images.movedim(1, -1).flatten(1)


def _picture(obs_shape: tuple[int, ...], kind: str) -> tuple[int, int]:
    if len(obs_shape) < 3:
        raise ValueError(f"the {kind} torso needs pictures (stack, height, width), not {obs_shape}")
    return obs_shape[-2], obs_shape[-1]
