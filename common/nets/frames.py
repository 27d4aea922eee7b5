"""From single frames, as they are stored, to stacks of them, and to the layout of images."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_PIXELS = torch.from_numpy(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) * np.uint8(255))
"""uint8 `[256, 8]`: the pixels that a byte holds."""


def stacked(frames: Tensor, real: Tensor, stack: int) -> Tensor:
    """Stacks of the `stack` newest frames at each time.

    Args:
      frames: uint8 `[stack - 1 + T, B, *frame_shape]`.
      real: uint8 `[T, B]`, how many of the newest frames belong to the observation; older ones become zeros.
      stack: frames in a stack.

    Returns:
      uint8 `[T, B, stack, *frame_shape]`; stacks of four grey frames are stored channels-last.
    """
    steps, grey = len(real), frames.ndim == 4
    views = [frames[place : place + steps] for place in range(stack)]
    obs = interleaved(views) if grey and stack == 4 else torch.stack(views, dim=2)
    cut = (real < stack).nonzero(as_tuple=True)  # few: an episode's first steps
    foreign = torch.arange(stack, device=obs.device) < stack - real[cut][:, None].long()
    obs[cut] = obs[cut].masked_fill(foreign.reshape(*foreign.shape, *(1,) * (obs.ndim - 3)), 0)
    return obs


def interleaved(frames: Sequence[Tensor]) -> Tensor:
    """Four grey frames `uint8 [..., H, W]` as the channels of images `[..., 4, H, W]`, stored channels-last.

    The four bytes of a pixel are put together as one integer: twice as fast as copying with strides.
    """
    if sys.byteorder == "big":
        frames = frames[::-1]
    pixels = frames[3].to(torch.int32, memory_format=torch.contiguous_format, copy=True)
    for frame in reversed(frames[:3]):
        pixels.bitwise_left_shift_(8).bitwise_or_(frame)
    return pixels.unsqueeze(-1).view(torch.uint8).movedim(-1, -3)


def unpacked(obs: Tensor) -> Tensor:
    """Pixels, 0 or 255, of bytes that hold eight each: uint8 `[..., W]` of `[..., W / 8]`.

    `numpy.packbits` packs them, along the last axis.
    """
    pixels = _PIXELS.to(obs.device)
    if torch.jit.is_tracing():  # no other program takes bytes for other numbers
        return pixels[obs.long()].flatten(-2)
    # Eight bytes are looked up as one integer: ten times as fast as bit by bit.
    wide = pixels.view(torch.int64).squeeze(1).index_select(0, obs.flatten().int())
    return wide.view(torch.uint8).view(*obs.shape[:-1], 8 * obs.shape[-1])


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
