"""Soft actor-critic: replayed transitions, a policy of reward and entropy (Haarnoja et al. 2018, 2019).

Real numbers within bounds are drawn from normals squashed by tanh, and the policy follows the critics'
gradient through the action (Haarnoja et al. 2019, section 5). Of several actions the expectation over all of
them is exact instead (Christodoulou 2019).
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from common.agents.base import Act, Inputs, Update
from common.agents.fitting import network_inputs, suited
from common.agents.network import Learning, Step
from common.agents.tensors import below, module_arrays, prefixed, tensors
from common.agents.transitions import StoresTransitions, Transitions
from common.config.fields import PixelAgentConfig, Units, Widths, structural, tunable
from common.data.accumulator import PRIORITY_FLOOR
from common.errors import ConfigError
from common.nets.soft_actor_critic import SoftActorCritic
from common.rl import policy
from common.rl.distributions import Categorical, TanhNormal
from common.rl.policy_losses import Multiplier

if TYPE_CHECKING:
    from common.envs import EnvSpec

DISCRETE_SHARE = 0.98
"""Of the largest entropy over several actions: the target (Christodoulou 2019, section 5)."""


class SacConfig(PixelAgentConfig):
    """Fields of `[agent]` for `algorithm = "sac"`; defaults are those of Haarnoja et al. 2019, table 1."""

    takes_any_action = True

    algorithm: Literal["sac"] = structural("sac", "Soft actor-critic.")
    torso: Literal["auto", "nature", "small", "mlp"] = structural(
        "auto",
        "Before policy and critics: `nature` or `small` convolutions for pixels, shared by all; nothing "
        "(`mlp`) for vectors; `auto` takes `nature` or `mlp` by the observation.",
    )
    hidden_units: Units = structural(256, "Width of the layer on top of a pixel torso.")
    mlp_units: Widths = structural((256, 256), "Widths of the hidden layers of policy and critics, ReLU.")
    normalize_vectors: bool = structural(
        False, "The network sees vectors minus their running mean, divided by their deviation, clipped at 10."
    )
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


class SacAgent(StoresTransitions[SacConfig, SoftActorCritic, "_Learning"]):
    """Acts, stores and learns as SAC. See `common.agents.base.Agent` for the methods' contracts."""

    def __init__(self, config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self._policy = _distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)
        if spec.actions.reals:  # tanh leaves nothing beyond
            self.fields = tuple(
                replace(field, bounds=(-1.0, 1.0)) if field.name == "action" else field
                for field in self.fields
            )

    @property
    def n_steps(self) -> int:
        """See the base class."""
        return self.config.n_steps

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Every slot draws from the policy: its entropy is the exploration."""
        return np.ones(len(indices), np.float32)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        features = self._net.encode(self._to_device(inputs.obs))
        params = self._net.policy(features)
        rows = params.cpu().numpy()
        action = self._policy.sample(rows, rng)
        best = rng.random(len(rows)) >= epsilon
        if best.any():
            action[best] = self._policy.mode(rows[best])
        taken = self._q_taken(features, self._to_device(action)).amin(0)
        value = self._value(features, params, taken)
        return Act(action, {"value_taken": taken.cpu().numpy(), "value_max": value.cpu().numpy()})

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        params = self._net.policy(self._net.encode(step.obs))
        return {"action": self._policy.best(params), "policy": params}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """Reward and entropy to come, `[S]` float32, from the policy's most likely action on."""
        features = self._net.encode(self._to_device(inputs.obs))
        params = self._net.policy(features)
        best = self._to_device(self._policy.mode(params.cpu().numpy()))
        return self._value(features, params, self._q_taken(features, best).amin(0)).cpu().numpy()

    def _value(self, features: Tensor, params: Tensor, q: Tensor) -> Tensor:
        """The soft value `[S]`, of real numbers with `q` of one action in the place of the mean over all."""
        if self.spec.actions.count:
            q = (params.softmax(1) * self._net.q(features).amin(0)).sum(1)
        return q + self._net.entropy_cost.value().to(q.device) * self._policy.entropy(params)

    # -------------------------------------------------------------- learning

    def update(
        self,
        batch: dict[str, np.ndarray],
        weights: np.ndarray,
        want_metrics: bool = True,
        progress: float = 0.0,
        lengths: np.ndarray | None = None,
    ) -> Update:
        """One step on `[B]` items; new priorities are the critics' mean `|TD error|`."""
        learning = self._start_learning()
        transitions = self._transitions(batch)
        loss, measured, errors = self._loss(transitions, self._to_device(weights), learning)
        norm = learning.step(loss)
        self._net.observe(transitions.obs)
        metrics: dict[str, float] = {}
        if want_metrics:
            metrics = {f"learner/{name}": value.item() for name, value in measured.items()}
            metrics["learner/grad_norm"] = norm.item()
        return Update(errors.abs().mean(0).double().cpu().numpy() + PRIORITY_FLOOR, metrics)

    def _loss(
        self, transitions: Transitions, weights: Tensor, learning: _Learning
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """One loss for everything: no gradient crosses from one part to another. Errors are `[n, B]`."""
        net, cost = self._net, self._net.entropy_cost.value().detach()
        shape = 2, len(transitions.obs), self.spec.actions.reals
        now_noise, next_noise = learning.noise(*shape).to(weights.device)
        features = net.encode(transitions.obs)
        params = net.policy(features.detach())
        with net.critics_fixed():
            value, entropy = self._soft_value(net, features.detach(), params, now_noise, cost)
        policy_loss = -(weights * value).mean()
        targets = self._targets(transitions, next_noise, learning.target, cost)
        errors = targets - self._q_taken(features, transitions.action)
        critic_loss = 0.5 * (weights * errors.square()).mean(1).sum()
        loss = policy_loss + critic_loss + net.entropy_cost.adjustment(entropy.mean())
        if net.values is not None:
            loss = loss + 0.5 * (weights * (value.detach() - net.value(features)).square()).mean()
        measured = {
            "loss": loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "entropy": entropy.mean(),
            "entropy_cost": cost,
            "q_mean": (targets - errors).mean(),
            "td_error_mean": errors.abs().mean(),
        }
        return loss, measured, errors.detach()

    def _q_taken(self, features: Tensor, actions: Tensor) -> Tensor:
        """Each critic's Q `[n, B]` of actions `[B, ...]`."""
        if not self.spec.actions.count:
            return self._net.q(features, actions)
        q = self._net.q(features)
        return q.gather(2, actions[:, None].expand(len(q), -1, -1)).squeeze(2)

    @torch.no_grad()
    def _targets(
        self, transitions: Transitions, noise: Tensor, target: SoftActorCritic, cost: Tensor
    ) -> Tensor:
        """`r + discount V(s')` `[B]` (Haarnoja et al. 2019, equations 3 and 5; of 2018 with values)."""
        features = target.encode(transitions.next_obs)
        if target.values is not None:
            value = target.value(features)
        else:
            params = self._net.policy(self._net.encode(transitions.next_obs))
            value, _ = self._soft_value(target, features, params, noise, cost)
        return transitions.reward + transitions.discount * value

    def _soft_value(
        self, critics: SoftActorCritic, features: Tensor, params: Tensor, noise: Tensor, cost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`E_a[min Q(s, a) - cost log pi(a|s)]` and the entropy, `[B]`: exact, or of one action drawn."""
        if self.spec.actions.count:
            entropy = policy.entropy(params)
            q = (params.softmax(1) * critics.q(features).amin(0)).sum(1)
            return q + cost * entropy, entropy
        assert isinstance(self._policy, TanhNormal)
        action, log_prob = self._policy.reparametrized(params, noise)
        return critics.q(features, action).amin(0) - cost * log_prob, -log_prob

    # --------------------------------------------------------------- helpers

    def _network(self) -> SoftActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> SoftActorCritic:
            return SoftActorCritic(
                *(spec.obs_shape, spec.actions, torso),
                policy_size=self._policy.size,
                critics=config.critics,
                values=config.bootstrap == "v",
                hidden_units=config.hidden_units,
                mlp_units=config.mlp_units,
                inputs=network_inputs(config, spec, vectors=config.normalize_vectors),
                entropy_cost=_entropy_cost(config, spec),
            )

        return suited(config.torso, "nature", spec, make)

    def _make_learning(self) -> _Learning:
        return _Learning(self.config, self._net, self._seed)


class _Learning(Learning):
    """Adds the target network, of whose policy nothing is asked, and what is drawn."""

    def __init__(self, config: SacConfig, net: SoftActorCritic, seed: int) -> None:
        policy_rate = config.policy_learning_rate or config.learning_rate
        own = {id(each) for each in net.policy.parameters()}
        groups: list[dict[str, Any]] = [
            {"params": [each for each in net.parameters() if id(each) not in own]},
            {"params": list(net.policy.parameters()), "lr": policy_rate},
        ]
        optimizer = torch.optim.Adam(
            groups, lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True
        )
        super().__init__(net, optimizer, config.max_grad_norm)
        self.target = copy.deepcopy(net).requires_grad_(False)
        self._generator = torch.Generator().manual_seed(seed)
        self._tau, self._period = config.tau, config.target_update_period_updates

    def noise(self, *shape: int) -> Tensor:
        """Draws of a standard normal."""
        return torch.randn(shape, generator=self._generator)

    @torch.no_grad()
    def step(self, loss: Tensor) -> Tensor:
        """See `Learning`; moves the target network a little towards the network when it is time to."""
        with torch.enable_grad():
            norm = super().step(loss)
        if self.updates % self._period == 0:
            torch._foreach_lerp_(list(self.target.parameters()), list(self._net.parameters()), self._tau)
            for held, own in zip(self.target.buffers(), self._net.buffers(), strict=True):
                held.copy_(own)  # statistics of inputs: what the weights are used with
        return norm

    def arrays(self) -> dict[str, np.ndarray]:
        """See `Learning`."""
        noise = self._generator.get_state().numpy().copy()
        return prefixed("target/", module_arrays(self.target)) | {"noise": noise}

    def load_arrays(self, arrays: dict[str, np.ndarray]) -> None:
        """See `Learning`."""
        self.target.load_state_dict(tensors(below("target/", arrays)))
        self._generator.set_state(torch.from_numpy(arrays["noise"].copy()))


def _distribution(config: SacConfig, spec: EnvSpec) -> Categorical | TanhNormal:
    """Over the actions; ConfigError where they are neither one of several nor real numbers with bounds."""
    actions = spec.actions
    if actions.count:
        return Categorical(actions.count)
    if actions.choices or not all(actions.bounded):
        raise ConfigError(
            "sac needs an action that is one choice of several, or real numbers with two bounds each, that "
            f"of {spec.id} is {actions}: take --agent.algorithm policy_gradient"
        )
    return TanhNormal(actions.reals, "softplus", config.deviation_floor, config.deviation_start)


def _entropy_cost(config: SacConfig, spec: EnvSpec) -> Multiplier:
    target: float | None = None
    if config.adjust_entropy_cost:
        target = config.target_entropy
        if target is None:
            count = spec.actions.count
            target = DISCRETE_SHARE * math.log(count) if count else -float(spec.actions.reals)
    speed = config.entropy_cost_adjustment_speed
    return Multiplier(config.entropy_cost, target, at_most=False, speed=speed)


make = SacAgent
"""What the registry calls."""
