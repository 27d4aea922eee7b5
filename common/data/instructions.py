"""Instructions in words, as some levels give them ("pick up the red ball"), as numbers beside a picture.

An observation is one array, everywhere from the environment to the network. So the words of an instruction
stand in one more row of pixels below the picture: int16 numbers of hash buckets in the first channel.
"""

from __future__ import annotations

import zlib

import numpy as np

HASH_BUCKETS = 1000
MAX_WORDS = 16


def word_ids(instruction: str, max_words: int = MAX_WORDS, buckets: int = HASH_BUCKETS) -> np.ndarray:
    """Bucket of each word, 0 to `buckets - 1`, and -1 behind the last: int16 `[max_words]`.

    Words are what white space separates; the hash (CRC-32) is the same on every machine. Further words are
    dropped.
    """
    ids = np.full(max_words, -1, "<i2")
    for place, word in enumerate(instruction.split()[:max_words]):
        ids[place] = zlib.crc32(word.encode()) % buckets
    return ids


def with_instruction(picture: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """A picture uint8 `[C, H, W]` with the ids int16 `[words]` in a row of their own: `[C, H + 1, W]`."""
    channels, height, width = picture.shape
    obs = np.zeros((channels, height + 1, width), np.uint8)
    obs[:, :height] = picture
    obs[0, height, : ids.nbytes] = ids.view(np.uint8)
    return obs
