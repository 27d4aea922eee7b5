"""Advantage actor-critic, A2C (Mnih et al. 2016): an on-policy algorithm of one's own in one file.

Actors play `unroll_steps` steps in every slot, the learner makes one step on all of them, and actors go on
with the new policy. munchausen.py beside this file learns from replay instead.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

# `PixelAgentConfig` has the fields that `NetworkAgent` reads, also where no pixels are seen. Names that
# `import troupe` does not have come from the module that defines them, as `TableNeeds` here.
from troupe import PixelAgentConfig, register_algorithm, structural, tunable
from troupe.common.agents import Act, Batch, Inputs, Update
from troupe.common.agents.network import Learner, NetworkAgent, Step
from troupe.common.agents.stored.unrolls import StoredUnrolls
from troupe.common.config.fields import TableNeeds
from troupe.common.errors import ConfigError
from troupe.common.rl.returns import explained_variance
from troupe.common.rl.sequences import lambda_returns


@register_algorithm
class A2CConfig(PixelAgentConfig):
    """Fields of `[agent]`."""

    # Class variables, no fields: it learns from fresh experience, once, and draws its actions from a policy.
    table = TableNeeds("queue", max_times_sampled=1)
    draws_actions = True

    algorithm: Literal["my_package.a2c"] = structural("my_package.a2c", "Advantage actor-critic.")
    units: int = structural(64, "Width of the hidden layers.", ge=1, le=4096)
    unroll_steps: int = structural(8, "Steps of each slot in an update.", ge=1, le=1024)
    gamma: float = tunable(0.99, "Discount per step.", ge=0, le=1)
    lambda_: float = tunable(0.95, "Lambda of the returns; 1 = REINFORCE's, to the unroll's end.", ge=0, le=1)
    baseline_cost: float = tunable(0.5, "Weight of the baseline's loss.", ge=0)
    entropy_cost: float = tunable(0.01, "Weight of the entropy bonus.", ge=0)
    learning_rate: float = tunable(2e-3, "Step size of Adam.", gt=0)
    max_grad_norm: float = tunable(0.5, "Maximum norm of the gradient; 0 = no clipping.", ge=0)

    @property
    def allowed_staleness(self) -> int:
        """How many versions old the policy that acts may be. 0 is on policy: actors wait for each update."""
        return 0


class Net(nn.Module):
    """Logits `[..., A]` and values `[...]` of observations `[..., n]`. Any module will do: only this file
    calls it.
    """

    def __init__(self, inputs: int, units: int, actions: int) -> None:
        super().__init__()
        self.policy, self.value = _mlp(inputs, units, actions), _mlp(inputs, units, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """What the policy and the baseline say."""
        return self.policy(obs), self.value(obs).squeeze(-1)


def _mlp(inputs: int, units: int, outputs: int) -> nn.Sequential:
    hidden = nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh()
    return nn.Sequential(*hidden, nn.Linear(units, outputs))


class A2CAgent(NetworkAgent):
    """Saving and publishing are `NetworkAgent`'s; `troupe.common.agents.base.Agent` says what each method
    here has to do.
    """

    config: A2CConfig
    net: Net

    def _network(self) -> Net:
        # Say here what the algorithm does not take: the run is then refused before it begins, with this line.
        if self.spec.obs_dtype != "float32" or len(self.spec.obs_shape) != 1:
            raise ConfigError(f"my_package.a2c takes vectors, which observations of {self.spec.id} are not")
        return Net(self.spec.obs_shape[0], self.config.units, self.spec.actions.count)

    @cached_property
    def stored(self) -> StoredUnrolls:
        """What actors send: `unroll_steps` steps in a row, across episodes; 0: the network has no memory."""
        # On policy all slots complete together; `staggered` is for an algorithm that does not wait for them.
        return StoredUnrolls(self.spec, self.config.unroll_steps, 0, staggered=False, device=self.device)

    @cached_property
    def learner(self) -> Learner:
        """Clips the gradient, steps and counts. An actor never makes it."""
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.learning_rate)
        return Learner(self.net, optimizer, self.config.max_grad_norm)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Draws from the policy with chance `epsilon`, which is 1 in training; else the likeliest action."""
        logits = self.net(self._to_device(inputs.obs))[0].cpu().numpy()
        # The largest of logits with Gumbel noise is a draw from their softmax. Draw from `rng` only: torch's
        # generator is the whole process's.
        noise = rng.gumbel(size=logits.shape) * (rng.random(len(logits)) < epsilon)[:, None]
        return Act((logits + noise).argmax(1))

    def decide(self, step: Step) -> dict[str, Tensor]:
        """The likeliest action as a function of tensors: what `troupe export` writes."""
        logits, _ = self.net(step.obs)
        return {"action": logits.argmax(1), "policy": logits}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The baseline, for the last observation of an episode that a time limit cuts off."""
        return self.net(self._to_device(inputs.obs))[1].cpu().numpy()

    def update(self, batch: Batch) -> Update:
        """One step on `replay.batch_size` unrolls."""
        config = self.config
        # Time-major: `obs` is [T + 1, B, n]; entry t + 1 of `last_action` and `last_reward` is of step t.
        unrolls = self.stored.read(batch.fields)
        logits, values = self.net(unrolls.obs)
        actions, rewards = unrolls.last_action[1:], unrolls.last_reward[1:]
        # Episodes end within unrolls. Of that, `outcomes` makes discounts, which are 0 behind a termination;
        # values of the observations that truly followed, also at a time limit; and where an episode goes on.
        # Every function of troupe.common.rl.sequences takes these.
        discounts, following, continues = unrolls.outcomes(values.detach(), config.gamma)
        returns = lambda_returns(rewards, discounts, following, continues, config.lambda_)
        log_policy = logits[:-1].log_softmax(-1)
        taken = log_policy.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(log_policy.exp() * log_policy).sum(-1).mean()
        errors = returns - values[:-1]
        gradient = -(errors.detach() * taken).mean()
        loss = gradient + config.baseline_cost * errors.square().mean() - config.entropy_cost * entropy
        norm = self.learner.step(loss)
        # Experience that is used once has no priorities: None. `measure`: reading a tensor waits for the GPU.
        if not batch.measure:
            return Update(None, {})
        # `troupe why` looks at these names; Troupe itself adds what it measures of any network.
        metrics = {"loss": loss, "entropy": entropy, "grad_norm": norm}
        metrics["explained_variance"] = explained_variance(errors, returns)
        return Update(None, {f"learner/{name}": value.item() for name, value in metrics.items()})


make = A2CAgent
"""What builds the agent."""
