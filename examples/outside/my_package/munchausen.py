"""Munchausen DQN (Vieillard, Pietquin and Geist 2020) as an algorithm: a configuration and targets.

Ape-X has the same targets as an option, `agent.munchausen_alpha`; here it is what an algorithm outside this
tree looks like that learns from transitions as Troupe's do.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from troupe import PixelAgentConfig, register_algorithm, structural, tunable
from troupe.common.agents.q_learning import TransitionAgent
from troupe.common.agents.transitions import Transitions
from troupe.common.nets.q_network import QNetwork
from troupe.common.rl.returns import munchausen_target


@register_algorithm
class MunchausenConfig(PixelAgentConfig):
    """Fields of `[agent]`; alpha, tau and l0 are the paper's (table 1)."""

    algorithm: Literal["my_package.munchausen"] = structural("my_package.munchausen", "Munchausen DQN.")
    alpha: float = tunable(0.9, "Weight of the log-policy in the reward.", ge=0, le=1)
    tau: float = tunable(0.03, "Temperature of the policy.", gt=0)
    log_policy_min: float = tunable(-1.0, "Least log-policy (times tau) in the reward: l0.", le=0)
    hidden_units: int = structural(512, "Width of the head's hidden layer.", ge=1)
    mlp_units: tuple[int, ...] = structural((256, 256), "Widths of the mlp torso's layers.")
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    learning_rate: float = tunable(5e-5, "Step size of Adam.", gt=0)
    adam_epsilon: float = tunable(3e-4, "Term added to Adam's denominator.", gt=0)
    max_grad_norm: float = tunable(0.0, "The gradient's norm is clipped to this; 0 = not clipped.", ge=0)
    huber_delta: float = tunable(1.0, "TD errors beyond this size count linearly.", gt=0)
    target_update_period_updates: int = tunable(2000, "Updates between copies to the target.", ge=1)
    epsilon_base: float = tunable(
        0.4, "Exploration of slot i of N: base^(1 + alpha i / (N - 1)).", ge=0, le=1
    )
    epsilon_alpha: float = tunable(7.0, "Spread of exploration over the slots.", ge=0)
    eval_epsilon: float = tunable(0.001, "Exploration of the evaluator.", ge=0, le=1)


class MunchausenAgent(TransitionAgent[MunchausenConfig]):
    """Learns from single transitions; `troupe.common.agents.base.Agent` says what each method has to do."""

    def _targets(self, transitions: Transitions, target: QNetwork) -> Tensor:
        q, next_q = target(torch.cat([transitions.obs, transitions.next_obs])).chunk(2)
        outcome = transitions.reward, transitions.discount, transitions.action
        config = self.config
        return munchausen_target(
            *outcome, q, next_q, alpha=config.alpha, tau=config.tau, least=config.log_policy_min
        )

    def _optimizer(self) -> torch.optim.Optimizer:
        rate, epsilon = self.config.learning_rate, self.config.adam_epsilon
        return torch.optim.Adam(self._net.parameters(), lr=rate, eps=epsilon, fused=True)


make = MunchausenAgent
"""What builds the agent."""
