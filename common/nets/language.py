"""Instructions in words, as some levels give them ("pick up the red ball"), to features."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor, nn

HASH_BUCKETS = 1000


def word_ids(instruction: str, most_words: int = 16, buckets: int = HASH_BUCKETS) -> np.ndarray:
    """Bucket of each word, 0 to `buckets - 1`, and -1 behind the last: int32 `[most_words]`.

    Words are what white space separates; the hash (CRC-32) is the same on every machine. Further words are
    dropped.
    """
    ids = np.full(most_words, -1, np.int32)
    for place, word in enumerate(instruction.split()[:most_words]):
        ids[place] = zlib.crc32(word.encode()) % buckets
    return ids


class InstructionEncoder(nn.Module):
    """Hashed words, an embedding, and the LSTM's output after the last word (Espeholt et al. 2018, figure 3).

    Args:
      units: width of the LSTM and of the result.
      embedding: width of a word.
      buckets: hash buckets.
    """

    def __init__(self, units: int = 64, embedding: int = 20, buckets: int = HASH_BUCKETS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(buckets, embedding)
        self.lstm = nn.LSTM(embedding, units, batch_first=True)
        self.features = units

    def forward(self, words: Tensor) -> Tensor:
        """Maps ids `[B, W]`, -1 behind the last word, to `[B, units]`; zeros where there are no words."""
        lengths = (words >= 0).sum(dim=1)
        outputs, _ = self.lstm(self.embedding(words.clamp(min=0).long()))
        last = (lengths - 1).clamp(min=0)
        chosen = outputs[torch.arange(len(words), device=words.device), last]
        return chosen * (lengths > 0).to(chosen.dtype).unsqueeze(1)
