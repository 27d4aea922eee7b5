"""Implicit Q-learning: values of what the data set did well, and a policy that repeats that (IQL).

Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning". Nothing is ever asked about
an action that is not in the data: the value function is an upper expectile of the critics over the data set's
actions, critics bootstrap from it, and the policy clones actions, weighted by the exponential of their
advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from troupe.common.agents.offline import OfflineAgent, OfflineConfig
from troupe.common.agents.stored.transitions import Transitions
from troupe.common.config.fields import structural, tunable
from troupe.common.errors import ConfigError
from troupe.common.rl.distributions import Distribution, distribution_of
from troupe.common.rl.policy_losses import weighted_log_likelihood

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class IqlConfig(OfflineConfig):
    """Fields of `[agent]` for `algorithm = "iql"`; defaults are the paper's for locomotion (appendix B)."""

    has_values = True

    algorithm: Literal["iql"] = structural("iql", "Implicit Q-learning, for data sets.")
    expectile: float = tunable(
        0.7,
        "Expectile of the Q values of the data's actions that the value function estimates (tau of the "
        "paper): 0.5 = the mean, towards 1 = the maximum.",
        gt=0,
        lt=1,
    )
    advantage_weight: float = tunable(
        3.0,
        "Weight of the advantage in the policy's loss (beta of the paper), per unit of the reward learned "
        "from; 0 = behaviour cloning.",
        ge=0,
    )
    max_weight: float = tunable(100.0, "Largest weight of an action in the policy's loss.", ge=1)
    deviation_floor: float = structural(
        0.01, "Smallest standard deviation of a continuous action, in halves of its range.", gt=0, lt=0.1
    )
    deviation_start: float = structural(1.0, "Initial standard deviation.", gt=0.1, le=10)


def expectile_loss(errors: Tensor, expectile: float) -> Tensor:
    """`|expectile - 1(u < 0)| u^2` of errors u (equation 5): its minimum is that expectile."""
    return torch.where(errors < 0, 1.0 - expectile, expectile) * errors.square()


def advantage_weights(advantages: Tensor, weight: float, most: float) -> Tensor:
    """`min(exp(weight A), most)` (equation 7, clipped as in the paper's code)."""
    # Clipped before the exponential too, which overflows beyond 88 in float32.
    return (weight * advantages).clamp(max=80.0).exp().clamp(max=most)


class IqlAgent(OfflineAgent):
    """Implicit Q-learning, for choices or for real numbers with or without bounds.

    Deviations of real numbers depend on the observation; in the paper they do not.
    """

    config: IqlConfig

    def _distribution(self, config: IqlConfig, spec: EnvSpec) -> Distribution:
        actions = spec.actions
        if actions.choices and actions.reals:
            raise ConfigError(f"iql needs choices or real numbers, not both: that of {spec.id} is {actions}")
        # Not squashed: data sets are full of actions at their bounds, where a squashed density has no end.
        # The environment takes the nearest action within the bounds.
        return distribution_of(actions, "normal", "softplus", config.deviation_floor, config.deviation_start)

    def _value(self, features: Tensor, params: Tensor) -> Tensor:
        return self.net.value(features)

    def _losses(
        self, transitions: Transitions, weights: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """See the base class; all three losses are of the networks as they are before the update."""
        net, target, config = self.net, self.learner.target, self.config
        obs, action = transitions.obs, transitions.action
        features = net.encode(obs)
        with torch.no_grad():
            # The target's encoder has its own features.
            q = target.agreed(target.q_taken(target.encode(obs), action))
            following = net.value(net.encode(transitions.next_obs))
            targets = transitions.reward + transitions.discount * following
        values = net.value(features)
        value_loss = (weights * expectile_loss(q - values, config.expectile)).mean()
        critic_loss, errors = self._critic_loss(features, action, targets, weights)
        liked = advantage_weights((q - values).detach(), config.advantage_weight, config.max_weight)
        # Detached as in SAC: what is seen of pictures is taught by values alone.
        log_probs = self.policy.log_prob(net.policy(features.detach()), action)
        policy_loss = (weights * weighted_log_likelihood(log_probs, liked)).mean()
        measured = {
            "critic_loss": critic_loss,
            "value_loss": value_loss,
            "policy_loss": policy_loss,
            "advantage_weight": liked.mean(),
            "log_likelihood": log_probs.mean(),
        }
        return value_loss + critic_loss + policy_loss, targets, errors, measured


make = IqlAgent
"""What the registry calls."""
