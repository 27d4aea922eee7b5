"""Pixels: from single frames, as they are stored, to stacks of them, and to images that a network can see."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from troupe.common.rl.fixed import shapes_are_fixed
from troupe.common.rl.normalizers import Normalizer


def stacked(frames: Tensor, real: Tensor, stack: int) -> Tensor:
    """Stacks of the `stack` newest frames at each time.

    Args:
        frames: uint8 `[stack - 1 + T, B, *frame_shape]`.
        real: uint8 `[T, B]`, how many of the newest frames belong to the observation; older ones become
          zeros.
        stack: frames in a stack.

    Returns:
        uint8 `[T, B, stack, *frame_shape]`; stacks of four grey frames are stored channels-last.
    """
    steps, grey = len(real), frames.ndim == 4
    views = [frames[place : place + steps] for place in range(stack)]
    obs = interleaved(views) if grey and stack == 4 else torch.stack(views, dim=2)
    if shapes_are_fixed():
        foreign = torch.arange(stack, device=obs.device) < stack - real[..., None].long()
        return obs.masked_fill_(foreign.reshape(*foreign.shape, *(1,) * (obs.ndim - 3)), 0)
    cut = (real < stack).nonzero(as_tuple=True)  # few: an episode's first steps
    foreign = torch.arange(stack, device=obs.device) < stack - real[cut][:, None].long()
    # The frames there are another episode's, which is stored next to this one; the agent saw zeros.
    obs[cut] = obs[cut].masked_fill(foreign.reshape(*foreign.shape, *(1,) * (obs.ndim - 3)), 0)
    return obs


def interleaved(frames: Sequence[Tensor]) -> Tensor:
    """Four grey frames `uint8 [..., H, W]` as the channels of images `[..., 4, H, W]`, stored channels-last.

    The four bytes of a pixel are put together as one integer: twice as fast as copying with strides.
    """
    # The first byte in memory has to be the oldest frame.
    if sys.byteorder == "big":
        frames = frames[::-1]
    shape, device = frames[0].shape, frames[0].device
    pixels = torch.empty(shape, dtype=torch.int32, device=device)
    rows = max(1, _STACKED // max(1, math.prod(shape[1:-2]))) if device.type == "cpu" else max(1, len(pixels))
    for block, *parts in zip(pixels.split(rows), *(each.split(rows) for each in frames), strict=True):
        # Newest first: each shift moves it up by a byte, so that it ends as the last channel.
        block.copy_(parts[3])
        for part in reversed(parts[:3]):
            block.bitwise_left_shift_(8).bitwise_or_(part)
    return pixels.unsqueeze(-1).view(torch.uint8).movedim(-1, -3)


def unpacked(obs: Tensor) -> Tensor:
    """Pixels, 0 or 255, of bytes that hold eight each: uint8 `[..., W]` of `[..., W / 8]`.

    `numpy.packbits` packs them, along the last axis.
    """
    pixels = _pixels(obs.device)
    if torch.jit.is_tracing():  # no other program takes bytes for other numbers
        return pixels[obs.long()].flatten(-2)
    # Eight bytes are looked up as one integer: ten times as fast as bit by bit.
    wide = pixels.view(torch.int64).squeeze(1).index_select(0, obs.flatten().int())
    return wide.view(torch.uint8).view(*obs.shape[:-1], 8 * obs.shape[-1])


@functools.cache
def _pixels(device: torch.device) -> Tensor:
    """uint8 `[256, 8]`: the pixels that a byte holds. Made once for each device, as a graph needs it."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    with torch.inference_mode(False):
        return torch.from_numpy(bits * np.uint8(255)).to(device)


def as_images(obs: Tensor) -> Tensor:
    """Pixels uint8 `[B, ..., H, W]` as images `[B, C, H, W]`; stack and colour are channels.

    Four channels are stored channels-last, as networks want them: convolutions on a CPU are a quarter to a
    third faster then, forward and backward.
    """
    obs = obs.flatten(1, -3)
    if torch.jit.is_tracing():  # for another program, which lays memory out as it likes
        return obs
    if obs.shape[1] == 4 and not obs.is_contiguous(memory_format=torch.channels_last):
        obs = interleaved(obs.unbind(1))
    return obs


MIN_DEVIATION = 1.0
"""Deviation under which a pixel's changes are not made larger, in grey levels."""
CLIP = 5.0
# Images that are scaled, and that are made of four frames, at a time on a CPU: they stay in its cache between
# the passes.
_BLOCK, _STACKED = 16, 48
# Spacing of the rows and columns that are looked at before a whole frame is.
_PROBE = 8


