"""How large an encoded GIF is, and whether it has a frame, read without decoding it."""

from __future__ import annotations

import numpy as np


def gif_size(video: np.ndarray | bytes | bytearray | memoryview) -> tuple[bytes, int, int]:
    """Return `(gif, height, width)` of an encoded GIF, bytes or uint8 `[N]`.

    Raises:
        ValueError: it is none, or one without a frame.
    """
    data = video.tobytes() if isinstance(video, np.ndarray) else bytes(video)
    if len(data) < 10 or data[:4] != b"GIF8":
        raise ValueError("no GIF")
    if not _has_frame(data):
        raise ValueError("a GIF without a whole frame")
    return data, int.from_bytes(data[8:10], "little"), int.from_bytes(data[6:8], "little")


def _has_frame(gif: bytes) -> bool:
    """Whether there is a frame, with all of its data, in a GIF (GIF89a, sections 17 to 27)."""
    try:
        at = 13 + _colour_bytes(gif[10])
        while gif[at] == 0x21:  # an extension: its label, and blocks
            at = _after_blocks(gif, at + 2)
        begin = at + 10 + _colour_bytes(gif[at + 9]) + 1
        return gif[at] == 0x2C and _after_blocks(gif, begin) > begin + 1
    except IndexError:
        return False


def _colour_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _after_blocks(gif: bytes, at: int) -> int:
    """Where blocks, each with its size before it, have ended with an empty one."""
    while size := gif[at]:
        at += 1 + size
    return at + 1
