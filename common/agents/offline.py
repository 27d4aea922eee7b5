"""What agents for fixed data sets share: critics and a policy that learn from transitions, and how they act.

They also act, so that a run can go on with actors where the data set has brought it.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import NetworkAgent, Step
from troupe.common.agents.policies import drawn
from troupe.common.agents.soft import found, learner_of, network_of
from troupe.common.agents.stored.transitions import StoredTransitions, Transitions, scaled
from troupe.common.config.fields import (
    NORMALIZE_REWARDS,
    POLICY_GAIN,
    PixelAgentConfig,
    Units,
    Widths,
    structural,
    tunable,
)
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl.distributions import Distribution
from troupe.common.rl.normalizers import in_rewards
from troupe.common.rl.returns import explained_variance

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class OfflineConfig(PixelAgentConfig):
    """Base of the algorithms that learn a policy and critics from a fixed data set."""

    takes_any_action = True
    draws_actions = True
    several_learners = True
    has_values: ClassVar[bool] = False
    """Whether there is a value function beside the critics."""

    hidden_units: Units = structural(256, "Width of the layer after a pixel torso.")
    mlp_units: Widths = structural((256, 256), "Widths of the hidden layers of policy and critics, ReLU.")
    layer_norm: bool = structural(False, "Layer normalisation in policy and critics, before each ReLU.")
    normalize_vectors: bool = structural(
        True, "Normalise vectors by their running mean and standard deviation, clipped at 10."
    )
    normalize_rewards: bool = structural(False, NORMALIZE_REWARDS)
    policy_gain: float = structural(0.01, POLICY_GAIN, ge=0, le=100)
    critics: int = structural(2, "Number of Q functions, of which the minimum is used.", ge=1, le=64)
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    tau: float = tunable(
        0.005, "Fraction of the network mixed into the target network at each of its updates.", gt=0, le=1
    )
    learning_rate: float = tunable(3e-4, "Learning rate of Adam.", gt=0)
    policy_learning_rate: float | None = tunable(
        None, "Learning rate of the policy; none = learning_rate.", gt=0
    )
    optimizer_epsilon: float = tunable(1e-8, "Term added to Adam's denominator.", gt=0)
    max_grad_norm: float = tunable(0.0, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)
    eval_epsilon: float = tunable(
        0.0,
        "Probability that the evaluator samples from the policy instead of taking the greedy action.",
        ge=0,
        le=1,
    )


class OfflineAgent(NetworkAgent):
    """Acts, stores and learns; a subclass has the policy's distribution, the losses, and values of states.

    See `troupe.common.agents.base.Agent` for the methods' contracts.
    """

    config: OfflineConfig
    net: SoftActorCritic
    target_period_updates = 1

    def __init__(self, config: OfflineConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self.policy = self._distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)

    @abstractmethod
    def _distribution(self, config: Any, spec: EnvSpec) -> Distribution:
        """The policy's; ConfigError where the actions are not for it."""

    @abstractmethod
    def _value(self, features: Tensor, params: Tensor) -> Tensor:
        """What states `[B]` with these features and policies are worth."""

    @abstractmethod
    def _losses(
        self, transitions: Transitions, weights: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """The whole loss, the critics' targets `[B]` and errors `[n, B]`, and scalars for the log.

        Args:
            transitions: a batch.
            weights: `[B]`, importance.
            noise: `[B, numbers of an action]`, of a standard normal.
        """

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        features = self.net.encode(self._to_device(inputs.obs))
        params = self.net.policy(features)
        action = drawn(self.policy, params.cpu().numpy(), epsilon, rng)
        if bounded := self.spec.actions.bounded:
            # As in data sets and in the paper's code: what lies beyond the bounds is done as the nearest
            # action, and would be refused as an item.
            action = np.where(bounded, action.clip(-1.0, 1.0), action)
        taken = self.net.agreed(self.net.q_taken(features, self._to_device(action)))
        both = torch.stack([taken, self._value(features, params)])
        taken_there, best = in_rewards(both, self.net.scale).cpu().numpy()
        return Act(action, {"value_taken": taken_there, "value_max": best})

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        params = self.net.policy(self.net.encode(step.obs))
        return {"action": self.policy.best(params), "policy": params, "next_memory": step.memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """What is to come, `[S]` float32 in the unit of rewards."""
        features = self.net.encode(self._to_device(inputs.obs))
        return in_rewards(self._value(features, self.net.policy(features)), self.net.scale).cpu().numpy()

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class."""
        learner, shape = self.learner, (len(batch.weights), self.spec.actions.reals)
        noise = learner.reduction.drawn(learner.generator, shape, normal=True)
        return {**batch.fields, "weights": batch.weights, "noise": noise}

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """One step on `[B]` items; new priorities are of the critics' mean `|TD error|`."""
        transitions = scaled(self.stored.read(told), self.net.scale)
        loss, targets, errors, measured = self._losses(transitions, told["weights"], told["noise"])
        measured |= {
            "loss": loss,
            "q_mean": in_rewards((targets - errors).mean(), self.net.scale),
            "explained_variance": explained_variance(errors.mean(0), targets),
            "td_error_mean": errors.abs().mean(),
        }
        measured["grad_norm"] = self.learner.step(loss)
        self.net.observe(transitions.obs)
        return found(in_rewards(errors.detach().abs().mean(0), self.net.scale), measured if measure else {})

    def _critic_loss(self, features: Tensor, action: Tensor, targets: Tensor, weights: Tensor) -> Any:
        """The loss of all critics, and their errors `[n, B]`."""
        errors = targets - self.net.q_taken(features, action)
        # The sum over critics, not the mean: each learns at the same speed, however many there are.
        return 0.5 * (weights * errors.square()).mean(1).sum(), errors

    # ----------------------------------------------------------------- parts

    def _network(self) -> SoftActorCritic:
        return network_of(self.config, self.spec, self.policy.size, values=self.config.has_values)

    @cached_property
    def stored(self) -> StoredTransitions:
        """See the base class: single transitions, since the rewards of more would be the behaviour's."""
        bounds = (-1.0, 1.0) if self.spec.actions.reals and all(self.spec.actions.bounded) else None
        return StoredTransitions(self.spec, 1, self.config.gamma, self.device, bounds)

    @cached_property
    def learner(self) -> TargetLearner[SoftActorCritic]:
        """See the base class."""
        return learner_of(self.net, self.config, self.seed, period_updates=self.target_period_updates)
