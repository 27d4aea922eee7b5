"""Twin delayed deep deterministic policy gradients (TD3), and with other values DDPG.

Fujimoto et al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods". A deterministic
policy climbs the first critic. Targets are the least critic's, of an action with clipped noise. Policy and
target network move every second update. DDPG (Lillicrap et al. 2016) is the same with one critic, without
that noise, and with a policy that moves at every update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.offline import OfflineAgent, OfflineConfig
from troupe.common.agents.stored.transitions import Transitions
from troupe.common.config.fields import structural, tunable
from troupe.common.errors import ConfigError
from troupe.common.rl.distributions import Distribution, Tanh

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class DeterministicConfig(OfflineConfig):
    """Fields of TD3 and of what is made of it; defaults are the paper's (table 3 of its appendix)."""

    policy_period_updates: int = tunable(
        2, "Updates of the critics per update of the policy and the target network.", ge=1
    )
    target_noise: float = tunable(
        0.2, "Standard deviation of the noise on the targets' actions, in halves of their range.", ge=0, le=2
    )
    target_noise_limit: float = tunable(0.5, "Maximum absolute value of that noise.", ge=0, le=2)
    exploration_noise: float = tunable(
        0.1, "Standard deviation of the actors' exploration noise, in halves of the range.", ge=0, le=2
    )


class Td3Config(DeterministicConfig):
    """Fields of `[agent]` for `algorithm = "td3"`."""

    algorithm: Literal["td3"] = structural("td3", "Twin delayed DDPG (TD3); DDPG with one critic.")


class Noisy(Tanh):
    """A deterministic policy; what is drawn has normal noise, cut off at the bounds."""

    def __init__(self, numbers: int, noise: float) -> None:
        super().__init__(numbers)
        self._noise = noise

    def sample(self, params: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Within [-1, 1], float32."""
        noise = self._noise * rng.standard_normal(params.shape, np.float32)
        return (np.tanh(params) + noise).clip(-1.0, 1.0)


def smoothed(action: Tensor, noise: Tensor, deviation: float, limit: float) -> Tensor:
    """Actions with clipped noise, within [-1, 1] (Fujimoto et al. 2018, equation 14)."""
    return (action + (deviation * noise).clamp(-limit, limit)).clamp(-1.0, 1.0)


class Td3Agent(OfflineAgent):
    """TD3, for real numbers with two bounds each."""

    config: DeterministicConfig
    other = "sac"
    """What takes other actions."""

    def _distribution(self, config: DeterministicConfig, spec: EnvSpec) -> Distribution:
        actions = spec.actions
        if actions.choices or not all(actions.bounded):
            raise ConfigError(
                f"{config.algorithm} needs real numbers with two bounds each; the action of {spec.id} is "
                f"{actions}: take --algo {self.other}"
            )
        return Noisy(actions.reals, config.exploration_noise)

    @property
    def target_period_updates(self) -> int:  # type: ignore[override]
        """The target moves when the policy does."""
        return self.config.policy_period_updates

    def _value(self, features: Tensor, params: Tensor) -> Tensor:
        return self.net.agreed(self.net.q(features, self.policy.best(params)))

    def _losses(
        self, transitions: Transitions, weights: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """See the base class."""
        net, action = self.net, transitions.action
        features = net.encode(transitions.obs)
        with torch.no_grad():
            targets = transitions.reward + transitions.discount * self._value_after(transitions, noise)
        loss, errors = self._critic_loss(features, action, targets, weights)
        measured = {"critic_loss": loss}
        if self.learner.branch:  # the update at which the target moves
            of_policy = self._policy_loss(features.detach(), action, weights)
            measured |= of_policy
            loss = loss + of_policy["policy_loss"]
        return loss, targets, errors, measured

    def _value_after(self, transitions: Transitions, noise: Tensor) -> Tensor:
        """`min Q'(s', pi'(s') + noise)` `[B]`."""
        target, config = self.learner.target, self.config
        features = target.encode(transitions.next_obs)
        best = target.policy(features).tanh()
        action = smoothed(best, noise, config.target_noise, config.target_noise_limit)
        return target.agreed(target.q(features, action))

    def _policy_loss(self, features: Tensor, action: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """`policy_loss`, `-Q(s, pi(s))` of the first critic, and other scalars for the log."""
        net = self.net
        with net.critics_fixed():
            q = net.q(features, net.policy(features).tanh())[0]
        return {"policy_loss": -(weights * q).mean()}


make = Td3Agent
"""What the registry calls."""
