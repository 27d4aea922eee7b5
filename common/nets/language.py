"""Instructions in words to features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from troupe.common.data.instructions import HASH_BUCKETS
from troupe.common.rl.fixed import shapes_are_fixed


def split_instruction(obs: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Take `[B, C, H + 1, W]` apart: picture `[B, C, H, W]`, and int64 ids `[B, words]`, -1 for none."""
    low, high = obs[:, 0, -1, : 2 * words].view(len(obs), words, 2).to(torch.int64).unbind(-1)
    ids = low + 256 * high
    return obs[:, :, :-1], torch.where(ids < 1 << 15, ids, ids - (1 << 16))


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
        """Map ids `[B, W]`, -1 behind the last word, to `[B, units]`; zeros where there are no words."""
        # Few instructions are in use at a time: each is read once, wherever it stands in the batch.
        places: Tensor | slice = slice(None)
        if not shapes_are_fixed():
            words, places = torch.unique(words, dim=0, return_inverse=True)
        lengths = (words >= 0).sum(dim=1)
        outputs, _ = self.lstm(self.embedding(words.clamp(min=0).long()))
        last = (lengths - 1).clamp(min=0)
        chosen = outputs[torch.arange(len(words), device=words.device), last]
        return (chosen * (lengths > 0).to(chosen.dtype).unsqueeze(1))[places]
