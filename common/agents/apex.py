"""Ape-X DQN: distributed prioritized replay with n-step dueling double Q-learning (Horgan et al. 2018)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from common.agents.base import Update
from common.agents.fitting import network_inputs, suited
from common.agents.q_learning import TransitionAgent
from common.agents.rmsprop import RMSProp
from common.config.fields import PixelAgentConfig, Units, Widths, structural, tunable
from common.data.accumulator import PRIORITY_FLOOR
from common.nets.q_network import QNetwork
from common.rl import returns


class ApexConfig(PixelAgentConfig):
    """Fields of `[agent]` for `algorithm = "apex"`; defaults are the paper's (appendix C)."""

    algorithm: Literal["apex"] = structural("apex", "Ape-X DQN.")
    torso: Literal["auto", "nature", "small", "mlp"] = structural(
        "auto",
        "Network before the heads: `nature` or `small` convolutions for pixels, `mlp` for vectors; "
        "`auto` takes `nature` or `mlp` by the observation.",
    )
    hidden_units: Units = structural(512, "Width of each head's hidden layer.")
    mlp_units: Widths = structural((256, 256), "Widths of the mlp torso's layers.")
    dueling: bool = structural(True, "Separate value and advantage streams.")
    double: bool = tunable(True, "Double Q-learning: the online network chooses the bootstrap action.")
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


class ApexAgent(TransitionAgent[ApexConfig]):
    """Learns as Ape-X DQN. See `common.agents.base.Agent` for the methods' contracts."""

    @property
    def n_steps(self) -> int:
        """See the base class."""
        return self.config.n_steps

    def update(
        self,
        batch: dict[str, np.ndarray],
        weights: np.ndarray,
        want_metrics: bool = True,
        progress: float = 0.0,
        lengths: np.ndarray | None = None,
    ) -> Update:
        """One step of double Q-learning on `[B]` items; new priorities are `|TD error|`."""
        learning = self._start_learning()
        data = {name: self._to_device(array) for name, array in batch.items()}
        weight = self._to_device(weights)
        obs, next_obs = self._observations(data)
        target = self._target(data["reward"][:, 0], data["discount"][:, 0], next_obs, learning.target)
        q = self._net(obs).gather(1, data["action"].long()).squeeze(1)
        error = target - q
        loss = (weight * returns.huber(error, self.config.huber_delta)).mean()
        norm = learning.step(loss)
        self._net.observe(obs)
        metrics: dict[str, float] = {}
        if want_metrics:
            metrics = {
                "learner/loss": loss.item(),
                "learner/grad_norm": norm.item(),
                "learner/q_mean": q.mean().item(),
                "learner/td_error_mean": error.abs().mean().item(),
            }
        priorities = error.detach().abs().double().cpu().numpy() + PRIORITY_FLOOR
        return Update(priorities=priorities, metrics=metrics)

    @torch.no_grad()
    def _target(self, reward: Tensor, discount: Tensor, next_obs: Tensor, target: QNetwork) -> Tensor:
        q_next = target(next_obs)
        if self.config.double:
            return returns.double_q_target(reward, discount, self._net(next_obs), q_next)
        return returns.q_target(reward, discount, q_next)

    # --------------------------------------------------------------- helpers

    def _network(self) -> QNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> QNetwork:
            units = config.hidden_units, config.mlp_units
            pixels = network_inputs(config, spec)
            return QNetwork(spec.obs_shape, spec.actions.count, torso, *units, config.dueling, pixels)

        return suited(config.torso, "nature", spec, make)

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


make = ApexAgent
"""What the registry calls."""
