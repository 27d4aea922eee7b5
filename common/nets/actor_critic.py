"""Policy and baseline, on one torso or on one each, with or without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from troupe.common.nets.initializers import orthogonal, output_layer
from troupe.common.nets.recurrent import SequenceBody, exact
from troupe.common.rl.normalizers import Normalizer
from troupe.common.spaces import ActionSpec


class PolicyHead(nn.Module):
    """Parameters of a policy's distribution over actions, and the baseline, straight from the features.

    Args:
        features: width of the input.
        size: P.
        free: how many of the parameters, the last ones, are the same for every input.
    """

    def __init__(self, features: int, size: int, free: int = 0) -> None:
        super().__init__()
        self.policy = output_layer(nn.Linear(features, size - free), "policy")
        # Zeros are `deviation_start`, see `Reals`.
        self.free = nn.Parameter(torch.zeros(free)) if free else None
        self.baseline = output_layer(nn.Linear(features, 1), "values")

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Map `[..., features]` to parameters `[..., P]` and values `[...]`."""
        return self.params(features), self.value(features)

    def params(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to parameters `[..., P]`."""
        params = exact(self.policy, features)
        if self.free is None:
            return params
        return torch.cat([params, self.free.expand(*params.shape[:-1], -1)], dim=-1)

    def value(self, features: Tensor) -> Tensor:
        """Map `[..., features]` to values `[...]`."""
        return exact(self.baseline, features).squeeze(-1)


class ActorCritic(SequenceBody):
    """A `SequenceBody` with a policy and a baseline.

    Args:
        obs_shape: shape of one observation.
        actions: what is chosen.
        torso: of a `SequenceBody`.
        policy_size: P, parameters of a policy's distribution.
        free: how many of these are the same for every input, see `PolicyHead`.
        bottleneck: units of a layer between the body and both heads, which needs `shared`; 0: none.
        shared: one body for both; else the baseline has one of its own, and the memory is that of both.
        returns: statistics of returns: the baseline's values are in their units; None: values are returns.
        body: further arguments of a `SequenceBody`.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        actions: ActionSpec,
        torso: str,
        *,
        policy_size: int,
        free: int = 0,
        bottleneck: int = 0,
        shared: bool = True,
        returns: Normalizer | None = None,
        **body: Any,
    ) -> None:
        super().__init__(obs_shape, actions, torso, **body)
        self.returns = returns
        self.bottleneck: nn.Module | None = None
        self.head_features = bottleneck or self.features
        if bottleneck:
            if not shared:
                raise ValueError("a bottleneck needs one body for policy and baseline")
            self.bottleneck = nn.Sequential(orthogonal(nn.Linear(self.features, bottleneck)), nn.ReLU())
        self.head = PolicyHead(self.head_features, policy_size, free)
        self.critic: SequenceBody | None = None
        self._policy_state_size = self.state_size
        if not shared:  # its inputs are those of the policy
            self.critic = SequenceBody(obs_shape, actions, torso, **body)
            # Shared: two copies of the statistics would double what is published, and see the same pixels.
            self.critic.inputs = None
            self.state_size += self.critic.state_size

    def forward(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments as `remember`; parameters `[T, B, P]`, values `[T, B]`, memory after the last step."""
        params, values, state, _ = self.described(obs, last_action, last_reward, first, state)
        return params, values, state

    def described(
        self, obs: Tensor, last_action: Tensor, last_reward: Tensor, first: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `forward` gives, and the features `[T, B, head_features]` that the policy is made of."""
        last = (last_action, last_reward, first)
        if self.critic is None:
            features, state = self.remember(obs, *last, state)
            if self.bottleneck is not None:
                features = self.bottleneck(features)
            params, values = self.head(features)
            return params, values, state, features
        seen = self.seen(obs)
        own, its = state.split((self._policy_state_size, self.critic.state_size), dim=1)
        features, own = self.remember_seen(seen, *last, own)
        theirs, its = self.critic.remember_seen(seen, *last, its)
        return self.head.params(features), self.head.value(theirs), torch.cat([own, its], dim=1), features

    def in_returns(self, values: Tensor) -> Tensor:
        """The baseline's values `[...]` in the unit of returns.

        With statistics of returns, but none yet, all are 0: what an ignorant network says has no unit, and
        returns that bootstrap from it would give the first statistics its own size instead of the rewards'.
        """
        if self.returns is None:
            return values
        return self.returns.inverse(values) * (self.returns.count > 0)

    @torch.no_grad()
    def observe_returns(self, returns: Tensor) -> None:
        """Take in returns, and change the baseline so that what it predicts stays as it is (PopArt).

        Van Hasselt et al. 2016, equation 9: the weights of its last layer are scaled back. The first returns
        say what its values mean, and leave it as it is.
        """
        if self.returns is None:
            return
        first = self.returns.count == 0
        before, mean = self.returns.deviation.float(), self.returns.mean.float()
        self.returns.update(returns)
        now, weight, bias = self.returns.deviation.float(), *self.head.baseline.parameters()
        # The deviation goes down where the weights go up, so that `w x * deviation + mean` is what it was.
        weight.copy_(torch.where(first, weight, weight * (before / now)))
        moved = (before * bias + mean - self.returns.mean.float()) / now
        bias.copy_(torch.where(first, bias, moved))
