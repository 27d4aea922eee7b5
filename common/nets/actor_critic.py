"""Policy and baseline on one torso, with or without memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from common.nets.heads import PolicyHead
from common.nets.recurrent import SequenceBody

SHALLOW = {"shallow": "small"}
"""The shallow network of Espeholt et al. 2018 (figure 3, left) has the convolutions of Mnih et al. 2013."""


class ActorCritic(SequenceBody):
    """A `SequenceBody` with a policy and a baseline; `torso` may also be `shallow`."""

    def __init__(self, obs_shape: tuple[int, ...], num_actions: int, torso: str, **body: Any) -> None:
        super().__init__(obs_shape, num_actions, SHALLOW.get(torso, torso), **body)
        self.head = PolicyHead(self.features, num_actions)

    def forward(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments as `remember`; logits `[T, B, A]`, values `[T, B]`, the memory after the last step."""
        features, state = self.remember(obs, last_action, last_reward, first, state)
        logits, values = self.head(features)
        return logits, values, state
