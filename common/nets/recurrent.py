"""Memory: an LSTM that starts anew where an episode does, and what it is fed besides the observation."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class LstmCore(nn.Module):
    """LSTM over time-major sequences in which episodes begin.

    The state is one flat row for each sequence, `[B, state_size]`: hidden states of all layers, then their
    cell states. A new episode starts from zeros.
    """

    def __init__(self, features: int, units: int, layers: int = 1) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, units, num_layers=layers)
        self.features = units
        self.state_size = 2 * layers * units

    def forward(self, inputs: Tensor, first: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Runs through a sequence.

        Args:
          inputs: `[T, B, features]` float.
          first: `[T, B]` bool, an episode begins at this step: the state is forgotten *before* it.
          state: `[B, state_size]` float, from before the first step.

        Returns:
          outputs `[T, B, units]`, and the state after the last step.
        """
        hidden, cell = self._unpacked(state)
        outputs = []
        # Between two steps at which any sequence begins an episode, the LSTM runs undisturbed, in one call.
        starts = first.any(dim=1).nonzero().squeeze(1).tolist()
        edges = sorted({0, *starts, len(inputs)})
        for begin, end in pairwise(edges):
            keep = (~first[begin]).to(inputs.dtype)[None, :, None]
            segment, (hidden, cell) = self.lstm(inputs[begin:end], (hidden * keep, cell * keep))
            outputs.append(segment)
        return torch.cat(outputs), self._packed(hidden, cell)

    def _unpacked(self, state: Tensor) -> tuple[Tensor, Tensor]:
        layers, units = self.lstm.num_layers, self.lstm.hidden_size
        parts = state.view(len(state), 2, layers, units).permute(1, 2, 0, 3).contiguous()
        return parts[0], parts[1]

    def _packed(self, hidden: Tensor, cell: Tensor) -> Tensor:
        return torch.stack([hidden, cell]).permute(2, 0, 1, 3).flatten(1)


def last_step(last_action: Tensor, last_reward: Tensor, first: Tensor, num_actions: int) -> Tensor:
    """What the agent did and got just before, as features: one-hot action, and reward clipped to [-1, 1].

    Args:
      last_action: `[...]` int64.
      last_reward: `[...]` float.
      first: `[...]` bool; where an episode begins there was no last step, and all features are 0.
      num_actions: A.

    Returns:
      `[..., A + 1]` float. Espeholt et al. 2018, figure 3.
    """
    actions = torch.nn.functional.one_hot(last_action, num_actions).to(torch.float32)
    features = torch.cat([actions, last_reward.clamp(-1.0, 1.0).unsqueeze(-1)], dim=-1)
    return features * (~first).to(torch.float32).unsqueeze(-1)
