"""R2D2: recurrent Q-learning on sequences with stored state and burn-in (Kapturowski et al. 2019)."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.optimizers import Adam
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import NetworkAgent, Step, body_options, suited
from troupe.common.agents.stored.sequences import Sequences, StoredSequences
from troupe.common.config.fields import (
    MAX_STEPS,
    QLearningConfig,
    SequenceAgentConfig,
    Units,
    Widths,
    structural,
    tunable,
)
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.nets.recurrent_q import RecurrentQNetwork
from troupe.common.rl.exploration import epsilon_greedy, epsilon_ladder
from troupe.common.rl.normalizers import ReturnScale
from troupe.common.rl.returns import explained_variance
from troupe.common.rl.sequences import mixed_priorities, n_step_q_targets


class R2d2Config(QLearningConfig, SequenceAgentConfig):
    """Fields of `[agent]` for `algorithm = "r2d2"`; defaults are the paper's (table 2)."""

    reads_instructions = True
    several_learners = True

    algorithm: Literal["r2d2"] = structural("r2d2", "R2D2, recurrent Q-learning with prioritized replay.")
    hidden_units: Units = structural(512, "Width of the layer after a pixel torso.")
    mlp_units: Widths = structural((256,), "Widths of the mlp torso's layers.")
    lstm_units: Units = structural(512, "Width of the LSTM.")
    head_units: Units = structural(512, "Width of the hidden layer of each dueling stream.")
    n_steps: int = tunable(
        5, "Steps of reward before the bootstrap; fewer at a sequence's end.", ge=1, le=MAX_STEPS
    )
    gamma: float = tunable(0.997, "Discount per step.", ge=0, le=1)
    rescaling_epsilon: float | None = tunable(
        1e-3, "Epsilon of the value rescaling h; none = no rescaling.", gt=0
    )
    learning_rate: float = tunable(1e-4, "Learning rate of Adam.", gt=0)
    optimizer_epsilon: float = tunable(1e-3, "Term added to Adam's denominator.", gt=0)


class R2d2Agent(NetworkAgent):
    """Acts, stores and learns as R2D2. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    config: R2d2Config
    net: RecurrentQNetwork

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Ape-X's ladder, `epsilon_base ** (1 + i / (N - 1) * epsilon_alpha)`."""
        return epsilon_ladder(self.config.epsilon_base, self.config.epsilon_alpha, indices, total_slots)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Epsilon-greedy actions; the accumulator learns the values that give initial priorities."""
        q_values, memory = self.net(*self.step_of(inputs).sequence())
        q = q_values[0].cpu().numpy()
        action = epsilon_greedy(q, epsilon, rng)
        extras = {"value_taken": q[np.arange(len(q)), action], "value_max": q.max(axis=1)}
        return self._acted(action, extras, inputs, memory)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        q, memory = self.net(*step.sequence())
        return {"action": q[0].argmax(1), "q": q[0], "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q `[S]` float32."""
        return self.net(*self.step_of(inputs).sequence())[0][0].amax(dim=1).cpu().numpy()

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class."""
        aligned = self.stored.aligned(batch.fields, batch.lengths)
        return {**batch.fields, **aligned, "weights": batch.weights}

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """One step of double Q-learning on `[B]` sequences; their new priorities mix maximum and mean."""
        learner, sequences = self.learner, self.stored.read(told)
        sequences.observe_rewards(self.net.scale, self.config.burn_in_steps, self.config.gamma)
        q, errors = self._errors(sequences)
        errors = errors * sequences.counts
        # Summed over time, as in SEED: a shorter sequence weighs as much as it has steps.
        loss = (told["weights"] * 0.5 * errors.square().sum(dim=0)).mean()
        norm = learner.step(loss)
        # Without the burn-in, whose frames are learned from in the sequence before and would count twice.
        self.net.observe(sequences.obs[self.config.burn_in_steps : -1], sequences.counts)
        errors, counts = errors.detach(), sequences.counts.to(errors.dtype)
        priorities = mixed_priorities(errors, self.config.priority_eta, counts)
        found = {"priorities": priorities.double() + PRIORITY_FLOOR}
        if measure:
            steps = counts.sum().clamp(min=1)
            found |= {
                "learner/loss": loss.detach(),
                "learner/grad_norm": norm,
                "learner/q_mean": (q.detach() * counts).sum() / steps,
                "learner/td_error_mean": errors.abs().sum() / steps,
                "learner/explained_variance": explained_variance(errors, q + errors, sequences.counts),
            }
        return found

    def _errors(self, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Q of the actions taken, and target minus that, `[N - burn_in - 1, B]`; padding has anything."""
        burn_in = self.config.burn_in_steps
        online_q = self._unroll(self.net, sequences)
        with torch.no_grad():
            target_q = self._unroll(self.learner.target, sequences)
            outcomes = sequences.outcomes(burn_in, self.config.gamma)
            targets = self._targets(*outcomes, online_q[1:], target_q[1:], sequences.goes_on)
        actions = sequences.last_action[burn_in + 1 :, :, None]
        # One pass serves twice: entry t is the Q that is learned, entry t + 1 what the step's bootstrap
        # chooses by. Its gradient is cut in the targets only.
        q = online_q[:-1].gather(2, actions).squeeze(2)
        return q, targets - q

    def _unroll(self, network: RecurrentQNetwork, sequences: Sequences) -> Tensor:
        """Q `[N - burn_in, B, A]`; no gradient flows through the burn-in."""
        q: Tensor = network(*sequences.burned_in(network, self.config.burn_in_steps))[0]
        return q

    def _targets(
        self, rewards: Tensor, discounts: Tensor, q_online: Tensor, q_target: Tensor, goes_on: Tensor
    ) -> Tensor:
        """Targets `[T, B]` of Q values `[T, B, A]` of what followed; the online network chooses.

        Rewards are as they are stored, values as the network gives them: with `normalize_rewards`, before the
        value rescaling, of the size of its scale.
        """
        if self.net.scale is not None:
            rewards = self.net.scale(rewards)
        steps, epsilon = self.config.n_steps, self.config.rescaling_epsilon
        return n_step_q_targets(rewards, discounts, q_online, q_target, goes_on, steps, epsilon)

    def _value_targets(self, rewards: Tensor, discounts: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
        best = values[:, :, None]  # one "action", which is the best
        return self._targets(rewards, discounts, best, best, goes_on)

    # ----------------------------------------------------------------- parts

    def _network(self) -> RecurrentQNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> RecurrentQNetwork:
            options = body_options(config, spec)
            scale = ReturnScale() if config.normalize_rewards else None
            options |= {"head_units": config.head_units, "scale": scale}
            return RecurrentQNetwork(spec.seen_shape, spec.actions, torso, **options)

        return suited(config, spec, make)

    @cached_property
    def stored(self) -> StoredSequences:
        """See the base class."""
        config = self.config
        return StoredSequences(
            config, self.spec, self.net.state_size, config.gamma, self._value_targets, self.device
        )

    @cached_property
    def learner(self) -> TargetLearner[RecurrentQNetwork]:
        """See the base class."""
        config = self.config
        optimizer = Adam(
            self.net.parameters(), lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True
        )
        period = config.target_update_period_updates
        return TargetLearner(self.net, optimizer, config.max_grad_norm, period_updates=period)


make = R2d2Agent
"""What the registry calls."""
