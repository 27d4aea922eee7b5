"""Soft actor-critic: replay, and a policy of reward and entropy (Haarnoja et al. 2018, 2019).

Real numbers within bounds are drawn from normals squashed by tanh, and the policy follows the critics'
gradient through the action (Haarnoja et al. 2019, section 5). Of one choice the expectation over all values
is exact instead (Christodoulou 2019); of several choices it is exact for each, beside a draw of the others.
Without memory it learns from transitions; with memory from sequences with stored state and burn-in, as R2D2
does (Kapturowski et al. 2019).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from troupe.common.agents.base import Batch, Update
from troupe.common.agents.sequences import Sequences, StoresSequences
from troupe.common.agents.soft_agent import SoftAgent, SoftLearning
from troupe.common.agents.transitions import StoresTransitions, Transitions
from troupe.common.config.fields import (
    POLICY_GAIN,
    Layers,
    SequenceAgentConfig,
    Units,
    UnitsOrNone,
    Widths,
    structural,
    tunable,
)
from troupe.common.data.accumulator import PRIORITY_FLOOR
from troupe.common.data.schema import FieldSpec
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl.sequences import mixed_priorities, n_step_returns

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class SacConfig(SequenceAgentConfig):
    """Fields of `[agent]` for `algorithm = "sac"`; defaults are those of Haarnoja et al. 2019, table 1."""

    takes_any_action = True
    draws_actions = True

    algorithm: Literal["sac"] = structural("sac", "Soft actor-critic.")
    hidden_units: Units = structural(256, "Width of the layer on top of a pixel torso.")
    mlp_units: Widths = structural((256, 256), "Widths of the hidden layers of policy and critics, ReLU.")
    lstm_units: UnitsOrNone = structural(
        0, "Width of an LSTM, shared by policy and critics; with it items are sequences. 0: no memory."
    )
    lstm_layers: Layers = structural(1, "Layers of the LSTM.")
    see_last_step: bool = structural(True, "Feed the last action and the clipped last reward to the LSTM.")
    normalize_vectors: bool = structural(
        False, "The network sees vectors minus their running mean, divided by their deviation, clipped at 10."
    )
    policy_gain: float = structural(0.01, POLICY_GAIN, ge=0, le=100)
    critics: int = structural(2, "Q functions, of which the least value counts.", ge=1, le=64)
    bootstrap: Literal["q", "v"] = structural(
        "q", "Targets come from target critics, or from a target of a value function (Haarnoja et al. 2018)."
    )
    n_steps: int = structural(
        1, "Steps of reward before the bootstrap; the entropies of those between do not count.", ge=1, le=255
    )
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    deviation_floor: float = structural(
        1e-3, "Least deviation of a real number before tanh, in halves of its range.", gt=0, lt=0.1
    )
    deviation_start: float = structural(
        1.0, "That deviation at the beginning; 1 makes actions nearly uniform.", ge=0.1, le=10
    )
    tau: float = tunable(
        0.005, "Share of the network that goes into the target network at a time.", gt=0, le=1
    )
    target_update_period_updates: int = tunable(1, "Updates between two such steps.", ge=1)
    entropy_cost: float = tunable(
        1.0, "Worth of a nat of entropy (the temperature, alpha); where it begins if it is adjusted.", ge=0
    )
    adjust_entropy_cost: bool = structural(True, "Adjust it so that the mean entropy is target_entropy.")
    target_entropy: float | None = tunable(
        None,
        "In nats, of actions in halves of their range; none = minus how many real numbers an action has, or "
        "0.98 of the logarithm of how many actions there are.",
    )
    entropy_cost_adjustment_speed: float = tunable(1.0, "Speed of that adjustment.", gt=0)
    learning_rate: float = tunable(3e-4, "Step size of Adam.", gt=0)
    policy_learning_rate: float | None = tunable(
        None, "Of the policy alone; none = as everything else.", gt=0
    )
    optimizer_epsilon: float = tunable(1e-8, "Term added to Adam's denominator.", gt=0)
    max_grad_norm: float = tunable(
        0.0, "The gradient's global norm is clipped to this; 0 = not clipped.", ge=0
    )
    eval_epsilon: float = tunable(
        0.0, "Chance that the evaluator draws from the policy instead of taking its best action.", ge=0, le=1
    )

    @model_validator(mode="after")
    def _sequences_are_for_memory(self) -> SacConfig:
        fields = [*SequenceAgentConfig.__annotations__, "lstm_layers", "see_last_step"]
        changed = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not self.lstm_units:
            raise ValueError(f"{changed[0]} means nothing without memory: set lstm_units too")
        return self


class SacAgent(StoresTransitions[SacConfig, SoftActorCritic, SoftLearning], SoftAgent):
    """Acts, stores and learns as SAC without memory. See `troupe.common.agents.base.Agent`."""

    def __init__(self, config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self.fields = _bounded(self.fields, spec)

    @property
    def n_steps(self) -> int:
        """See the base class."""
        return self.config.n_steps

    def update(self, batch: Batch) -> Update:
        """One step on `[B]` items; new priorities are the critics' mean `|TD error|`."""
        learning = self._start_learning()
        transitions = self._transitions(batch.fields)
        loss, measured, errors = self._judged(transitions, self._to_device(batch.weights), learning)
        metrics = self._descend(loss, measured, learning, batch.measure)
        self._net.observe(transitions.obs)
        return Update(errors.abs().mean(0).double().cpu().numpy() + PRIORITY_FLOOR, metrics)

    def _judged(
        self, transitions: Transitions, weights: Tensor, learning: SoftLearning
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """See `SoftAgent._loss`."""
        shape = 2, len(transitions.obs), self.draws
        noise, next_noise = learning.noise(*shape).to(weights.device)
        targets = self._targets(transitions, next_noise, learning.target)
        return self._loss(self._net.encode(transitions.obs), transitions.action, targets, weights, noise)

    @torch.no_grad()
    def _targets(self, transitions: Transitions, noise: Tensor, target: SoftActorCritic) -> Tensor:
        """`r + discount V(s')` `[B]`."""
        following = transitions.next_obs
        seen = self._net.encode(following) if target.values is None else None
        value = self._value_after(target, target.encode(following), seen, noise)
        return transitions.reward + transitions.discount * value


class RecurrentSacAgent(StoresSequences[SacConfig, SoftActorCritic, SoftLearning], SoftAgent):
    """Acts, stores and learns as SAC with memory. See `troupe.common.agents.base.Agent` for the contracts."""

    def __init__(self, config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        super().__init__(config, spec, seed=seed, device=device)
        self._begin_storing()
        self.fields = _bounded(self.fields, spec)

    def update(self, batch: Batch) -> Update:
        """One step on `[B]` sequences; their new priorities mix maximum and mean of the critics' errors.

        All steps of a batch that are learned from count alike, so that losses are on the scale of those
        without memory.
        """
        learning = self._start_learning()
        sequences = self._sequences(batch.fields, batch.lengths)
        counts, burn_in = sequences.counts, self.config.burn_in_steps
        if not counts.any():  # what no accumulator makes
            return Update(np.full(len(batch.weights), PRIORITY_FLOOR), {})
        noise, next_noise = learning.noise(2, *counts.shape, self.draws).to(counts.device)
        features, _ = self._net.remember(*sequences.burned_in(self._net, burn_in))
        targets = self._targets(sequences, features.detach(), next_noise, learning.target)
        actions = sequences.last_action[burn_in + 1 :]
        importance = self._to_device(batch.weights).expand(counts.shape)
        steps = features[:-1], actions, targets, importance, noise
        loss, measured, errors = self._loss(*(part[counts] for part in steps))
        metrics = self._descend(loss, measured, learning, batch.measure)
        self._net.observe(sequences.obs[burn_in:-1][counts])
        sizes = torch.zeros_like(targets)
        sizes[counts] = errors.abs().mean(0)
        priorities = mixed_priorities(sizes, self.config.priority_eta, counts)
        return Update(priorities.double().cpu().numpy() + PRIORITY_FLOOR, metrics)

    @torch.no_grad()
    def _targets(self, sequences: Sequences, seen: Tensor, noise: Tensor, target: SoftActorCritic) -> Tensor:
        """n-step returns `[T, B]`, `seen` `[T + 1, B, F]` being features of the network that learns."""
        burn_in, shape = self.config.burn_in_steps, sequences.counts.shape
        by_target, _ = target.remember(*sequences.burned_in(target, burn_in))
        flat = (part.flatten(0, 1) for part in (by_target[1:], seen[1:], noise))
        values = self._value_after(target, *flat).unflatten(0, shape)
        discounts = self.config.gamma * (~sequences.terminated[burn_in + 1 :]).to(values.dtype)
        return self._value_targets(sequences.last_reward[burn_in + 1 :], discounts, values, sequences.goes_on)

    def _value_targets(self, rewards: Tensor, discounts: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
        return n_step_returns(rewards, discounts, values, goes_on, self.config.n_steps)


def _bounded(fields: tuple[FieldSpec, ...], spec: EnvSpec) -> tuple[FieldSpec, ...]:
    """`fields` with real numbers as tanh gives them: nothing is beyond."""
    if not spec.actions.reals:
        return fields
    return tuple(replace(each, bounds=(-1.0, 1.0)) if each.name == "action" else each for each in fields)


def make(
    config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu"
) -> SacAgent | RecurrentSacAgent:
    """What the registry calls."""
    kind = RecurrentSacAgent if config.lstm_units else SacAgent
    return kind(config, spec, seed=seed, device=device)
