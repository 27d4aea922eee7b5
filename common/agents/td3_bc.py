"""TD3 that stays close to a data set by cloning it (TD3+BC).

Fujimoto & Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning", over TD3 (Fujimoto et al.
2018). A deterministic policy climbs the first critic, whose values are divided by their mean size, and is
held to the data set's actions. Targets are the least critic's, of an action with clipped noise. Policy and
target network move every second update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.offline import OfflineAgent, OfflineConfig
from troupe.common.agents.soft import mean_q
from troupe.common.agents.stored.transitions import Transitions
from troupe.common.config.fields import structural, tunable
from troupe.common.errors import ConfigError
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl.distributions import Categorical, Distribution, Tanh

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class Td3BcConfig(OfflineConfig):
    """Fields of `[agent]` for `algorithm = "td3_bc"`; defaults are the paper's (table 3 of its appendix)."""

    algorithm: Literal["td3_bc"] = structural("td3_bc", "TD3 with behaviour cloning, for data sets.")
    q_weight: float = tunable(
        2.5,
        "What the critic counts beside cloning (alpha of the paper), once its values are divided by their "
        "mean size; 0 = behaviour cloning alone.",
        ge=0,
    )
    policy_period_updates: int = tunable(
        2, "Updates between two of the policy and of the target network.", ge=1
    )
    target_noise: float = tunable(
        0.2, "Standard deviation of the noise on the targets' actions, in halves of their range.", ge=0, le=2
    )
    target_noise_limit: float = tunable(0.5, "Largest size of that noise.", ge=0, le=2)
    exploration_noise: float = tunable(
        0.1, "Standard deviation of the noise with which actors act, in halves of the range.", ge=0, le=2
    )


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


class Td3BcAgent(OfflineAgent):
    """TD3+BC.

    Of one choice the exact mean over all of them takes the place of the policy's action, and the negative log
    of its chance that of the squared distance: the paper is for real numbers alone.
    """

    config: Td3BcConfig

    def _distribution(self, config: Td3BcConfig, spec: EnvSpec) -> Distribution:
        actions = spec.actions
        if actions.count:
            return Categorical(actions.count)
        if actions.choices or not all(actions.bounded):
            raise ConfigError(
                "td3_bc needs one choice, or real numbers with two bounds each; the action of "
                f"{spec.id} is {actions}: take --algo iql"
            )
        return Noisy(actions.reals, config.exploration_noise)

    @property
    def target_period_updates(self) -> int:  # type: ignore[override]
        """The target moves when the policy does."""
        return self.config.policy_period_updates

    def _value(self, features: Tensor, params: Tensor) -> Tensor:
        if self.spec.actions.count:
            return mean_q(self.net, features, params)
        return self.net.agreed(self.net.q(features, self.policy.best(params)))

    def _losses(
        self, transitions: Transitions, weights: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """See the base class."""
        net, action = self.net, transitions.action
        features = net.encode(transitions.obs)
        targets = self._targets(transitions, noise)
        loss, errors = self._critic_loss(features, action, targets, weights)
        measured = {"critic_loss": loss}
        if self.learner.branch:  # the update at which the target moves
            policy_loss, cloning = self._policy_loss(features.detach(), action, weights)
            measured |= {"policy_loss": policy_loss, "cloning_loss": cloning}
            loss = loss + policy_loss
        return loss, targets, errors, measured

    @torch.no_grad()
    def _targets(self, transitions: Transitions, noise: Tensor) -> Tensor:
        """`r + discount min Q'(s', pi'(s') + noise)` `[B]`."""
        target, config = self.learner.target, self.config
        features = target.encode(transitions.next_obs)
        params = target.policy(features)
        if self.spec.actions.count:
            value = mean_q(target, features, params)
        else:
            best = smoothed(params.tanh(), noise, config.target_noise, config.target_noise_limit)
            value = target.agreed(target.q(features, best))
        return transitions.reward + transitions.discount * value

    def _policy_loss(self, features: Tensor, action: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`-lambda Q(s, pi(s)) + (pi(s) - a)^2` with `lambda = alpha / mean |Q|`, and its second term."""
        net, params = self.net, self.net.policy(features)
        with net.critics_fixed():
            q, cloning = self._liked_and_cloned(net, features, params, action)
        scale = self.config.q_weight / q.detach().abs().mean().clamp(min=1e-6)
        cloned = (weights * cloning).mean()
        return cloned - scale * (weights * q).mean(), cloned

    def _liked_and_cloned(
        self, net: SoftActorCritic, features: Tensor, params: Tensor, action: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first critic's Q of the policy's actions `[B]`, and how far these are from the data's `[B]`."""
        if self.spec.actions.count:
            q = (params.softmax(1) * net.q(features)[0]).sum(1)
            return q, -self.policy.log_prob(params, action)
        chosen = params.tanh()
        return net.q(features, chosen)[0], (chosen - action).square().mean(1)


make = Td3BcAgent
"""What the registry calls."""
