"""Munchausen DQN (Vieillard, Pietquin and Geist 2020): an algorithm of one's own in one file, top to bottom.

Ape-X has the same targets as an option, `agent.munchausen_alpha`; here it is what an algorithm outside this
tree looks like that learns from transitions: a configuration, a network, what is stored, and a learner.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from troupe import PixelAgentConfig, register_algorithm, structural, tunable
from troupe.common.agents import Act, Batch, Inputs, Update
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import NetworkAgent, Step, network_inputs, suited
from troupe.common.agents.stored.transitions import StoredTransitions
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.nets.q_network import QNetwork
from troupe.common.rl.exploration import epsilon_greedy, epsilon_ladder
from troupe.common.rl.returns import huber, munchausen_target


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


class MunchausenAgent(NetworkAgent):
    """Learns from single transitions; `troupe.common.agents.base.Agent` says what each method has to do."""

    config: MunchausenConfig
    net: QNetwork

    def _network(self) -> QNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> QNetwork:
            units = config.hidden_units, config.mlp_units
            return QNetwork(
                spec.seen_shape, spec.actions.count, torso, *units, False, network_inputs(config, spec)
            )

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredTransitions:
        """What an actor sends to replay, and how a batch of it is read."""
        return StoredTransitions(self.spec, 1, self.config.gamma, self.device)

    @cached_property
    def learner(self) -> TargetLearner[QNetwork]:
        """The optimiser and the target network."""
        config = self.config
        optimizer = torch.optim.Adam(
            self.net.parameters(), lr=config.learning_rate, eps=config.adam_epsilon, fused=True
        )
        period = config.target_update_period_updates
        return TargetLearner(self.net, optimizer, config.max_grad_norm, period_updates=period)

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Each slot explores by an epsilon of its own."""
        return epsilon_ladder(self.config.epsilon_base, self.config.epsilon_alpha, indices, total_slots)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Epsilon-greedy; the extras are what the first priority of a transition is made of."""
        q = self.net(self._to_device(inputs.obs)).cpu().numpy()
        action = epsilon_greedy(q, epsilon, rng)
        return Act(action, {"value_taken": q[np.arange(len(q)), action], "value_max": q.max(axis=1)})

    def decide(self, step: Step) -> dict[str, Tensor]:
        """The best action as a function of tensors: what `troupe export` writes."""
        q = self.net(step.obs)
        return {"action": q.argmax(1), "q": q}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q, for episodes that a time limit cuts off."""
        return self.net(self._to_device(inputs.obs)).amax(dim=1).cpu().numpy()

    def update(self, batch: Batch) -> Update:
        """One step of the chosen actions' Q towards Munchausen's targets (equation 2 of the paper)."""
        config, learner = self.config, self.learner
        transitions = self.stored.read(batch.fields)
        with torch.no_grad():
            q, next_q = learner.target(torch.cat([transitions.obs, transitions.next_obs])).chunk(2)
            targets = munchausen_target(
                transitions.reward,
                transitions.discount,
                transitions.action,
                q,
                next_q,
                alpha=config.alpha,
                tau=config.tau,
                least=config.log_policy_min,
            )
        taken = self.net(transitions.obs).gather(1, transitions.action[:, None]).squeeze(1)
        error = targets - taken
        loss = (self._to_device(batch.weights) * huber(error, config.huber_delta)).mean()
        learner.step(loss)
        self.net.observe(transitions.obs)
        priorities = error.detach().abs().double().cpu().numpy() + PRIORITY_FLOOR
        return Update(priorities, {"learner/loss": loss.item()} if batch.measure else {})


make = MunchausenAgent
"""What builds the agent."""
