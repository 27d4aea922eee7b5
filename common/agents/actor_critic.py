"""What agents with a policy and a baseline share: acting, and the plain network."""

from __future__ import annotations

import numpy as np
import torch

from common.agents.base import Act, Inputs
from common.agents.fitting import body_options, suited
from common.agents.network import OwnLearning
from common.agents.unroll_agent import Config, UnrollAgent
from common.nets.actor_critic import ActorCritic


class ActorCriticAgent(UnrollAgent[Config, ActorCritic, OwnLearning]):
    """All of an `Agent` but how it learns: `update` and what that needs. See there for the contracts."""

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Every slot draws from the policy: the stored logits are those of what was done."""
        return np.ones(len(indices), np.float32)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        policy_logits, _, memory = self._forward(inputs)
        logits = policy_logits[0].cpu().numpy()
        # The largest of logits plus Gumbel noise is distributed as the softmax of the logits.
        drawn = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        explores = rng.random(len(logits)) < epsilon
        action = np.where(explores, drawn, logits.argmax(axis=1))
        if not self.memory_size:
            return Act(action, {"logits": logits})
        return Act(action, {"logits": logits, "memory": inputs.memory}, memory.cpu().numpy())

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The baseline `[S]` float32."""
        return self._forward(inputs)[1][0].cpu().numpy()

    # --------------------------------------------------------------- helpers

    def _network(self) -> ActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> ActorCritic:
            return ActorCritic(spec.obs_shape, spec.num_actions, torso, **body_options(config, spec))

        return suited(config.torso, "shallow", spec, make)
