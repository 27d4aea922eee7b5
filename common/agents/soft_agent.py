"""What SAC's agents share, with memory or without: the policy, the critics, and their losses."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from troupe.common.agents.base import Act, Inputs
from troupe.common.agents.fitting import network_inputs, suited
from troupe.common.agents.network import Learning, NetworkAgent, Step
from troupe.common.agents.tensors import below, module_arrays, prefixed, tensors
from troupe.common.errors import ConfigError
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl import policy
from troupe.common.rl.distributions import Categorical, MultiCategorical, TanhNormal
from troupe.common.rl.policy_losses import Multiplier

if TYPE_CHECKING:
    from troupe.common.agents.sac import SacConfig
    from troupe.common.envs import EnvSpec

DISCRETE_SHARE = 0.98
"""Of the largest entropy over several actions: the target (Christodoulou 2019, section 5)."""


class SoftAgent(NetworkAgent["SacConfig", SoftActorCritic, "SoftLearning"]):
    """All of an `Agent` but what it stores, and how that is read; see there."""

    def __init__(self, config: SacConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> None:
        self._policy = _distribution(config, spec)
        super().__init__(config, spec, seed=seed, device=device)

    # ---------------------------------------------------------------- acting

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        """Every slot draws from the policy: its entropy is the exploration."""
        return np.ones(len(indices), np.float32)

    @torch.inference_mode()
    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        """Actions drawn from the policy with chance `epsilon`, else its most likely ones."""
        features, memory = self._seen(inputs)
        params = self._net.policy(features)
        rows = params.cpu().numpy()
        action = self._policy.sample(rows, rng)
        best = rng.random(len(rows)) >= epsilon
        if best.any():
            action[best] = self._policy.mode(rows[best])
        taken = self._q_taken(features, self._to_device(action)).amin(0)
        value = self._value(features, params, taken)
        extras = {"value_taken": taken.cpu().numpy(), "value_max": value.cpu().numpy()}
        if not self._net.state_size:
            return Act(action, extras)
        return Act(action, extras | {"memory": inputs.memory}, memory.cpu().numpy())

    def decide(self, step: Step) -> dict[str, Tensor]:
        """See the base class."""
        features, memory = self._net.remember(*step.sequence())
        params = self._net.policy(features[0])
        return {"action": self._policy.best(params), "policy": params, "next_memory": memory}

    @torch.inference_mode()
    def values(self, inputs: Inputs) -> np.ndarray:
        """Reward and entropy to come, `[S]` float32, from the policy's most likely action on."""
        features, _ = self._seen(inputs)
        params = self._net.policy(features)
        best = self._to_device(self._policy.mode(params.cpu().numpy()))
        return self._value(features, params, self._q_taken(features, best).amin(0)).cpu().numpy()

    def _seen(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """One step of the network: features `[S, F]`, memory `[S, memory_size]`."""
        arrays = inputs.obs, inputs.last_action, inputs.last_reward, inputs.first, inputs.memory
        features, memory = self._net.remember(*Step(*map(self._to_device, arrays)).sequence())
        return features[0], memory

    def _value(self, features: Tensor, params: Tensor, q: Tensor) -> Tensor:
        """The soft value `[S]`, of real numbers with `q` of one action in the place of the mean over all."""
        if self.spec.actions.count:
            q = _mean_q(self._net, features, params)
        return q + self._net.entropy_cost.value().to(q.device) * self._policy.entropy(params)

    # -------------------------------------------------------------- learning

    def _loss(
        self, features: Tensor, action: Tensor, targets: Tensor, weights: Tensor, noise: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """One loss for everything: no gradient crosses from one part to another. Errors are `[n, M]`.

        Args:
          features: `[M, F]`, what the network makes of the observations.
          action: `[M, ...]`, what was done at them.
          targets: `[M]`, what its Q should be.
          weights: `[M]`, importance.
          noise: `[M, draws]`, of a standard normal, for the policy's own actions.
        """
        net, cost = self._net, self._cost
        params = net.policy(features.detach())
        with net.critics_fixed():
            value, entropy = self._soft_value(net, features.detach(), params, noise)
        policy_loss = -(weights * value).mean()
        errors = targets - self._q_taken(features, action)
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

    def _descend(
        self, loss: Tensor, measured: dict[str, Tensor], learning: SoftLearning, measure: bool
    ) -> dict[str, float]:
        """One step down the gradient; what was measured, if it is wanted."""
        norm = learning.step(loss)
        if not measure:
            return {}
        return {f"learner/{name}": value.item() for name, value in (measured | {"grad_norm": norm}).items()}

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
        return self._soft_value(target, seen_by_target, self._net.policy(seen), noise)[0]

    def _q_taken(self, features: Tensor, actions: Tensor) -> Tensor:
        """Each critic's Q `[n, B]` of actions `[B, ...]`."""
        if not self.spec.actions.count:
            return self._net.q(features, actions)
        q = self._net.q(features)
        return q.gather(2, actions[:, None].expand(len(q), -1, -1)).squeeze(2)

    def _soft_value(
        self, critics: SoftActorCritic, features: Tensor, params: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`E_a[min Q(s, a) - cost log pi(a|s)]` and the entropy, `[B]`: exact, or of one action drawn.

        Of several choices the entropy is exact; see `_mean_q_of_several`.
        """
        cost = self._cost
        if isinstance(self._policy, Categorical):
            entropy = policy.entropy(params)
            return _mean_q(critics, features, params) + cost * entropy, entropy
        if isinstance(self._policy, MultiCategorical):
            entropy = self._policy.entropy(params)
            return _mean_q_of_several(
                critics, features, self._policy, params, noise
            ) + cost * entropy, entropy
        action, log_prob = self._policy.reparametrized(params, noise)
        return critics.q(features, action).amin(0) - cost * log_prob, -log_prob

    # --------------------------------------------------------------- helpers

    @property
    def draws(self) -> int:
        """Draws of a standard normal that one action of the policy takes where learning draws it."""
        return 0 if self.spec.actions.count else self.spec.actions.encoded_size

    @property
    def _cost(self) -> Tensor:
        """What a nat of entropy is worth now."""
        return self._net.entropy_cost.value().detach()

    def _network(self) -> SoftActorCritic:
        config, spec = self.config, self.spec

        def make(torso: str) -> SoftActorCritic:
            return SoftActorCritic(
                *(spec.seen_shape, spec.actions, torso),
                policy_size=self._policy.size,
                critics=config.critics,
                values=config.bootstrap == "v",
                hidden_units=config.hidden_units,
                mlp_units=config.mlp_units,
                lstm_units=config.lstm_units,
                lstm_layers=config.lstm_layers,
                see_last_step=config.see_last_step,
                inputs=network_inputs(config, spec, vectors=config.normalize_vectors),
                entropy_cost=_entropy_cost(config, spec),
            )

        return suited(config, spec, make)

    def _make_learning(self) -> SoftLearning:
        return SoftLearning(self.config, self._net, self._seed)


class SoftLearning(Learning):
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


def _mean_q(critics: SoftActorCritic, features: Tensor, params: Tensor) -> Tensor:
    """The mean Q `[B]` of one choice of several, each the least that a critic says, drawn from a policy."""
    return (params.softmax(1) * critics.q(features).amin(0)).sum(1)


def _mean_q_of_several(
    critics: SoftActorCritic, features: Tensor, policy: MultiCategorical, params: Tensor, noise: Tensor
) -> Tensor:
    """An unbiased estimate of the mean Q `[B]` of several choices, and of its gradient by `params`.

    An action is drawn. Of each number all values are tried beside the others as they were drawn, so that its
    expectation is exact (Titsias & Lazaro-Gredilla 2015). Each of these is the mean Q; the gradients add up.
    """
    actions = policy.drawn(params.detach(), noise)
    means = []
    for number, chances in enumerate(policy.chances(params)):
        count = chances.shape[1]
        tried = actions.repeat_interleave(count, dim=0)
        tried[:, number] = torch.arange(count, device=tried.device).repeat(len(actions))
        with torch.no_grad():
            q = critics.q(features.repeat_interleave(count, dim=0), tried).amin(0)
        means.append((chances * q.unflatten(0, chances.shape)).sum(1))
    each = torch.stack(means)
    return each.detach().mean(0) + (each - each.detach()).sum(0)


def _distribution(config: SacConfig, spec: EnvSpec) -> Categorical | MultiCategorical | TanhNormal:
    """Over the actions; ConfigError where they are neither choices nor real numbers with bounds."""
    actions = spec.actions
    if actions.count:
        return Categorical(actions.count)
    if not actions.reals:
        return MultiCategorical(actions.choices)
    if actions.choices or not all(actions.bounded):
        raise ConfigError(
            "sac needs an action of choices, or of real numbers with two bounds each; that "
            f"of {spec.id} is {actions}: take --agent.algorithm policy_gradient"
        )
    return TanhNormal(actions.reals, "softplus", config.deviation_floor, config.deviation_start)


def _entropy_cost(config: SacConfig, spec: EnvSpec) -> Multiplier:
    target: float | None = None
    if config.adjust_entropy_cost:
        target = config.target_entropy
        if target is None:
            choices = spec.actions.choices
            target = DISCRETE_SHARE * sum(map(math.log, choices)) if choices else -float(spec.actions.reals)
    speed = config.entropy_cost_adjustment_speed
    return Multiplier(config.entropy_cost, target, at_most=False, speed=speed)
