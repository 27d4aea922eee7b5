"""Short films as animated GIF: no codec to install, played by TensorBoard, browsers and README pages."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import overload

import lz4.frame
import numpy as np

_MAX_COLOURS = 256


class Recorder(Sequence[np.ndarray]):
    """Frames of a game, thinned out, scaled down and compressed as they come; reads as a sequence."""

    def __init__(self, *, every: int = 2, max_frames: int = 1000, max_side: int = 240) -> None:
        """Create an empty recording.

        Args:
            every: keep one frame of so many.
            max_frames: frames after which `add` ignores the rest.
            max_side: larger frames are scaled down by a whole factor, in pixels.
        """
        self._every, self._max_frames, self._max_side = every, max_frames, max_side
        self._seen = 0
        self._shape: tuple[int, ...] = ()
        self._frames: list[bytes] = []

    @property
    def full(self) -> bool:
        """Whether further frames are ignored."""
        return len(self._frames) >= self._max_frames

    def due(self) -> bool:
        """Count a frame, and say whether it would be kept (to draw none in vain)."""
        self._seen += 1
        return not self.full and (self._seen - 1) % self._every == 0

    def add(self, frame: np.ndarray) -> None:
        """Keep a frame, uint8 `[H, W, 3]`; one of another size than the first is ignored."""
        factor = -(-max(frame.shape[:2]) // self._max_side)
        small = np.ascontiguousarray(frame[::factor, ::factor])
        self._shape = self._shape or small.shape
        if small.shape == self._shape and not self.full:
            self._frames.append(lz4.frame.compress(small))

    def __len__(self) -> int:
        return len(self._frames)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return np.frombuffer(lz4.frame.decompress(self._frames[index]), np.uint8).reshape(self._shape)


def encode_gif(frames: Sequence[np.ndarray] | np.ndarray, frames_per_s: float = 15.0) -> bytes:
    """Encode frames uint8 `[H, W, 3]`, all of one size.

    Emulators draw with few colours: where 256 suffice, the palette is exact and shared by all frames.

    Raises:
        ValueError: no frames, or wrong shape or dtype.
    """
    from PIL import Image

    if len(frames) == 0 or any(f.ndim != 3 or f.shape[-1] != 3 or f.dtype != np.uint8 for f in frames):
        raise ValueError("expected at least one frame, uint8 [H, W, 3]")
    colours = _colours_of(frames)
    palette = _WEB_PALETTE if colours is None else _unpacked(colours)

    def image(frame: np.ndarray) -> Image.Image:
        indices = _web_indices(frame) if colours is None else np.searchsorted(colours, _packed(frame))
        picture = Image.fromarray(indices.astype(np.uint8))
        picture.putpalette(palette.tobytes())
        return picture

    buffer = io.BytesIO()
    image(frames[0]).save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=(image(frames[i]) for i in range(1, len(frames))),
        duration=round(1000 / frames_per_s),
        loop=0,
        optimize=False,
    )
    return buffer.getvalue()


def as_gif(video: np.ndarray | bytes | bytearray | memoryview, frames_per_s: float) -> tuple[bytes, int, int]:
    """Return `(gif, height, width)` of an encoded GIF (bytes or uint8 `[N]`) or of frames `[T, H, W, 3]`.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(video, np.ndarray) and video.ndim == 4:
        return encode_gif(video, frames_per_s), video.shape[1], video.shape[2]
    data = video.tobytes() if isinstance(video, np.ndarray) else bytes(video)
    if len(data) < 10 or data[:4] != b"GIF8":
        raise ValueError("neither a GIF nor frames [T, H, W, 3]")
    return data, int.from_bytes(data[8:10], "little"), int.from_bytes(data[6:8], "little")


def _colours_of(frames: Sequence[np.ndarray] | np.ndarray) -> np.ndarray | None:
    """All colours that occur, packed and sorted; None if they are too many for a palette."""
    colours = np.zeros(0, np.uint32)
    for i in range(len(frames)):
        colours = np.union1d(colours, _packed(frames[i]))
        if len(colours) > _MAX_COLOURS:
            return None
    return colours


def _packed(frame: np.ndarray) -> np.ndarray:
    """uint32 `[H, W]`, 0xRRGGBB."""
    wide = frame.astype(np.uint32)
    return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]


def _unpacked(colours: np.ndarray) -> np.ndarray:
    """uint8 `[N, 3]` of packed colours `[N]`."""
    return np.stack([colours >> 16, colours >> 8, colours], axis=-1).astype(np.uint8)


# Six levels per channel.
_LEVELS = np.arange(6, dtype=np.uint8) * 51
_WEB_PALETTE = np.stack(np.meshgrid(_LEVELS, _LEVELS, _LEVELS, indexing="ij"), axis=-1).reshape(-1, 3)


def _web_indices(frame: np.ndarray) -> np.ndarray:
    """Index of the nearest colour of `_WEB_PALETTE`, `[H, W]`."""
    return ((frame.astype(np.uint16) + 25) // 51) @ np.array([36, 6, 1], np.uint16)
