"""Ape-X DQN: distributed prioritized replay with n-step dueling double Q-learning (Horgan et al. 2018)."""

from __future__ import annotations

from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from troupe.common.agents.q_learning import TargetLearning, TransitionAgent
from troupe.common.agents.rmsprop import RMSProp
from troupe.common.agents.transitions import Transitions
from troupe.common.config.fields import PixelAgentConfig, Units, Widths, structural, tunable
from troupe.common.nets.q_network import QNetwork
from troupe.common.nets.quantiles import QuantileNetwork
from troupe.common.rl import returns


class ApexConfig(PixelAgentConfig):
    """Fields of `[agent]` for `algorithm = "apex"`; defaults are the paper's (appendix C)."""

    algorithm: Literal["apex"] = structural("apex", "Ape-X DQN.")
    hidden_units: Units = structural(512, "Width of each head's hidden layer.")
    mlp_units: Widths = structural((256, 256), "Widths of the mlp torso's layers.")
    dueling: bool = structural(True, "Separate value and advantage streams.")
    double: bool = tunable(True, "Double Q-learning: the online network chooses the bootstrap action.")
    munchausen_alpha: float = tunable(
        0.0,
        "Weight of the log-policy in the reward (Munchausen DQN; the paper has 0.9), in the place of double "
        "Q-learning; 0 = off.",
        ge=0,
        le=1,
    )
    munchausen_tau: float = tunable(0.03, "Temperature of that policy, a softmax of the target's Q.", gt=0)
    munchausen_least: float = tunable(-1.0, "Least log-policy (times the temperature) in the reward.", le=0)
    quantiles: int = structural(
        0,
        "Quantiles of the return, drawn anew, that an update learns from as many (IQN; the paper has 64); "
        "acting goes by the mean of 32. 0 = off: means are learned.",
        ge=0,
        le=1024,
    )
    n_steps: int = structural(3, "Steps of reward before the bootstrap.", ge=1, le=255)
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    optimizer: Literal["rmsprop", "adam"] = structural("rmsprop", "Centred RMSProp, or Adam.")
    learning_rate: float = tunable(6.25e-5, "Step size of the optimiser.", gt=0)
    rmsprop_decay: float = tunable(0.95, "Smoothing constant of RMSProp.", ge=0, lt=1)
    optimizer_epsilon: float = tunable(
        1.5e-7, "Term under the root of RMSProp, or added to Adam's denominator.", gt=0
    )
    max_grad_norm: float = tunable(
        40.0, "The gradient's global norm is clipped to this; 0 = not clipped.", ge=0
    )
    huber_delta: float = tunable(1.0, "TD errors beyond this size count linearly.", gt=0)
    target_update_period_updates: int = tunable(2500, "Updates between copies to the target network.", ge=1)
    epsilon_base: float = tunable(
        0.4, "Exploration of slot i of N is base^(1 + alpha i / (N - 1)).", ge=0, le=1
    )
    epsilon_alpha: float = tunable(7.0, "Spread of exploration over the slots.", ge=0)
    eval_epsilon: float = tunable(0.001, "Exploration of the evaluator.", ge=0, le=1)

    @model_validator(mode="after")
    def _one_kind_of_target(self) -> Self:
        if self.quantiles and self.munchausen_alpha:
            raise ValueError("quantiles and munchausen_alpha exclude each other: set one of them to 0")
        return self


class ApexAgent(TransitionAgent[ApexConfig]):
    """Learns as Ape-X DQN. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    @property
    def n_steps(self) -> int:
        """See the base class."""
        return self.config.n_steps

    @property
    def dueling(self) -> bool:
        """See the base class."""
        return self.config.dueling

    @property
    def network_type(self) -> type[QNetwork]:
        """See the base class."""
        return QuantileNetwork if self.config.quantiles else QNetwork

    def _judged(
        self, transitions: Transitions, learning: TargetLearning[QNetwork]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See the base class; of quantiles TD error and Q are those of their means."""
        net, target = self._net, learning.target
        if not (isinstance(net, QuantileNetwork) and isinstance(target, QuantileNetwork)):
            return super()._judged(transitions, learning)
        assert isinstance(learning, _QuantileLearning)
        shares, next_shares = learning.shares(2, len(transitions.obs), self.config.quantiles)
        rows = torch.arange(len(transitions.obs), device=self._device)
        with torch.no_grad():
            following = target.quantiles(transitions.next_obs, next_shares.to(self._device))
            q_next = net(transitions.next_obs) if self.config.double else following.mean(1)
            following = following[rows, :, q_next.argmax(1)]
            goals = transitions.reward[:, None] + transitions.discount[:, None] * following
        shares = shares.to(self._device)
        values = net.quantiles(transitions.obs, shares)[rows, :, transitions.action]
        losses = returns.quantile_losses(values, shares, goals, self.config.huber_delta)
        return losses, goals.mean(1) - values.mean(1), values.mean(1)

    def _make_learning(self) -> TargetLearning[QNetwork]:
        if not self.config.quantiles:
            return super()._make_learning()
        return _QuantileLearning(
            self._net,
            self._optimizer(),
            target_period_updates=self.config.target_update_period_updates,
            max_grad_norm=self.config.max_grad_norm,
            seed=self._seed,
        )

    def _targets(self, transitions: Transitions, target: QNetwork) -> Tensor:
        """Of double Q-learning, of plain, or Munchausen's."""
        config = self.config
        if config.munchausen_alpha:
            q, next_q = target(torch.cat([transitions.obs, transitions.next_obs])).chunk(2)
            return returns.munchausen_target(
                *(transitions.reward, transitions.discount, transitions.action, q, next_q),
                alpha=config.munchausen_alpha,
                tau=config.munchausen_tau,
                least=config.munchausen_least,
            )
        outcome, next_q = (transitions.reward, transitions.discount), target(transitions.next_obs)
        if self.config.double:
            return returns.double_q_target(*outcome, self._net(transitions.next_obs), next_q)
        return returns.q_target(*outcome, next_q)

    def _optimizer(self) -> torch.optim.Optimizer:
        config, parameters = self.config, self._net.parameters()
        if config.optimizer == "adam":
            return torch.optim.Adam(
                parameters, lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True
            )
        return RMSProp(
            parameters,
            lr=config.learning_rate,
            decay=config.rmsprop_decay,
            epsilon=config.optimizer_epsilon,
            centered=True,
        )


class _QuantileLearning(TargetLearning[QNetwork]):
    """Adds the generator of shares."""

    def __init__(self, *arguments: Any, seed: int, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._generator = torch.Generator().manual_seed(seed)

    def shares(self, *shape: int) -> Tensor:
        """Draws from (0, 1)."""
        return torch.rand(shape, generator=self._generator).clamp(1e-6, 1.0 - 1e-6)

    def arrays(self) -> dict[str, np.ndarray]:
        """See `TargetLearning`."""
        return super().arrays() | {"shares": self._generator.get_state().numpy().copy()}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `TargetLearning`."""
        super().load_arrays(arrays)
        self._generator.set_state(torch.from_numpy(arrays["shares"].copy()))


make = ApexAgent
"""What the registry calls."""
