"""Policy and baseline on one torso, with or without memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from common.nets.heads import PolicyHead
from common.nets.language import InstructionEncoder, split_instruction
from common.nets.recurrent import LstmCore, last_step
from common.nets.torsos import Projected, make_torso

SHALLOW = {"shallow": "small"}
"""The shallow network of Espeholt et al. 2018 (figure 3, left) has the convolutions of Mnih et al. 2013."""


class ActorCritic(nn.Module):
    """Torso, features of the last step, memory, heads. All arguments and results are time-major.

    Args:
      obs_shape: shape of one observation, `(C, H, W)` for pixels.
      num_actions: A.
      torso: `mlp`, `shallow`, `nature`, `deep` or `football`.
      hidden_units: width of the layer that follows a pixel torso.
      mlp_units: widths of the `mlp` torso.
      lstm_units: width of the memory; 0: none.
      lstm_layers: layers of the memory.
      see_last_step: feed the last action and the clipped last reward beside the observation.
      instruction_words: words of an instruction in the last row of pixels; 0: there is none.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        num_actions: int,
        torso: str,
        *,
        hidden_units: int = 256,
        mlp_units: tuple[int, ...] = (64, 64),
        lstm_units: int = 0,
        lstm_layers: int = 1,
        see_last_step: bool = True,
        instruction_words: int = 0,
    ) -> None:
        super().__init__()
        self.instruction_words = instruction_words
        self.instructions = InstructionEncoder() if instruction_words else None
        if self.instructions is not None:
            obs_shape = (*obs_shape[:-2], obs_shape[-2] - 1, obs_shape[-1])
        base = make_torso(SHALLOW.get(torso, torso), obs_shape, mlp_units)
        self.torso = base if torso == "mlp" else Projected(base, hidden_units)
        self.num_actions = num_actions
        self.see_last_step = see_last_step
        features = int(self.torso.features) + (num_actions + 1 if see_last_step else 0)  # type: ignore[arg-type]
        features += self.instructions.features if self.instructions is not None else 0
        self.core = LstmCore(features, lstm_units, lstm_layers) if lstm_units else None
        self.state_size = self.core.state_size if self.core else 0
        self.head = PolicyHead(self.core.features if self.core else features, num_actions)

    def forward(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs through a sequence, or one step of it.

        Args:
          obs: `[T, B, *obs_shape]`.
          last_action: `[T, B]` int64, done just before each observation.
          last_reward: `[T, B]` float, got just before it.
          first: `[T, B]` bool, an episode begins with this observation.
          state: `[B, state_size]` float, the memory before the first step.

        Returns:
          logits `[T, B, A]`, values `[T, B]`, and the memory `[B, state_size]` after the last step.
        """
        steps, batch = first.shape
        obs = obs.flatten(0, 1)
        parts = []
        if self.instructions is not None:
            obs, words = split_instruction(obs, self.instruction_words)
            parts.append(self.instructions(words).view(steps, batch, -1))
        if self.see_last_step:
            parts.append(last_step(last_action, last_reward, first, self.num_actions))
        features = torch.cat([self.torso(obs).view(steps, batch, -1), *parts], dim=-1)
        if self.core is not None:
            features, state = self.core(features, first, state)
        logits, values = self.head(features)
        return logits, values, state
