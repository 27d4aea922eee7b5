"""Q networks: a torso and a dueling head, and the same with memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from troupe.common.nets.heads import DuelingHead, dueling_q
from troupe.common.nets.initializers import orthogonal, output_layer
from troupe.common.nets.parts import PartInputs, PartsTorso
from troupe.common.nets.pixels import NormalizedPixels, PackedPixels, ScaledPixels
from troupe.common.nets.recurrent import SequenceBody
from troupe.common.nets.torsos import PixelTorso, ResidualTorso, VectorTorso, make_torso
from troupe.common.rl.normalizers import Normalizer
from troupe.common.spaces import ActionSpec

Torso = PartsTorso | PixelTorso | ResidualTorso | VectorTorso


class QNetwork(nn.Module):
    """Q values of every action, dueling (Wang et al. 2016, equation 9) or plain.

    Args:
      obs_shape: shape of one observation, `(C, H, W)` for pixels.
      num_actions: A.
      torso: `mlp`, or a name of `troupe.common.nets.torsos.PIXEL_TORSOS`.
      hidden_units: width of each head's hidden layer.
      mlp_units: widths of the `mlp` torso.
      dueling: separate value and advantage streams.
      inputs: what the torso sees of pixels or of several parts; None: pixels divided by 255.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        num_actions: int,
        torso: str,
        hidden_units: int,
        mlp_units: tuple[int, ...],
        dueling: bool,
        inputs: NormalizedPixels | PackedPixels | Normalizer | PartInputs | None = None,
    ) -> None:
        super().__init__()
        self.inputs: nn.Module | None = inputs if torso == "mlp" else inputs or ScaledPixels()
        if isinstance(inputs, PartInputs):
            self.torso: Torso = PartsTorso(inputs, torso, hidden_units, mlp_units)
        else:
            self.torso = make_torso(torso, obs_shape, mlp_units)
        self.dueling = dueling
        self.hidden_units = hidden_units
        streams = 2 if dueling else 1
        # One matrix for both streams' hidden layers: the same arithmetic as two layers, in one call.
        self.hidden = orthogonal(nn.Linear(self.torso.features, streams * hidden_units))
        self.advantage = output_layer(nn.Linear(hidden_units, num_actions), "values")
        self.value = output_layer(nn.Linear(hidden_units, 1), "values") if dueling else None

    def forward(self, obs: Tensor) -> Tensor:
        """Map observations `[B, *obs_shape]` to Q values `[B, A]` float32."""
        seen = obs if self.inputs is None else self.inputs(obs)
        hidden = torch.relu(self.hidden(self.torso(seen)))
        if self.value is None:
            return self.advantage(hidden)
        left, right = hidden.split(self.hidden_units, dim=-1)
        return dueling_q(self.value(right), self.advantage(left))

    def observe(self, obs: Tensor) -> None:
        """Take observations `[B, *obs_shape]` into the pixels' statistics."""
        if self.inputs is not None:
            self.inputs.observe(obs)  # type: ignore[operator]


class RecurrentQNetwork(SequenceBody):
    """A `SequenceBody` with a dueling head of `head_units` (Kapturowski et al. 2019, section 2.3).

    With `head_units` 0 the values are linear in the body's features.
    """

    def __init__(
        self, obs_shape: tuple[int, ...], actions: ActionSpec, torso: str, *, head_units: int, **body: Any
    ) -> None:
        super().__init__(obs_shape, actions, torso, **body)
        self.head = (
            DuelingHead(self.features, actions.count, head_units)
            if head_units
            else output_layer(nn.Linear(self.features, actions.count), "values")
        )

    def forward(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Arguments as `remember`; Q values `[T, B, A]`, and the memory after the last step."""
        features, state = self.remember(obs, last_action, last_reward, first, state)
        return self.head(features), state
