"""What a spectator sees of an environment: whatever it drew as one kind of picture, or why there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from troupe.common.envs.base import cause_of
from troupe.common.errors import TroupeError, caught

_CHANNELS = (1, 3, 4)


class NoPictureError(TroupeError):
    """An environment has nothing to show; the text says why, and what would help."""


def picture_of(env_id: str, draw: Callable[[], Any]) -> np.ndarray:
    """What `draw` of an environment shows, see `spectator_view`; NoPictureError also where it fails."""
    try:
        return spectator_view(env_id, draw())
    except NoPictureError:
        raise
    except caught() as error:
        raise NoPictureError(f"{env_id} cannot be rendered: {cause_of(error)}") from error


def spectator_view(env_id: str, frame: Any) -> np.ndarray:
    """What an environment drew as uint8 `[H, W, 3]`.

    Args:
        env_id: for the error.
        frame: `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1, 3 or 4 (with transparency) channels; booleans,
            integers in 0 to 255, or floats in 0 to 1 or 0 to 255. Of a list of frames the last one is taken.

    Raises:
        NoPictureError: it is something else.
    """
    if isinstance(frame, list) and frame and np.ndim(frame[-1]) >= 2:
        frame = frame[-1]
    array = np.asarray(frame)
    what = f"{array.dtype} {list(array.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim == 3 and array.shape[-1] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = np.moveaxis(array, 0, -1)
    if (
        array.dtype.kind not in "buif"
        or array.ndim != 3
        or array.shape[-1] not in _CHANNELS
        or not array.size
    ):
        raise NoPictureError(f"the render() of {env_id} returns {what}: no picture such as uint8 [H, W, 3]")
    if array.dtype != np.uint8:
        if array.dtype.kind == "f":
            array = np.nan_to_num(array, posinf=255.0)
        if array.dtype.kind == "b" or (array.dtype.kind == "f" and array.max() <= 1):
            array = array * 255.0
        array = np.rint(np.clip(array, 0, 255)).astype(np.uint8)
    array = array[..., :3]
    return np.ascontiguousarray(np.broadcast_to(array, (*array.shape[:2], 3)))
