"""The picture pipeline of Gymnasium environments: grey, area-averaged resize, stack. The same as Atari's."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import ConfigError

MIN_SIDE = 32
"""Smaller pictures are grids of symbols rather than images, and are handed on as vectors."""


def is_image(space: Any) -> bool:
    """Whether a Gymnasium space is a uint8 picture `[H, W]`, `[H, W, 1]` or `[H, W, 3]`."""
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if shape is None or dtype != np.uint8 or len(shape) not in (2, 3):
        return False
    return min(shape[:2]) >= MIN_SIDE and (len(shape) == 2 or shape[2] in (1, 3))


class FrameProcessor:
    """Turns a picture `[H, W]` or `[H, W, C]` into a frame: `(size, size)` grey or `(3, size, size)`."""

    def __init__(self, size: int, *, grayscale: bool) -> None:
        try:
            import cv2
        except ImportError as error:
            message = "pictures need the package opencv-python-headless: pip install 'troupe[actor]'"
            raise ConfigError(message) from error
        cv2.setNumThreads(
            1
        )  # several actors share the machine; OpenCV would start one thread per core in each
        self._cv2 = cv2
        self._size = size
        self._grayscale = grayscale
        self.frame_shape: tuple[int, ...] = (size, size) if grayscale else (3, size, size)

    def __call__(self, picture: np.ndarray) -> np.ndarray:
        """The processed frame, uint8, of `frame_shape`."""
        cv2 = self._cv2
        picture = np.ascontiguousarray(picture)
        if picture.ndim == 3 and picture.shape[2] == 1:
            picture = picture[..., 0]
        if self._grayscale and picture.ndim == 3:
            picture = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
        if picture.shape[:2] != (self._size, self._size):
            picture = cv2.resize(picture, (self._size, self._size), interpolation=cv2.INTER_AREA)
        if self._grayscale:
            return picture
        if picture.ndim == 2:
            picture = np.repeat(picture[..., None], 3, axis=-1)
        return np.moveaxis(picture, -1, 0)


def push_frame(stack: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """A new stack `[K, ...]`: the oldest frame dropped, `frame` added at the end."""
    pushed = np.empty_like(stack)
    pushed[:-1] = stack[1:]
    pushed[-1] = frame
    return pushed
