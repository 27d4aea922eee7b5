"""Observations of several parts: each has an encoder of its own, and one layer joins them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from troupe.common.nets.pixels import NormalizedPixels, ScaledPixels
from troupe.common.nets.torsos import PLAIN, Projected, Style, VectorTorso, pixel_torso
from troupe.common.rl.fixed import constant, one_hot, shapes_are_fixed
from troupe.common.rl.normalizers import Normalizer
from troupe.common.spaces import Leaf

_LARGEST = 1e9


class PartInputs(nn.Module):
    """From packed bytes to numbers: choices one-hot, pictures scaled or normalised, numbers likewise.

    Args:
        leaves: the parts, see `troupe.common.spaces.packed`.
        pixels: normalise pixels by position, see `NormalizedPixels`; else they are divided by 255.
        limit: frames after which that stays as it is.
        vectors: normalise real numbers, see `Normalizer`.
    """

    def __init__(
        self,
        leaves: tuple[Leaf, ...],
        *,
        pixels: bool = True,
        limit: int | None = None,
        vectors: bool = False,
    ) -> None:
        super().__init__()
        self.leaves = leaves
        self.widths = tuple(sum(leaf.choices) or leaf.size for leaf in leaves)
        self._ends = [leaf.nbytes for leaf in leaves]
        self.scales = nn.ModuleList()
        for leaf in leaves:
            if leaf.picture:
                shape = image_shape(leaf)
                self.scales.append(NormalizedPixels(shape, 0, limit) if pixels else ScaledPixels())
            else:
                vector = vectors and not leaf.choices
                self.scales.append(Normalizer((leaf.size,), clip=10.0) if vector else nn.Identity())

    def forward(self, obs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Maps uint8 `[B, bytes]` to floats `[B, sum of widths]`; floats stay as they are."""
        return obs if obs.is_floating_point() else self._joined(self._arrays(obs)).to(dtype)

    def of_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Maps the parts themselves, `[B, *shape]` each in its own dtype, to what `forward` makes of them."""
        return self._joined(_ready(leaf, part) for leaf, part in zip(self.leaves, parts, strict=True))

    def observe(self, obs: Tensor, counts: Tensor | None = None) -> None:
        """Takes packed observations `[..., bytes]`, where `counts` `[...]`, into the statistics."""
        if not any(isinstance(scale, Normalizer) for scale in self.scales):
            return
        if counts is not None and not shapes_are_fixed():
            obs, counts = obs[counts], None
        counts = None if counts is None else counts.flatten()
        for array, scale in zip(self._arrays(obs.reshape(-1, obs.shape[-1])), self.scales, strict=True):
            if isinstance(scale, Normalizer):
                scale.observe(array, counts)

    def _arrays(self, obs: Tensor) -> Iterator[Tensor]:
        """Each part of `[B, bytes]`: images `[B, C, H, W]`, rows `[B, size]` of the others, without NaN."""
        for leaf, part in zip(self.leaves, obs.split(self._ends, dim=1), strict=True):
            # A copy begins where every dtype may.
            yield _ready(
                leaf, part.clone(memory_format=torch.contiguous_format).view(getattr(torch, leaf.dtype))
            )

    def _joined(self, arrays: Iterable[Tensor]) -> Tensor:
        parts = zip(self.leaves, arrays, self.scales, strict=True)
        return torch.cat([self._numbers(leaf, array, scale) for leaf, array, scale in parts], 1)

    def _numbers(self, leaf: Leaf, array: Tensor, scale: nn.Module) -> Tensor:
        if not leaf.choices:
            numbers: Tensor = scale(array)
            return numbers.to(torch.float32).flatten(1)
        places = array.long() - constant(leaf.start, array.device, torch.int64)
        most = max(leaf.choices)
        hot = one_hot(places.clamp(0, most - 1), most).to(torch.float32)
        # All alike, as buttons are: one tensor for all, instead of a slice for each.
        if min(leaf.choices) == most:
            return hot.flatten(1)
        return torch.cat([hot[:, place, :count] for place, count in enumerate(leaf.choices)], dim=1)


def _ready(leaf: Leaf, part: Tensor) -> Tensor:
    """A part `[B, ...]` as an image `[B, C, H, W]`, or a row `[B, size]`; no real number is NaN."""
    if leaf.picture:
        images = part.reshape(-1, *leaf.shape)
        return images.permute(0, 3, 1, 2) if leaf.picture == "hwc" else images.reshape(-1, *image_shape(leaf))
    array = part.reshape(-1, leaf.size)
    if not array.is_floating_point():
        return array
    # Bytes from a peer are any float there is; one NaN would spread over the batch through the statistics.
    return array.float().nan_to_num(0.0, _LARGEST, -_LARGEST).clamp(-_LARGEST, _LARGEST)


class PartsTorso(nn.Module):
    """An encoder for each part, and layers that join what they give.

    Pictures: the torso of this name, and a layer of `hidden_units`. Others: a layer of the first of
    `mlp_units`. The rest of `mlp_units`, the last at least, are layers on all of them together.

    Args:
        inputs: gives what this is given.
        kind: a name of `troupe.common.nets.torsos.PIXEL_TORSOS`; anything where there is no picture.
        hidden_units: see above.
        mlp_units: see above.
        style: of all layers.
    """

    def __init__(
        self,
        inputs: PartInputs,
        kind: str,
        hidden_units: int,
        mlp_units: tuple[int, ...],
        style: Style = PLAIN,
    ) -> None:
        super().__init__()
        self._leaves, self._widths = inputs.leaves, inputs.widths
        self.encoders = nn.ModuleList()
        for leaf, width in zip(inputs.leaves, inputs.widths, strict=True):
            if leaf.picture:
                shape = image_shape(leaf)
                self.encoders.append(Projected(pixel_torso(kind, shape, style), hidden_units, style))
            else:
                self.encoders.append(VectorTorso((width,), mlp_units[:1], style))
        found = sum(int(encoder.features) for encoder in self.encoders)  # type: ignore[arg-type, misc]
        # At least one layer on all of them: without it the parts would meet in the heads only, which are
        # linear.
        self.joined = VectorTorso((found,), mlp_units[1:] or mlp_units[-1:], style)
        self.features = self.joined.features

    def forward(self, seen: Tensor) -> Tensor:
        """Maps what `PartInputs` gives, `[B, sum of widths]`, to `[B, features]`."""
        found = []
        for leaf, part, encoder in zip(
            self._leaves, seen.split(list(self._widths), dim=1), self.encoders, strict=True
        ):
            found.append(encoder(part.reshape(-1, *image_shape(leaf)) if leaf.picture else part))
        return self.joined(torch.cat(found, dim=1))


def image_shape(leaf: Leaf) -> tuple[int, int, int]:
    """`(C, H, W)` of a picture."""
    match leaf.picture:
        case "hwc":
            return leaf.shape[2], leaf.shape[0], leaf.shape[1]
        case "chw":
            return leaf.shape[0], leaf.shape[1], leaf.shape[2]
    return (1, leaf.shape[0], leaf.shape[1])
