"""R2D2: recurrent Q-learning on sequences with stored state and burn-in (Kapturowski et al. 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs, Update
from troupe.common.agents.fitting import body_options, suited
from troupe.common.agents.network import Step
from troupe.common.agents.q_learning import QAgent, TargetLearning, epsilon_greedy
from troupe.common.agents.sequences import Sequences, StoresSequences
from troupe.common.config.fields import (
    MAX_STEPS,
    Layers,
    SequenceAgentConfig,
    Units,
    Widths,
    structural,
    tunable,
)
from troupe.common.data.accumulator import PRIORITY_FLOOR
from troupe.common.nets.q_network import RecurrentQNetwork
from troupe.common.rl.sequences import mixed_priorities, n_step_q_targets

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class R2d2Config(SequenceAgentConfig):
    """Fields of `[agent]` for `algorithm = "r2d2"`; defaults are the paper's (table 2)."""

    reads_instructions = True

    algorithm: Literal["r2d2"] = structural("r2d2", "R2D2, recurrent Q-learning with prioritized replay.")
    hidden_units: Units = structural(512, "Width of the layer after a pixel torso.")
    mlp_units: Widths = structural((256,), "Widths of the mlp torso's layers.")
    lstm_units: Units = structural(512, "Width of the LSTM.")
    lstm_layers: Layers = structural(1, "Layers of the LSTM.")
    head_units: Units = structural(512, "Width of the hidden layer of each dueling stream.")
    see_last_step: bool = structural(True, "Feed the last action and the clipped last reward to the network.")
    n_steps: int = tunable(
        5, "Steps of reward before the bootstrap; fewer at a sequence's end.", ge=1, le=MAX_STEPS
    )
    gamma: float = tunable(0.997, "Discount per step.", ge=0, le=1)
    rescaling_epsilon: float | None = tunable(
        1e-3, "Epsilon of the value rescaling h; none = values as they are.", gt=0
    )
    learning_rate: float = tunable(1e-4, "Step size of Adam.", gt=0)
    optimizer_epsilon: float = tunable(1e-3, "Term added to Adam's denominator.", gt=0)
    max_grad_norm: float = tunable(
        40.0, "The gradient's global norm is clipped to this; 0 = not clipped.", ge=0
    )
    target_update_period_updates: int = tunable(2500, "Updates between copies to the target network.", ge=1)
    epsilon_base: float = tunable(
        0.4, "Exploration of slot i of N is base^(1 + alpha i / (N - 1)).", ge=0, le=1
    )
    epsilon_alpha: float = tunable(7.0, "Spread of exploration over the slots.", ge=0)
    eval_epsilon: float = tunable(0.001, "Exploration of the evaluator.", ge=0, le=1)


class R2d2Agent(
    StoresSequences[R2d2Config, RecurrentQNetwork, TargetLearning[RecurrentQNetwork]],
    QAgent[R2d2Config, RecurrentQNetwork],
):
    """Acts, stores and learns as R2D2. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    def __init__(self, config: R2d2Config, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self._begin_storing()

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Epsilon-greedy actions; the accumulator learns the values that give initial priorities."""
        q_values, memory = self._forward(inputs)
        q = q_values.cpu().numpy()
        action = epsilon_greedy(q, epsilon, rng)
        extras = {
            "value_taken": q[np.arange(len(q)), action],
            "value_max": q.max(axis=1),
            "memory": inputs.memory,
        }
        return Act(action, extras, memory.cpu().numpy())

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        q, memory = self._net(*step.sequence())
        return {"action": q[0].argmax(1), "q": q[0], "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """The largest Q `[S]` float32."""
        return self._forward(inputs)[0].amax(dim=1).cpu().numpy()

    def _forward(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One step of the network: Q `[S, A]`, memory `[S, memory_size]`."""
        arrays = (inputs.obs, inputs.last_action, inputs.last_reward, inputs.first)
        q, memory = self._net(
            *(self._to_device(array)[None] for array in arrays), self._to_device(inputs.memory)
        )
        return q[0], memory

    def _value_targets(self, rewards: Tensor, discounts: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
        following = values[:, :, None]  # one "action", which is the best
        return self._targets(rewards, discounts, following, following, goes_on)

    # -------------------------------------------------------------- learning

    def update(self, batch: Batch) -> Update:
        """One step of double Q-learning on `[B]` sequences; their new priorities mix maximum and mean."""
        learning = self._start_learning()
        sequences = self._sequences(batch.fields, batch.lengths)
        q, errors = self._errors(sequences, learning.target)
        errors = errors * sequences.counts
        # Summed over time, as in SEED: a shorter sequence weighs as much as it has steps.
        loss = (self._to_device(batch.weights) * 0.5 * errors.square().sum(dim=0)).mean()
        norm = learning.step(loss)
        self._net.observe(sequences.obs[self.config.burn_in_steps : -1], sequences.counts)
        errors, counts = errors.detach(), sequences.counts.to(errors.dtype)
        priorities = mixed_priorities(errors, self.config.priority_eta, counts)
        metrics: dict[str, float] = {}
        if batch.measure:
            steps = counts.sum().clamp(min=1)
            metrics = {
                "learner/loss": loss.item(),
                "learner/grad_norm": norm.item(),
                "learner/q_mean": ((q.detach() * counts).sum() / steps).item(),
                "learner/td_error_mean": (errors.abs().sum() / steps).item(),
            }
        return Update(priorities=priorities.double().cpu().numpy() + PRIORITY_FLOOR, metrics=metrics)

    def _errors(self, sequences: Sequences, target: RecurrentQNetwork) -> tuple[Tensor, Tensor]:
        """Q of the actions taken, and target minus that, `[N - burn_in - 1, B]`; padding has anything."""
        burn_in = self.config.burn_in_steps
        online_q = self._unroll(self._net, sequences)
        with torch.no_grad():
            target_q = self._unroll(target, sequences)
            targets = self._targets(
                sequences.last_reward[burn_in + 1 :],
                self.config.gamma * (~sequences.terminated[burn_in + 1 :]).to(target_q.dtype),
                online_q[1:],
                target_q[1:],
                sequences.goes_on,
            )
        actions = sequences.last_action[burn_in + 1 :, :, None]
        q = online_q[:-1].gather(2, actions).squeeze(2)
        return q, targets - q

    def _unroll(self, network: RecurrentQNetwork, sequences: Sequences) -> Tensor:
        """Q `[N - burn_in, B, A]`; no gradient flows through the burn-in."""
        q: Tensor = network(*sequences.burned_in(network, self.config.burn_in_steps))[0]
        return q

    def _targets(
        self, rewards: Tensor, discounts: Tensor, q_online: Tensor, q_target: Tensor, goes_on: Tensor
    ) -> Tensor:
        config = self.config
        return n_step_q_targets(
            rewards, discounts, q_online, q_target, goes_on, config.n_steps, config.rescaling_epsilon
        )

    # --------------------------------------------------------------- helpers

    def _network(self) -> RecurrentQNetwork:
        config, spec = self.config, self.spec

        def make(torso: str) -> RecurrentQNetwork:
            options = body_options(config, spec)
            return RecurrentQNetwork(
                spec.seen_shape, spec.actions, torso, head_units=config.head_units, **options
            )

        return suited(config, spec, make)

    def _optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        return torch.optim.Adam(
            self._net.parameters(), lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True
        )


make = R2d2Agent
"""What the registry calls."""
