"""What agents with a policy and a baseline share: acting, and the plain network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Inputs
from troupe.common.agents.fitting import (
    RealsConfig,
    body_options,
    policy_distribution,
    policy_options,
    suited,
)
from troupe.common.agents.network import OwnLearning, Step
from troupe.common.agents.unroll_agent import UnrollAgent, UnrollConfig
from troupe.common.nets.actor_critic import ActorCritic

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


LARGEST_FEATURE = float(np.finfo(np.float16).max)
"""What is stored of features is float16: larger ones would be infinite, and their unroll left out."""


class PolicyConfig(UnrollConfig, RealsConfig, Protocol):
    """Fields of an agent with a policy and a baseline."""


Config = TypeVar("Config", bound=PolicyConfig)


class ActorCriticAgent(UnrollAgent[Config, ActorCritic, OwnLearning]):
    """All of an `Agent` but how it learns: `update` and what that needs. See there for the contracts."""

    def __init__(self, config: Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self._policy = policy_distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)

    @property
    def behaviour_size(self) -> int:
        """Parameters of the policy's distribution."""
        return self._policy.size

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Every slot draws from the policy: the stored parameters are those of what was done."""
        return np.ones(len(indices), np.float32)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        params, values, memory, features = self._forward(inputs, self._net.described)
        behaviour = params[0].cpu().numpy()
        action = self._policy.sample(behaviour, rng)
        best = rng.random(len(behaviour)) >= epsilon
        if best.any():
            action[best] = self._policy.mode(behaviour[best])
        extras = {"behaviour": behaviour}
        if self.feature_size:
            extras["features"] = features[0].clamp(-LARGEST_FEATURE, LARGEST_FEATURE).half().cpu().numpy()
        if self.stores_values:
            extras["value"] = values[0].cpu().numpy()
        if not self.memory_size:
            return Act(action, extras)
        return Act(action, extras | {"memory": inputs.memory}, memory.cpu().numpy())

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        params, _, memory = self._net(*step.sequence())
        return {"action": self._policy.best(params[0]), "policy": params[0], "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The baseline `[S]` float32."""
        return self._forward(inputs)[1][0].cpu().numpy()

    # --------------------------------------------------------------- helpers

    def _network(self) -> ActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> ActorCritic:
            return ActorCritic(spec.seen_shape, spec.actions, torso, **self._network_options())

        return suited(config, spec, make)

    def _network_options(self) -> dict[str, Any]:
        """Arguments of the network besides its shapes and torso."""
        config, spec = self.config, self.spec
        return body_options(config, spec) | policy_options(config, self._policy, spec)