class ScaledPixels(nn.Module):
    """Pixels divided by 255."""

    def forward(self, obs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map uint8 `[B, ..., H, W]` to images `[B, C, H, W]` in [0, 1]; images stay as they are."""
        if obs.is_floating_point():
            return obs
        return as_images(obs).to(dtype, memory_format=torch.channels_last).mul_(1.0 / 255.0)

    def observe(self, obs: Tensor, counts: Tensor | None = None) -> None:
        """Nothing: the scale is fixed."""


class NormalizedPixels(Normalizer):
    """Every pixel minus its position's mean, divided by its deviation; padding becomes 0.

    On a constant ground, pixels divided by 255 are a constant and almost nothing beside it, and the ReLU
    units behind are on or off for every picture alike. Normalised, they switch.

    One frame's statistics serve all places of a stack. A stack's oldest frames that are nothing but zeros are
    padding: they stand for what was before the episode. Until the first `observe`, pixels are divided by 255.

    Args:
        frame_shape: shape of one frame, `(H, W)` or `(C, H, W)`.
        stack: frames in an observation `(stack, *frame_shape)`; 0: it is a single frame.
        limit: frames after which mean and deviation stay as they are; None: never.
    """

    def __init__(self, frame_shape: tuple[int, ...], stack: int, limit: int | None = None) -> None:
        super().__init__(frame_shape, floor=MIN_DEVIATION, clip=CLIP, deviation=255.0, limit=limit)
        self._stack = stack

    def forward(self, obs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map uint8 `[B, ..., H, W]` to images `[B, C, H, W]`; the axes between are channels.

        Images, which are floats, have been here before, and stay as they are.
        """
        if obs.is_floating_point():
            return obs
        pixels = as_images(obs)
        scale = 1.0 / self.deviation
        if torch.jit.is_tracing():
            return self._traceable(pixels, scale).to(dtype)
        # Both are laid out as a whole image: broadcast over channels, the innermost axis, they would be slow.
        factor, shift = self._as_image(scale), self._as_image(-self.mean * scale)
        images = torch.empty_like(pixels, dtype=dtype, memory_format=torch.channels_last)
        # A GPU has no use for blocks: each would be a launch of its own.
        block = _BLOCK if images.device.type == "cpu" else max(1, len(images))
        for raw, image in zip(pixels.split(block), images.split(block), strict=True):
            scaled = image.copy_(raw) if dtype == torch.float32 else raw.to(torch.float32)
            torch.addcmul(shift, scaled, factor, out=scaled).clamp_(-self._clip, self._clip)
            if scaled is not image:
                image.copy_(scaled)
        self._blank_padding(pixels, images)
        return images

    def observe(self, obs: Tensor, counts: Tensor | None = None) -> None:
        """Take in the newest frames of observations `[..., *obs_shape]`, of those where `counts` `[...]`.

        Only the newest: older places hold the same frames once more, and padding.
        """
        if self.frozen:
            return
        frames = obs.select(-len(self.shape) - 1, -1) if self._stack else obs
        self.update(frames, counts)

    def _traceable(self, pixels: Tensor, scale: Tensor) -> Tensor:
        """The same in plain arithmetic, which every format of a network knows."""
        factor, shift = self._as_image(scale), self._as_image(-self.mean * scale)
        images = (pixels.to(torch.float32) * factor + shift).clamp(-self._clip, self._clip)
        if self._stack < 2:
            return images
        frames = pixels.to(torch.float32).unflatten(1, (self._stack, -1))
        seen = torch.zeros_like(frames[:, 0].flatten(1).amax(1))  # the brightest pixel so far
        shown = []
        for place, image in enumerate(images.unflatten(1, (self._stack, -1)).unbind(1)):
            seen = torch.maximum(seen, frames[:, place].flatten(1).amax(1))
            newest = place == self._stack - 1
            shown.append(image if newest else image * (seen > 0).to(image.dtype)[:, None, None, None])
        return torch.cat(shown, dim=1)

    def _as_image(self, values: Tensor) -> Tensor:
        frame = self._of_a_sample(values)
        channels = frame.reshape(-1, *self.shape[-2:]).repeat(max(1, self._stack), 1, 1)
        return channels[None].contiguous(memory_format=torch.channels_last)

    def _blank_padding(self, pixels: Tensor, images: Tensor) -> None:
        """Zeros where `pixels` `[B, C, H, W]` have padding. The newest frame never is."""
        if self._stack < 2:
            return
        frames = pixels.unflatten(1, (self._stack, -1))
        padded = images.unflatten(1, (self._stack, -1))
        if shapes_are_fixed():
            padding = (frames[:, :-1].flatten(2).amax(2) == 0).cumprod(1).bool()
            padded[:, :-1].masked_fill_(padding[..., None, None, None], 0.0)
            return
        # One pixel in 64 of the oldest frame: most frames show something there, and only the rest are looked
        # at whole.
        probe = frames[:, 0, :, ::_PROBE, ::_PROBE].flatten(1)
        rows = (probe.amax(1) == 0).nonzero().squeeze(1)  # few, where the ground is not black
        if not len(rows):
            return
        blank = frames[rows, :-1].flatten(2).amax(2) == 0
        # From the oldest on and without a gap: a black frame in the middle of a stack was really seen.
        padding = blank.cumprod(1).bool()
        padded[rows, :-1] = padded[rows, :-1].masked_fill(padding[..., None, None, None], 0.0)


class PackedPixels(nn.Module):
    """What `pixels` makes of observations whose bytes hold eight pixels each (`EnvSpec.packed_bits`)."""

    def __init__(self, pixels: ScaledPixels | NormalizedPixels) -> None:
        super().__init__()
        self.pixels = pixels

    def forward(self, obs: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Map uint8 `[B, ..., H, W / 8]` to images `[B, C, H, W]`; images stay as they are."""
        images: Tensor = obs if obs.is_floating_point() else self.pixels(unpacked(obs), dtype)
        return images

    def observe(self, obs: Tensor, counts: Tensor | None = None) -> None:
        """Take in the newest frames of observations `[..., *obs_shape]`, of those where `counts` `[...]`."""
        if isinstance(self.pixels, NormalizedPixels) and not self.pixels.frozen:
            self.pixels.observe(unpacked(obs), counts)
