"""PQN: Q(lambda) on fresh unrolls, without replay or target network (Gallici et al. 2024).

Layer norm takes the place of both: it bounds how far values can run away with their own bootstrap.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.optimizers import RAdam
from troupe.common.agents.learners.passes import (
    PassesConfig,
    PassesLearner,
    Steps,
    inputs_of,
    means,
    styled_body,
)
from troupe.common.agents.network import NetworkAgent, Step, suited
from troupe.common.agents.stored.unrolls import StoredUnrolls, Unrolls
from troupe.common.config.fields import StepCount, Units, structural, tunable
from troupe.common.nets.recurrent_q import RecurrentQNetwork
from troupe.common.rl import policy
from troupe.common.rl.exploration import epsilon_greedy
from troupe.common.rl.importance import annealed
from troupe.common.rl.sequences import lambda_returns


class PqnConfig(PassesConfig):
    """Fields of `[agent]` for `algorithm = "pqn"`; defaults are those of the authors' code for Atari."""

    several_learners = True

    algorithm: Literal["pqn"] = structural("pqn", "PQN: Q(lambda) with layer norm, without replay or target.")
    hidden_units: Units = structural(512, "Width of the layer after a pixel torso.")
    layer_norm: bool = structural(
        True, "Apply layer normalisation to the torso's outputs, which keeps PQN stable."
    )
    unroll_steps: StepCount = structural(
        32, "Steps of an unroll. They are sent together; actor.chunk_steps has no effect."
    )
    lambda_: float = tunable(0.65, "Lambda of the returns; 0 = one-step targets.", ge=0, le=1)
    epochs: int = tunable(2, "Passes over a batch.", ge=1, le=1024)
    minibatch_steps: int = tunable(
        128, "Steps of a minibatch; a recurrent network gets whole unrolls. 0 = the whole batch.", ge=0
    )
    learning_rate: float = tunable(2.5e-4, "Initial learning rate of RAdam.", gt=0)
    optimizer_epsilon: float = tunable(1e-8, "Term added to RAdam's denominator.", gt=0)
    max_grad_norm: float = tunable(10.0, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)
    epsilon_start: float = tunable(1.0, "Initial probability of a random action.", ge=0, le=1)
    epsilon_final: float = tunable(0.001, "Final probability of a random action.", ge=0, le=1)
    epsilon_share: float = tunable(0.1, "Share of run.total_steps over which epsilon decays.", gt=0, le=1)
    eval_epsilon: float = tunable(
        0.0, "Fraction of the training epsilon that the evaluator uses; 0 = none.", ge=0, le=1
    )


class PqnNetwork(RecurrentQNetwork):
    """Q values, linear in the body's features, and how far acting by them explores.

    `exploration` float64 `[1]` is published with the weights: so all actors follow the learner's schedule.
    """

    exploration: Tensor


class PqnAgent(NetworkAgent):
    """Acts, stores and learns. See `troupe.common.agents.base.Agent` for the methods' contracts.

    Every slot explores as much as the schedule says, so that `slot_epsilons` are 1.
    """

    config: PqnConfig
    net: PqnNetwork

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Best actions; with chance `epsilon` times the schedule's any action, all being equally likely."""
        q, memory = self.net(*self.step_of(inputs).sequence())
        action = epsilon_greedy(q[0].cpu().numpy(), epsilon * self.net.exploration.item(), rng)
        return self._acted(action, {}, inputs, memory)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        q, memory = self.net(*step.sequence())
        return {"action": q[0].argmax(1), "q": q[0], "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q `[S]` float32."""
        return self.net(*self.step_of(inputs).sequence())[0][0].amax(dim=-1).cpu().numpy()

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class; `weights` are 1 and not looked at."""
        config, learner = self.config, self.learner
        learner.rate.follow_progress(batch.progress)
        exploration = annealed(
            config.epsilon_start, config.epsilon_final, batch.progress, config.epsilon_share
        )
        drawn = learner.drawn(config.unroll_steps, len(batch.weights))
        return {**batch.fields, **drawn, "exploration": np.array([exploration])}

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """`agent.epochs` passes over `[B]` unrolls."""
        unrolls = self.learner.prepared(self.stored.read(told))
        measured = self.learner.learn(told, lambda previous: self._targeted(unrolls, previous), self._loss)
        # In place: the buffer goes out with the next parameters, under the same name.
        self.net.exploration.copy_(told["exploration"])
        return means(measured) | {"learner/epsilon": told["exploration"]} if measure else {}

    def _loss(self, steps: Steps) -> tuple[Tensor, dict[str, Tensor]]:
        (q,) = self.learner.forward(*steps.inputs)
        error = steps.target - q.gather(-1, steps.action[..., None]).squeeze(-1)
        return 0.5 * error.square().mean(), {"q_mean": q.mean(), "td_error_mean": error.abs().mean()}

    @torch.no_grad()
    def _targeted(self, unrolls: Unrolls, previous: Steps | None) -> Steps:
        """The batch with the Q(lambda) returns of the weights before it.

        The greedy policy's value stands at each bootstrap; as in Peng's Q(lambda) an exploring action does
        not cut the return.
        """
        if previous is not None:
            return previous
        config = self.config
        (q,) = self.learner.evaluated(unrolls)
        rewards = config.reward_scale * policy.clip_reward(unrolls.last_reward[1:], config.reward_clip)
        # `lambda_returns` takes values and not Q: the largest Q is the value of acting greedily.
        outcomes = unrolls.outcomes(q.amax(dim=-1), config.gamma)
        inputs = inputs_of(unrolls)
        steps = Steps(
            **inputs,
            value=q[:-1].gather(-1, inputs["action"][..., None]).squeeze(-1),
            target=lambda_returns(rewards, *outcomes, lambda_=config.lambda_),
        )
        return steps if self.memory_size else steps.flattened()

    # ----------------------------------------------------------------- parts

    def _network(self) -> PqnNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> PqnNetwork:
            net = PqnNetwork(spec.seen_shape, spec.actions, torso, head_units=0, **styled_body(config, spec))
            # float64 with one dimension: the wire rounds float32 weights to bfloat16 where that is asked for,
            # and never these.
            net.register_buffer("exploration", torch.tensor([config.epsilon_start], dtype=torch.float64))
            return net

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredUnrolls:
        """See the base class."""
        staggered = self.config.allowed_staleness is None
        return StoredUnrolls(
            self.spec,
            self.config.unroll_steps,
            self.net.state_size,
            staggered=staggered,
            device=self.device,
        )

    @cached_property
    def learner(self) -> PassesLearner:
        """See the base class."""
        config = self.config
        optimizer = RAdam(self.net.parameters(), lr=config.learning_rate, eps=config.optimizer_epsilon)
        return PassesLearner(config, self.net, optimizer, seed=self.seed, pixels=self.spec.pixels)


make = PqnAgent
"""What the registry calls."""
