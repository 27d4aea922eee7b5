"""Films of games: GIF, which TensorBoard plays, and H.264 in MP4, which is sharper and smaller."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import overload

import lz4.frame
import numpy as np

_MAX_FRAMES_PER_S = 30.0
_USUAL_STEPS_PER_S = 15.0
_PALETTE_FRAMES = 16
_MP4_SIDE = 480
_MIN_SIDE = 160  # grids of symbols, a pixel a field, would be specks


class Recorder(Sequence[np.ndarray]):
    """Frames of a game, thinned out, scaled and compressed as they come; reads as a sequence.

    Attributes:
        frames_per_s: at which the frames are to be shown.
        missing: why there are no frames; empty where there are, or where nothing was tried.
    """

    def __init__(self, *, max_steps: int = 10_000, max_side: int = 480) -> None:
        """Create an empty recording.

        Args:
            max_steps: steps of the game after which it ends.
            max_side: larger frames are scaled down by a whole factor, in pixels.
        """
        self.frames_per_s = _USUAL_STEPS_PER_S
        self.missing = ""
        self._every, self._max_steps, self._max_side = 1, max_steps, max_side
        self._seen = 0
        self._shape: tuple[int, ...] = ()
        self._frames: list[bytes] = []

    def begin(self, steps_per_s: float) -> None:
        """Say how many steps of the game make a second of film; of more than 30, not every one is kept."""
        self._every, self.frames_per_s = thinned(steps_per_s, _MAX_FRAMES_PER_S)

    def due(self) -> bool:
        """Count a step, and say whether its frame would be kept (to draw none in vain)."""
        self._seen += 1
        return self._seen <= self._max_steps and (self._seen - 1) % self._every == 0

    def add(self, frame: np.ndarray) -> None:
        """Keep a frame, uint8 `[H, W, 3]`; one of another size than the first is ignored."""
        factor = -(-max(frame.shape[:2]) // self._max_side)
        if factor > 1:
            small = _reduced(frame, factor)
        else:
            small = _enlarged(frame, max(1, _MIN_SIDE // max(frame.shape[:2])))
        self._shape = self._shape or small.shape
        if small.shape == self._shape:
            # Compressed at once: an hour of pictures would be gigabytes.
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


def thinned(steps_per_s: float, max_frames_per_s: float) -> tuple[int, float]:
    """The steps from one frame of a film to the next, for at most `max_frames_per_s`, and the film's rate.

    A game that says no finite rate above 0 has 15 steps a second.
    """
    rate = steps_per_s if math.isfinite(steps_per_s) and steps_per_s > 0 else _USUAL_STEPS_PER_S
    every = max(1, math.ceil(rate / max_frames_per_s))
    return every, rate / every


def encode_gif(
    frames: Sequence[np.ndarray], frames_per_s: float = 15.0, max_bytes: float = math.inf
) -> bytes:
    """Encode frames uint8 `[H, W, 3]`, all of one size, with one palette for all.

    Args:
        frames: at least one.
        frames_per_s: a GIF counts in hundredths of a second.
        max_bytes: where the film is larger, every second frame is left out, until it fits or is one picture.

    Raises:
        ValueError: no frames, or wrong shape or dtype.
    """
    from PIL import Image

    _check(frames)
    shown = np.unique(np.linspace(0, len(frames) - 1, _PALETTE_FRAMES).astype(int))
    # One palette from frames over the whole film: with one for each frame, colours would flicker and the file
    # double.
    palette = Image.fromarray(np.concatenate([frames[i] for i in shown])).quantize(256)
    pictures = [
        Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames
    ]
    for every in (2**n for n in range(len(pictures).bit_length() + 1)):
        buffer = io.BytesIO()
        first, *others = pictures[::every]
        duration_ms = 10 * round(100 * every / frames_per_s)
        options = {"save_all": True, "append_images": others, "duration": duration_ms, "loop": 0}
        first.save(buffer, format="GIF", optimize=False, **options)
        if buffer.tell() <= max_bytes:
            break
    return buffer.getvalue()


def encode_mp4(frames: Sequence[np.ndarray], frames_per_s: float = 15.0) -> bytes:
    """Encode frames uint8 `[H, W, 3]`, all of one size, as H.264 in MP4; small ones are enlarged.

    Raises:
        ValueError: no frames, or wrong shape or dtype.
        ImportError: the package av is not installed.
    """
    import av

    _check(frames)
    height, width = frames[0].shape[:2]
    factor = max(1, _MP4_SIDE // max(height, width))
    height, width = height * factor, width * factor
    odd = ((0, height % 2), (0, width % 2), (0, 0))  # colours have half the resolution
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        rate = Fraction(frames_per_s).limit_denominator(1000)
        # One thread: films are made beside training, whose cores these are.
        options = {"preset": "veryfast", "crf": "20", "threads": "1"}
        stream = container.add_stream("libx264", rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = width + odd[1][1], height + odd[0][1], "yuv420p"
        for frame in frames:
            large = np.pad(_enlarged(frame, factor), odd, mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(large, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


ENCODERS = {".gif": encode_gif, ".mp4": encode_mp4}
"""By the end of a file's name."""


def _check(frames: Sequence[np.ndarray]) -> None:
    if len(frames) == 0 or any(f.ndim != 3 or f.shape[-1] != 3 or f.dtype != np.uint8 for f in frames):
        raise ValueError("expected at least one frame, uint8 [H, W, 3]")


def _enlarged(frame: np.ndarray, factor: int) -> np.ndarray:
    """A frame of `factor` times the height and width."""
    return np.ascontiguousarray(frame.repeat(factor, axis=0).repeat(factor, axis=1))


def _reduced(frame: np.ndarray, factor: int) -> np.ndarray:
    """A frame of `1 / factor` the height and width; each pixel is the mean of those that it stands for."""
    from PIL import Image

    return np.asarray(Image.fromarray(frame).reduce(factor))
