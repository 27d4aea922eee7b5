"""The picture pipeline of Gymnasium environments: grey, area-averaged resize, stack. The same as Atari's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from troupe.common.envs.returned import check_finite
from troupe.common.errors import ConfigError
from troupe.common.installation import install_command

MIN_SIDE = 32
"""Smaller pictures are grids of symbols rather than images."""


@dataclass(frozen=True)
class Layout:
    """How an environment's pictures become uint8 `[H, W]` or `[H, W, C]`."""

    channels_first: bool
    scale: float | None
    """What floats are multiplied with to lie in 0 to 255; None where they are uint8 already."""


def layout_of(space: Any) -> Layout | None:
    """How a Gymnasium space shows pictures, None where it shows none.

    Raises ValueError, which says why, where its arrays look like pictures but are none that a convolution
    could learn from: other numbers of colours, under 32 pixels wide or high, or without bounds.
    """
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype is None or not looks_like_picture(space):
        return None
    colours = (1, 3)
    if len(shape) == 2 or shape[2] in colours:
        layout, sides = Layout(False, None), shape[:2]
    elif shape[0] in colours:
        layout, sides = Layout(True, None), shape[1:]
    else:
        raise ValueError(f"with neither 1 nor 3 colours in the first or last axis of {list(shape)}")
    if min(sides) < MIN_SIDE:
        raise ValueError(f"of {sides[0]} x {sides[1]}, under {MIN_SIDE} x {MIN_SIDE} pixels")
    if dtype == np.uint8:
        return layout
    low, high = float(np.min(space.low)), float(np.max(space.high))
    if low < 0 or high > 255:
        raise ValueError(f"whose {dtype} values go from {low:g} to {high:g}, not from 0 to 1 or 0 to 255")
    return replace(layout, scale=255.0 if high <= 1 else 1.0)


def looks_like_picture(space: Any) -> bool:
    """Whether a Gymnasium space has three axes, or two of at least 32 numbers."""
    shape = getattr(space, "shape", None) or ()
    return hasattr(space, "low") and (len(shape) >= 3 or (len(shape) == 2 and min(shape) >= MIN_SIDE))


class FrameProcessor:
    """Turns a picture into a frame: `(size, size)` grey or `(3, size, size)`, uint8."""

    def __init__(self, size: int, *, grayscale: bool, layout: Layout | None = None) -> None:
        """`layout` of the pictures: uint8 `[H, W]` or `[H, W, C]` unless it says something else."""
        try:
            import cv2
        except ImportError as error:
            message = f"pictures need the package opencv-python-headless: {install_command('actor')}"
            raise ConfigError(message) from error
        cv2.setNumThreads(1)  # several actors share the machine; OpenCV would use all cores in each
        self._cv2 = cv2
        self._size = size
        self._grayscale = grayscale
        self._layout = layout or Layout(False, None)
        self.frame_shape: tuple[int, ...] = (size, size) if grayscale else (3, size, size)

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        """The processed frame, uint8, of `frame_shape`."""
        cv2, layout = self._cv2, self._layout
        if layout.scale is not None:
            check_finite(picture)
            # Rounded and clipped: `astype` cuts fractions, and wraps what is beyond the range.
            picture = np.rint(np.clip(picture * layout.scale, 0, 255)).astype(np.uint8)
        if layout.channels_first:
            picture = np.moveaxis(picture, 0, -1)
        picture = np.ascontiguousarray(picture)
        if picture.ndim == 3 and picture.shape[2] == 1:
            picture = picture[..., 0]
        if self._grayscale and picture.ndim == 3:
            picture = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        if picture.shape[:2] != (self._size, self._size):
            # The mean over an area, as in DQN's pipeline: a ball of two pixels does not vanish between
            # sampled rows.
            picture = cv2.resize(picture, (self._size, self._size), interpolation=cv2.INTER_AREA)
        if self._grayscale:
            return picture
        if picture.ndim == 2:
            picture = np.repeat(picture[..., None], 3, axis=-1)
        return np.moveaxis(picture, -1, 0)


def push_frame(stack: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """A new stack `[K, ...]`: the oldest frame dropped, `frame` added at the end."""
    # `np.roll` would make two copies.
    pushed = np.empty_like(stack)
    pushed[:-1] = stack[1:]
    pushed[-1] = frame
    return pushed
