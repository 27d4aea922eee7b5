"""Soft actor-critic: replay, and a policy of reward and entropy (Haarnoja et al. 2018, 2019).

Real numbers within bounds are drawn from normals squashed by tanh, and the policy follows the critics'
gradient through the action (Haarnoja et al. 2019, section 5). Of one choice the expectation over all values
is exact instead (Christodoulou 2019); of several choices it is exact for each, beside a draw of the others.
Without memory it learns from transitions; with memory from sequences with stored state and burn-in, as R2D2
does (Kapturowski et al. 2019).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from troupe.common.agents.base import Act, Batch, Inputs
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import NetworkAgent, Step
from troupe.common.agents.policies import drawn
from troupe.common.agents.soft import (
    distribution_of_actions,
    entropy_cost,
    found,
    learner_of,
    mean_q,
    mean_q_of_several,
    network_of,
)
from troupe.common.agents.stored.sequences import Sequences, StoredSequences
from troupe.common.agents.stored.transitions import StoredTransitions, Transitions, scaled
from troupe.common.config.fields import (
    NORMALIZE_REWARDS,
    POLICY_GAIN,
    SequenceAgentConfig,
    Units,
    UnitsOrNone,
    Widths,
    structural,
    tunable,
)
from troupe.common.errors import ConfigError
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl import policy
from troupe.common.rl.categorical import projected
from troupe.common.rl.distributions import Categorical, MultiCategorical, TanhNormal
from troupe.common.rl.normalizers import in_rewards
from troupe.common.rl.returns import explained_variance
from troupe.common.rl.sequences import mixed_priorities, n_step_returns

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


class SacConfig(SequenceAgentConfig):
    """Fields of `[agent]` for `algorithm = "sac"`; defaults are those of Haarnoja et al. 2019, table 1."""

    takes_any_action = True
    draws_actions = True
    several_learners = True

    algorithm: Literal["sac"] = structural("sac", "Soft actor-critic.")
    hidden_units: Units = structural(256, "Width of the layer after a pixel torso.")
    mlp_units: Widths = structural((256, 256), "Widths of the hidden layers of policy and critics, ReLU.")
    lstm_units: UnitsOrNone = structural(
        0, "Width of an LSTM shared by policy and critics; items are then sequences. 0 = no LSTM."
    )
    see_last_step: bool = structural(True, "Feed the last action and the clipped last reward to the LSTM.")
    normalize_vectors: bool = structural(
        False, "Normalise vectors by their running mean and standard deviation, clipped at 10."
    )
    normalize_rewards: bool = structural(False, NORMALIZE_REWARDS)
    policy_gain: float = structural(0.01, POLICY_GAIN, ge=0, le=100)
    layer_norm: bool = structural(False, "Layer normalisation in policy and critics, before each ReLU.")
    critics: int = structural(2, "Number of Q functions.", ge=1, le=64)
    critics_count: Literal["least", "mean"] = tunable(
        "least", "Which of their values to use: the minimum, against overestimation, or the mean."
    )
    atoms: int = structural(
        0,
        "Distributional critics (C51): number of atoms, evenly spaced from value_min to value_max "
        "(FastTD3: 101). For continuous actions, without memory. 0 = critics predict the mean.",
        ge=0,
        le=1024,
    )
    value_min: float = structural(
        -10.0,
        "With atoms: smallest value, in units of the reward learned from; lower values are clipped to it.",
    )
    value_max: float = structural(10.0, "With atoms: largest value.")
    bootstrap: Literal["q", "v"] = structural(
        "q",
        "Targets come from target critics (q), or from a target value function (v, Haarnoja et al. 2018).",
    )
    n_steps: int = structural(
        1, "Steps of reward before the bootstrap; entropies of the steps between do not count.", ge=1, le=255
    )
    gamma: float = structural(0.99, "Discount per step.", ge=0, le=1)
    deviation_floor: float = structural(
        1e-3, "Smallest standard deviation of an action before tanh, in halves of its range.", gt=0, lt=0.1
    )
    deviation_start: float = structural(
        1.0, "Initial standard deviation; 1 makes actions nearly uniform.", ge=0.1, le=10
    )
    tau: float = tunable(
        0.005, "Fraction of the network that each update mixes into the target network.", gt=0, le=1
    )
    target_update_period_updates: int = tunable(1, "Updates between updates of the target network.", ge=1)
    entropy_cost: float = tunable(
        1.0,
        "Temperature (alpha): weight of a nat of entropy, in units of the reward learned from; its "
        "initial value if it is adjusted.",
        ge=0,
    )
    adjust_entropy_cost: bool = structural(
        True, "Adjust the temperature so that the mean entropy is target_entropy."
    )
    target_entropy: float | None = tunable(
        None,
        "Target for the mean entropy, in nats, of actions in halves of their range; none = minus the number "
        "of components of a continuous action, or 0.98 of the logarithm of the number of discrete actions.",
    )
    entropy_cost_adjustment_speed: float = tunable(1.0, "Speed of that adjustment.", gt=0)
    learning_rate: float = tunable(3e-4, "Learning rate of Adam.", gt=0)
    policy_learning_rate: float | None = tunable(
        None, "Learning rate of the policy; none = learning_rate.", gt=0
    )
    optimizer_epsilon: float = tunable(1e-8, "Term added to Adam's denominator.", gt=0)
    compute_dtype: Literal["float32", "bfloat16"] = tunable(
        "float32",
        "Number format of the learner's products between hidden layers; weights, inputs and outputs are "
        "float32. bfloat16 speeds up batches of thousands on processors that support it natively.",
    )
    max_grad_norm: float = tunable(0.0, "Maximum global norm of the gradient; 0 = no clipping.", ge=0)
    eval_epsilon: float = tunable(
        0.0,
        "Probability that the evaluator samples from the policy instead of taking the greedy action.",
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _sequences_are_for_memory(self) -> SacConfig:
        # Refused because they are silent: somebody who sets burn-in without an LSTM would believe in a
        # memory.
        fields = [*SequenceAgentConfig.__annotations__, "lstm_layers", "see_last_step"]
        changed = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
        if changed and not self.lstm_units:
            raise ValueError(f"{changed[0]} has no effect without memory: set lstm_units too")
        return self

    @model_validator(mode="after")
    def _atoms_are_for_transitions(self) -> SacConfig:
        if not self.atoms:
            return self
        if self.atoms < 2 or self.value_min >= self.value_max:
            raise ValueError("atoms should be at least 2, and value_min less than value_max")
        if self.lstm_units or self.bootstrap == "v":
            raise ValueError('atoms are for critics without memory, with bootstrap = "q"')
        return self


class SacAgent(NetworkAgent):
    """Acts, stores and learns as SAC. See `troupe.common.agents.base.Agent` for the methods' contracts."""

    config: SacConfig
    net: SoftActorCritic

    def __init__(self, config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self.policy = distribution_of_actions(config, spec)
        super().__init__(config, spec, seed=seed, device=device)

    # ---------------------------------------------------------------- acting

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        features, memory = self._seen(inputs)
        params = self.net.policy(features)
        action = drawn(self.policy, params.cpu().numpy(), epsilon, rng)
        # The least of the critics, as in the targets (Fujimoto et al. 2018): initial priorities are errors
        # against these.
        taken = self.net.agreed(self.net.q_taken(features, self._to_device(action)))
        both = torch.stack([taken, self._value(features, params, taken)])
        taken_there, best = in_rewards(both, self.net.scale).cpu().numpy()
        return self._acted(action, {"value_taken": taken_there, "value_max": best}, inputs, memory)

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        features, memory = self.net.remember(*step.sequence())
        params = self.net.policy(features[0])
        return {"action": self.policy.best(params), "policy": params, "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """Reward and entropy to come, `[S]` float32 in the unit of rewards, after the most likely action."""
        features, _ = self._seen(inputs)
        params = self.net.policy(features)
        best = self._to_device(self.policy.mode(params.cpu().numpy()))
        value = self._value(features, params, self.net.agreed(self.net.q_taken(features, best)))
        return in_rewards(value, self.net.scale).cpu().numpy()

    def _seen(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One step of the network: features `[S, F]`, memory `[S, memory_size]`."""
        features, memory = self.net.remember(*self.step_of(inputs).sequence())
        return features[0], memory

    def _value(self, features: Tensor, params: Tensor, q: Tensor) -> Tensor:
        """The soft value `[S]`, of real numbers with `q` of one action in the place of the mean over all."""
        # The mean over all actions is known here, so it replaces the Q of the one that was taken.
        if self.spec.actions.count:
            q = mean_q(self.net, features, params)
        return q + self.net.entropy_cost.value().to(q.device) * self.policy.entropy(params)

    # -------------------------------------------------------------- learning

    def told(self, batch: Batch) -> dict[str, Tensor | np.ndarray]:
        """See the base class."""
        stored, told, rows = self.stored, {**batch.fields, "weights": batch.weights}, len(batch.weights)
        if not isinstance(stored, StoredSequences):
            return told | {"noise": self._noise(2, rows, self.draws)}
        told |= stored.aligned(batch.fields, batch.lengths)
        steps = len(told["entries"]) - self.config.burn_in_steps - 1
        # For the most steps there can be: learners draw alike, however long their own items are.
        noise = self._noise(2, self.config.sequence_steps, rows, self.draws)
        return told | {"noise": noise[:, :steps]}

    def learn(self, told: dict[str, Tensor], *, measure: bool) -> dict[str, Tensor]:
        """One step on `[B]` items; new priorities are of the critics' mean `|TD error|`."""
        if isinstance(self.stored, StoredSequences):
            return self._learn_from_sequences(self.stored.read(told), told, measure)
        transitions = scaled(self.stored.read(told), self.net.scale)
        loss, measured, errors = self._judged(transitions, told["weights"], told["noise"], measure)
        measured["grad_norm"] = self.learner.step(loss)
        self.net.observe(transitions.obs)
        sizes = in_rewards(errors.abs().mean(0), self.net.scale)
        return found(sizes, measured if measure else {})

    @property
    def no_graph_because(self) -> str:
        """See the base class."""
        return "SAC with memory picks the steps that count" if self.memory_size else ""

    def _judged(
        self, transitions: Transitions, weights: Tensor, noise: Tensor, measure: bool = True
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """See `_loss`; the noise `[2, B, draws]` is for the steps' own actions, and for those after."""
        now, after = noise
        targets = self._targets(transitions, after)
        seen = self.net.encode(transitions.obs)
        return self._loss(seen, transitions.action, targets, weights, now, measure=measure)

    @torch.no_grad()
    def _targets(self, transitions: Transitions, noise: Tensor) -> Tensor:
        """`r + discount V(s')` `[B]`; with atoms the chances of that, `[B, atoms]`."""
        following, target = transitions.next_obs, self.learner.target
        seen = self.net.encode(following) if target.values is None else None
        if self.net.categorical:
            assert seen is not None
            return self._target_chances(transitions, seen, target.encode(following), noise)
        value = self._value_after(target, target.encode(following), seen, noise)
        return transitions.reward + transitions.discount * value

    def _target_chances(
        self, transitions: Transitions, seen: Tensor, seen_by_target: Tensor, noise: Tensor
    ) -> Tensor:
        """Chances `[B, atoms]` of reward and soft return after an action that is drawn."""
        config, target = self.config, self.learner.target
        assert isinstance(self.policy, TanhNormal)
        action, log_prob = self.policy.reparametrized(self.net.policy(seen), noise)
        after = target.places - self._cost * log_prob[:, None]
        values = transitions.reward[:, None] + transitions.discount[:, None] * after
        chances = target.agreed_chances(seen_by_target, action)
        return projected(values, chances, config.value_min, config.value_max)

    def _learn_from_sequences(
        self, sequences: Sequences, told: dict[str, Tensor], measure: bool
    ) -> dict[str, Tensor]:
        """One step on `[B]` sequences; their new priorities mix maximum and mean of the critics' errors.

        All steps of a batch that are learned from count alike, so that losses are on the scale of those
        without memory.
        """
        counts, burn_in, learner = sequences.counts, self.config.burn_in_steps, self.learner
        # What no accumulator makes; of several learners one alone must not stay away.
        if learner.reduction.alone and not counts.any():
            return found(torch.zeros(counts.shape[1]), {})
        sequences.observe_rewards(self.net.scale, burn_in, self.config.gamma)
        noise, next_noise = told["noise"]
        features, _ = self.net.remember(*sequences.burned_in(self.net, burn_in))
        targets = self._sequence_targets(sequences, features.detach(), next_noise, learner.target)
        actions = sequences.last_action[burn_in + 1 :]
        importance = told["weights"].expand(counts.shape)
        # Only the steps that count are judged: critics and policy are the expensive part.
        steps = features[:-1], actions, targets, importance, noise
        loss, measured, errors = self._loss(*(part[counts] for part in steps), measure=measure)
        # All steps count alike, and shares differ in them. Of none there is nothing to measure.
        steps_learned = int(counts.sum())
        measured["grad_norm"] = learner.step(loss, steps_learned)
        self.net.observe(sequences.obs[burn_in:-1][counts])
        sizes = torch.zeros_like(targets)
        sizes[counts] = in_rewards(errors.abs().mean(0), self.net.scale)
        priorities = mixed_priorities(sizes, self.config.priority_eta, counts)
        return found(priorities, measured if measure and steps_learned else {})

    @torch.no_grad()
    def _sequence_targets(
        self, sequences: Sequences, seen: Tensor, noise: Tensor, target: SoftActorCritic
    ) -> Tensor:
        """n-step returns `[T, B]`, `seen` `[T + 1, B, F]` being features of the network that learns."""
        burn_in, shape = self.config.burn_in_steps, sequences.counts.shape
        by_target, _ = target.remember(*sequences.burned_in(target, burn_in))
        flat = (part.flatten(0, 1) for part in (by_target[1:], seen[1:], noise))
        values = self._value_after(target, *flat).unflatten(0, shape)
        rewards, discounts = sequences.outcomes(burn_in, self.config.gamma)
        rewards = rewards if self.net.scale is None else self.net.scale(rewards)
        return self._value_targets(rewards, discounts, values, sequences.goes_on)

    def _value_targets(self, rewards: Tensor, discounts: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
        return n_step_returns(rewards, discounts, values, goes_on, self.config.n_steps)

    def _loss(
        self,
        features: Tensor,
        action: Tensor,
        targets: Tensor,
        weights: Tensor,
        noise: Tensor,
        *,
        measure: bool = True,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """One loss for everything: no gradient crosses from one part to another. Errors are `[n, M]`.

        Args:
            features: `[M, F]`, what the network makes of the observations.
            action: `[M, ...]`, what was done at them.
            targets: `[M]`, what its Q should be, or `[M, atoms]`.
            weights: `[M]`, importance.
            noise: `[M, draws]`, of a standard normal, for the policy's own actions.
            measure: whether there are scalars for the log.
        """
        net, cost = self.net, self._cost
        # Detached: the policy's gradient would teach the shared torso to please the policy, at the cost of
        # what the critics see (Yarats et al. 2021, on SAC from pixels).
        params = net.policy(features.detach())
        # The policy follows the gradient through the critics to the action, and must not change them: without
        # this it would raise their values.
        with net.critics_fixed():
            value, entropy = self._soft_value(net, features.detach(), params, noise)
        policy_loss = -(weights * value).mean()
        losses, targets, errors = self._critic_losses(features, action, targets)
        # The sum over critics, not the mean: each learns at the same speed, however many there are.
        critic_loss = (weights * losses).mean(1).sum()
        # One backward pass for all: neither policy, critics nor cost get a gradient from another's term.
        loss = policy_loss + critic_loss + net.entropy_cost.adjustment(entropy.mean())
        if net.values is not None:
            loss = loss + 0.5 * (weights * (value.detach() - net.value(features)).square()).mean()
        if not measure:
            return loss, {}, errors.detach()
        measured = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "entropy": entropy.mean(),
            "entropy_cost": cost,
            "q_mean": in_rewards((targets - errors).mean(), net.scale),
            "explained_variance": explained_variance(errors.mean(0), targets),
            "td_error_mean": errors.abs().mean(),
        }
        return loss, measured, errors.detach()

    def _critic_losses(
        self, features: Tensor, action: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses `[n, M]` of critics, means of targets `[M]`, and errors `[n, M]` of the critics' means."""
        net = self.net
        if not net.categorical:
            errors = targets - self.net.q_taken(features, action)
            return 0.5 * errors.square(), targets, errors
        said, means = net.said(features, action), targets @ net.places
        losses = -(targets * said.log_softmax(-1)).sum(-1)
        return losses, means, means - said.detach().softmax(-1) @ net.places

    def _value_after(
        self, target: SoftActorCritic, seen_by_target: Tensor, seen: Tensor | None, noise: Tensor
    ) -> Tensor:
        """The targets' V `[M]` (Haarnoja et al. 2019, equations 3 and 5; of 2018 with a value function).

        `seen` are features of the network that learns, for its policy; nothing looks at them where there is a
        value function.
        """
        if target.values is not None:
            return target.value(seen_by_target)
        assert seen is not None
        return self._soft_value(target, seen_by_target, self.net.policy(seen), noise)[0]

    def _soft_value(
        self, critics: SoftActorCritic, features: Tensor, params: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`E_a[min Q(s, a) - cost log pi(a|s)]` and the entropy, `[B]`: exact, or of one action drawn.

        Of several choices the entropy is exact; see `mean_q_of_several`.
        """
        cost = self._cost
        if isinstance(self.policy, Categorical):
            entropy = policy.entropy(params)
            return mean_q(critics, features, params) + cost * entropy, entropy
        if isinstance(self.policy, MultiCategorical):
            entropy = self.policy.entropy(params)
            return mean_q_of_several(critics, features, self.policy, params, noise) + cost * entropy, entropy
        action, log_prob = self.policy.reparametrized(params, noise)
        return critics.agreed(critics.q(features, action)) - cost * log_prob, -log_prob

    def _noise(self, *shape: int) -> Tensor:
        """Draws of a standard normal, which a resumed run repeats."""
        # On the CPU, then moved: a CUDA generator draws others, and a checkpoint would not go on elsewhere.
        return self.learner.reduction.drawn(self.learner.generator, shape, normal=True)

    # ----------------------------------------------------------------- parts

    @property
    def draws(self) -> int:
        """Draws of a standard normal that one action of the policy takes where learning draws it."""
        return 0 if self.spec.actions.count else self.spec.actions.encoded_size

    @property
    def _cost(self) -> Tensor:
        """What a nat of entropy is worth now."""
        return self.net.entropy_cost.value().detach()

    def _network(self) -> SoftActorCritic:
        config, spec = self.config, self.spec
        if config.atoms and not spec.actions.reals:
            raise ConfigError(f"agent.atoms are for actions of real numbers; that of {spec.id} is a choice")
        return network_of(
            config,
            spec,
            self.policy.size,
            values=config.bootstrap == "v",
            lstm_units=config.lstm_units,
            lstm_layers=config.lstm_layers,
            see_last_step=config.see_last_step,
            entropy_cost=entropy_cost(config, spec),
            places=(config.value_min, config.value_max, config.atoms) if config.atoms else None,
            mean_counts=config.critics_count == "mean",
        )

    @cached_property
    def stored(self) -> StoredTransitions | StoredSequences:
        """See the base class: sequences where the network has memory."""
        config, spec = self.config, self.spec
        bounds = (-1.0, 1.0) if spec.actions.reals else None  # as tanh gives them: nothing is beyond
        if not config.lstm_units:
            return StoredTransitions(spec, config.n_steps, config.gamma, self.device, bounds)
        return StoredSequences(
            config, spec, self.net.state_size, config.gamma, self._value_targets, self.device, bounds
        )

    @cached_property
    def learner(self) -> TargetLearner[SoftActorCritic]:
        """See the base class; nothing is asked of the target's policy."""
        config, net = self.config, self.net
        if config.compute_dtype == "bfloat16":
            net.compute_in_bfloat16()  # before the target network becomes a copy
        period = config.target_update_period_updates
        return learner_of(net, config, self.seed, period_updates=period)


make = SacAgent
"""What the registry calls."""
