"""Short films as animated GIF: no codec to install, played by TensorBoard, browsers and README pages."""

from __future__ import annotations

import io

import numpy as np

_MAX_COLOURS = 256


def encode_gif(frames: np.ndarray, frames_per_s: float = 15.0) -> bytes:
    """Encode frames uint8 `[T, H, W, 3]`.

    Emulators draw with few colours: where 256 suffice, the palette is exact and shared by all frames.

    Raises:
        ValueError: wrong shape or dtype.
    """
    from PIL import Image

    if frames.ndim != 4 or frames.shape[-1] != 3 or frames.dtype != np.uint8 or not frames.size:
        raise ValueError(f"expected uint8 frames [T, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    packed = (frames.astype(np.uint32) << np.array([16, 8, 0], np.uint32)).sum(axis=-1, dtype=np.uint32)
    colours = np.unique(packed)
    if len(colours) <= _MAX_COLOURS:
        palette = np.stack([colours >> 16, colours >> 8, colours], axis=-1).astype(np.uint8)
        indices = np.searchsorted(colours, packed).astype(np.uint8)
    else:  # six levels per channel, the classic web palette
        levels = np.arange(6, dtype=np.uint8) * 51
        palette = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)
        digits = (frames.astype(np.uint16) + 25) // 51
        indices = (digits @ np.array([36, 6, 1], np.uint16)).astype(np.uint8)
    images = []
    for frame in indices:
        image = Image.fromarray(frame)
        image.putpalette(palette.tobytes())
        images.append(image)
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        format="GIF",
        save_all=True,
        append_images=images[1:],
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
