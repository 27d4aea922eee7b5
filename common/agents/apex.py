"""Ape-X DQN: distributed prioritized replay with n-step dueling double Q-learning (Horgan et al. 2018)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.optimizers import Adam
from troupe.common.agents.learners.rmsprop import RMSProp
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import NetworkAgent, Step, network_inputs, suited
from troupe.common.agents.stored.transitions import StoredTransitions, Transitions, scaled
from troupe.common.config.fields import QLearningConfig, Units, Widths, structural, tunable
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.nets.q_network import QNetwork, QuantileNetwork
from troupe.common.rl import returns
from troupe.common.rl.exploration import epsilon_greedy, epsilon_ladder
from troupe.common.rl.normalizers import ReturnScale, in_rewards


class ApexConfig(QLearningConfig):
    """Fields of `[agent]` for `algorithm = "apex"`; defaults are the paper's (appendix C)."""

    several_learners = True

    algorithm: Literal["apex"] = structural("apex", "Ape-X DQN.")
    hidden_units: Units = structural(512, "Width of each head's hidden layer.")
    mlp_units: Widths = structural((256, 256), "Widths of the mlp torso's layers.")
    dueling: bool = structural(True, "Separate value and advantage streams.")
    double: bool = tunable(True, "Double Q-learning: the online network chooses the bootstrap action.")
    munchausen_alpha: float = tunable(
        0.0,
        "Munchausen DQN (with quantiles, IQN): weight of the log-policy in the reward, 0.9 in the paper; "
        "replaces double Q-learning. 0 = off.",
        ge=0,
        le=1,
    )
    munchausen_tau: float = tunable(0.03, "Temperature of that policy, a softmax of the target's Q.", gt=0)
    munchausen_least: float = tunable(
        -1.0, "Lower limit of the log-policy (times the temperature) in the reward.", le=0
    )
    quantiles: int = structural(
        0,
        "Number of random quantiles of the return per update (IQN; 64 in the paper); actions follow the "
        "mean of 32. 0 = off: learn means.",
        ge=0,
        le=1024,
    )
    noise: float = structural(
        0.0,
        "Noisy nets in the heads instead of random actions (Fortunato et al. 2018; 0.5 in the paper): "
        "initial standard deviation of the weights, times the root of a layer's inputs; it is learned. "
        "Every slot samples its own noise at every step; eval_epsilon is the share of the evaluator's "
        "steps with noise. 0 = off.",
        ge=0,
        le=10,
    )
    n_steps: int = structural(3, "Steps of reward before the bootstrap.", ge=1, le=255)
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    optimizer: Literal["rmsprop", "adam"] = structural("rmsprop", "Centred RMSProp, or Adam.")
    learning_rate: float = tunable(6.25e-5, "Learning rate of the optimiser.", gt=0)
    rmsprop_decay: float = tunable(0.95, "Smoothing constant of RMSProp.", ge=0, lt=1)
    optimizer_epsilon: float = tunable(
        1.5e-7, "Term under the root of RMSProp, or added to Adam's denominator.", gt=0
    )
    huber_delta: float = tunable(1.0, "TD errors beyond this size enter the loss linearly.", gt=0)

    @model_validator(mode="after")
    def _noise_is_the_exploration(self) -> ApexConfig:
        for name in ("epsilon_base", "epsilon_alpha"):
            # Refused because it is silent: somebody who sets it would believe in random actions.
            if self.noise and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with noise, which explores instead")
        return self


class Noise(NamedTuple):
    """Standard normal noise `[1, draws]` of the heads in one update, or None where they have none."""

    own: Tensor | None
    """Of the network that learns."""
    target: Tensor | None
    """Of the target network."""
    choice: Tensor | None
    """Of the network that learns, where it chooses the action to bootstrap from."""


