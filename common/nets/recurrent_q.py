"""Q networks with memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from troupe.common.nets.initializers import output_layer
from troupe.common.nets.q_network import DuelingHead
from troupe.common.nets.recurrent import SequenceBody, exact
from troupe.common.rl.normalizers import ReturnScale
from troupe.common.spaces import ActionSpec


class RecurrentQNetwork(SequenceBody):
    """A `SequenceBody` with a dueling head of `head_units` (Kapturowski et al. 2019, section 2.3).

    With `head_units` 0 the values are linear in the body's features. See `QNetwork` for `scale`.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        actions: ActionSpec,
        torso: str,
        *,
        head_units: int,
        scale: ReturnScale | None = None,
        **body: Any,
    ) -> None:
        super().__init__(obs_shape, actions, torso, **body)
        self.scale = scale
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
        return exact(self.head, features), state
