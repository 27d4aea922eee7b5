"""TD3 that stays close to a data set by cloning it (TD3+BC).

Fujimoto & Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning". The policy of TD3 climbs the
first critic, whose values are divided by their mean size, and is held to the data set's actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor

from troupe.common.agents.soft import mean_q
from troupe.common.agents.stored.transitions import Transitions
from troupe.common.agents.td3 import DeterministicConfig, Td3Agent
from troupe.common.config.fields import structural, tunable
from troupe.common.rl.distributions import Categorical, Distribution

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class Td3BcConfig(DeterministicConfig):
    """Fields of `[agent]` for `algorithm = "td3_bc"`; defaults are the paper's (table 3 of its appendix)."""

    algorithm: Literal["td3_bc"] = structural("td3_bc", "TD3 with behaviour cloning, for data sets.")
    q_weight: float = tunable(
        2.5,
        "Weight of the critic relative to cloning (alpha of the paper), after dividing its values by "
        "their mean absolute value; 0 = behaviour cloning only.",
        ge=0,
    )


class Td3BcAgent(Td3Agent):
    """TD3+BC.

    Of one choice the exact mean over all of them takes the place of the policy's action, and the negative log
    of its chance that of the squared distance: the paper is for real numbers alone.
    """

    config: Td3BcConfig
    other = "iql"

    def _distribution(self, config: DeterministicConfig, spec: EnvSpec) -> Distribution:
        count = spec.actions.count
        return Categorical(count) if count else super()._distribution(config, spec)

    def _value(self, features: Tensor, params: Tensor) -> Tensor:
        if self.spec.actions.count:
            return mean_q(self.net, features, params)
        return super()._value(features, params)

    def _value_after(self, transitions: Transitions, noise: Tensor) -> Tensor:
        """See the base class."""
        if not self.spec.actions.count:
            return super()._value_after(transitions, noise)
        target = self.learner.target
        features = target.encode(transitions.next_obs)
        return mean_q(target, features, target.policy(features))

    def _policy_loss(self, features: Tensor, action: Tensor, weights: Tensor) -> dict[str, Tensor]:
        """`-lambda Q(s, pi(s)) + (pi(s) - a)^2` with `lambda = alpha / mean |Q|`, and its second term."""
        net, params = self.net, self.net.policy(features)
        with net.critics_fixed():
            if self.spec.actions.count:
                q = (params.softmax(1) * net.q(features)[0]).sum(1)
                cloning = -self.policy.log_prob(params, action)
            else:
                chosen = params.tanh()
                q, cloning = net.q(features, chosen)[0], (chosen - action).square().mean(1)
        # Of the whole batch, if several learners share it.
        reduction = self.learner.reduction
        (size,) = reduction.means([(q.detach().abs().mean(), reduction.rows)]).float()
        scale = self.config.q_weight / size.clamp(min=1e-6)
        cloned = (weights * cloning).mean()
        return {"policy_loss": cloned - scale * (weights * q).mean(), "cloning_loss": cloned}


make = Td3BcAgent
"""What the registry calls."""