class ApexAgent(NetworkAgent):
    """Acts, stores and learns as Ape-X DQN. See `troupe.common.agents.base.Agent` for the contracts."""

    config: ApexConfig
    net: QNetwork

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Ape-X's ladder, `epsilon_base ** (1 + i / (N - 1) * epsilon_alpha)`; with noisy weights all 1."""
        if self.config.noise:
            return super().slot_epsilons(indices, total_slots)
        return epsilon_ladder(self.config.epsilon_base, self.config.epsilon_alpha, indices, total_slots)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Epsilon-greedy actions; the accumulator learns the values that give initial priorities.

        With noisy weights the best actions, by weights that are drawn for each slot with chance `epsilon`.
        """
        noise = self._slot_noise(epsilon, rng) if self.config.noise else None
        q = in_rewards(self.net(self._to_device(inputs.obs), noise), self.net.scale).cpu().numpy()
        action = epsilon_greedy(q, epsilon, rng) if noise is None else q.argmax(axis=1)
        # From the forward pass that is made anyhow: initial priorities cost the actor nothing (Horgan et al.
        # 2018, section 3, against giving new items the largest priority seen).
        return Act(action, {"value_taken": q[np.arange(len(q)), action], "value_max": q.max(axis=1)})

    def _slot_noise(self, epsilon: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Noise `[S, draws]` of each slot's own; zeros, so the mean weights, where it does not explore."""
        noise = rng.standard_normal((len(epsilon), self.net.draws), np.float32)
        noise[rng.random(len(epsilon)) >= epsilon] = 0.0
        return self._to_device(noise)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        q = self.net(step.obs)
        return {"action": q.argmax(1), "q": q}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q `[S]` float32, in the unit of rewards."""
        best = self.net(self._to_device(inputs.obs)).amax(dim=1)
        return in_rewards(best, self.net.scale).cpu().numpy()

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class."""
        config, learner = self.config, self.learner
        told: dict[str, Tensor | np.ndarray] = {**batch.fields, "weights": batch.weights}
        if config.noise:
            # One draw for a whole batch, and for all learners that share it.
            told["noise"] = torch.randn(3, 1, self.net.draws, generator=learner.generator)
        if config.quantiles:
            shape = 2, len(batch.weights), config.quantiles
            drawn = learner.reduction.drawn(learner.generator, shape, normal=False)
            # At 0 and 1 a quantile is an extreme of the return, which no finite sample teaches.
            told["shares"] = drawn.clamp(1e-6, 1.0 - 1e-6)
        return told

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """One step of the chosen actions' Q towards their targets; new priorities are `|TD error|`."""
        learner, scale = self.learner, self.net.scale
        transitions = scaled(self.stored.read(told), scale)
        noise = Noise(*told["noise"]) if self.config.noise else Noise(None, None, None)
        if self.config.quantiles:
            losses, error, q = self._quantile_losses(transitions, noise, *told["shares"])
        else:
            losses, error, q = self._losses(transitions, noise)
        # Importance weights multiply the loss, after Huber: inside it they would move the point at which it
        # turns linear.
        loss = (told["weights"] * losses).mean()
        norm = learner.step(loss)
        # After the step: the next update, and all actors, see pixels as the published network does.
        self.net.observe(transitions.obs)
        # Above 0: a priority of 0 would mean never again, also once the network has changed.
        found = {"priorities": in_rewards(error.detach().abs(), scale).double() + PRIORITY_FLOOR}
        if measure:
            found |= {
                "learner/loss": loss.detach(),
                "learner/grad_norm": norm,
                "learner/q_mean": in_rewards(q.detach().mean(), scale),
                "learner/td_error_mean": error.detach().abs().mean(),
                "learner/explained_variance": returns.explained_variance(error, q + error),
            }
        return found

    def _losses(self, transitions: Transitions, noise: Noise) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, TD error and Q of each transition, `[B]`."""
        with torch.no_grad():
            targets = self._targets(transitions, noise)
        q = self.net(transitions.obs, noise.own).gather(1, transitions.action[:, None]).squeeze(1)
        error = targets - q
        return returns.huber(error, self.config.huber_delta), error, q

    def _targets(self, transitions: Transitions, noise: Noise) -> Tensor:
        """What the Q of the actions should be, `[B]`: of double Q-learning, of plain, or Munchausen's."""
        config, target = self.config, self.learner.target
        if config.munchausen_alpha:
            return self._munchausen_targets(transitions, noise)
        outcome = transitions.reward, transitions.discount
        next_q = target(transitions.next_obs, noise.target)
        if config.double:
            chooses = self.net(transitions.next_obs, noise.choice)
            return returns.double_q_target(*outcome, chooses, next_q)
        return returns.q_target(*outcome, next_q)

    def _munchausen_targets(
        self, transitions: Transitions, noise: Noise, next_values: Tensor | None = None
    ) -> Tensor:
        """Munchausen's targets `[B]`, or `[B, N]` of quantiles `next_values` `[B, N, A]`."""
        config = self.config
        # One pass over both: half the kernel launches.
        both = torch.cat([transitions.obs, transitions.next_obs])
        q, next_q = self.learner.target(both, noise.target).chunk(2)
        return returns.munchausen_target(
            transitions.reward,
            transitions.discount,
            transitions.action,
            q,
            next_q,
            alpha=config.munchausen_alpha,
            tau=config.munchausen_tau,
            least=config.munchausen_least,
            next_values=next_values,
        )

    def _quantile_losses(
        self, transitions: Transitions, noise: Noise, shares: Tensor, next_shares: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same of a network of quantiles; TD error and Q are those of their means."""
        net, learner = self.net, self.learner
        assert isinstance(net, QuantileNetwork)
        assert isinstance(learner.target, QuantileNetwork)
        rows = torch.arange(len(transitions.obs), device=self.device)
        with torch.no_grad():
            following = learner.target.quantiles(transitions.next_obs, next_shares, noise.target)
            if self.config.munchausen_alpha:
                goals = self._munchausen_targets(transitions, noise, following)
            else:
                double = self.config.double
                q_next = net(transitions.next_obs, noise.choice) if double else following.mean(1)
                # One action for all quantiles, the one whose mean is largest; a choice per quantile would be
                # an agent that knows its luck.
                following = following[rows, :, q_next.argmax(1)]
                goals = transitions.reward[:, None] + transitions.discount[:, None] * following
        values = net.quantiles(transitions.obs, shares, noise.own)[rows, :, transitions.action]
        losses = returns.quantile_losses(values, shares, goals, self.config.huber_delta)
        return losses, goals.mean(1) - values.mean(1), values.mean(1)

    # ----------------------------------------------------------------- parts

    def _network(self) -> QNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> QNetwork:
            kind = QuantileNetwork if config.quantiles else QNetwork
            units = config.hidden_units, config.mlp_units
            inputs = network_inputs(config, spec)
            scale = ReturnScale() if config.normalize_rewards else None
            shape = spec.seen_shape, spec.actions.count, torso
            return kind(*shape, *units, config.dueling, inputs, scale, config.noise)

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredTransitions:
        """See the base class."""
        return StoredTransitions(self.spec, self.config.n_steps, self.config.gamma, self.device)

    @cached_property
    def learner(self) -> TargetLearner[QNetwork]:
        """See the base class."""
        config = self.config
        return TargetLearner(
            self.net,
            self._optimizer(),
            config.max_grad_norm,
            period_updates=config.target_update_period_updates,
            draws="shares" if config.quantiles else "noise" if config.noise else "",
            seed=self.seed,
        )

    def _optimizer(self) -> torch.optim.Optimizer:
        config, parameters = self.config, self.net.parameters()
        # Fused: one kernel for all parameters. Unfused, Adam is a dozen small operations for each of them.
        if config.optimizer == "adam":
            return Adam(parameters, lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True)
        return RMSProp(
            parameters,
            lr=config.learning_rate,
            decay=config.rmsprop_decay,
            epsilon=config.optimizer_epsilon,
            centered=True,
        )


make = ApexAgent
"""What the registry calls."""
