"""What agents with a policy beside critics share: policies, entropy's weight, mean Q, network, learner."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from troupe.common.agents.learners.optimizers import Adam
from troupe.common.agents.learners.target import TargetLearner
from troupe.common.agents.network import network_inputs, suited
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.errors import ConfigError
from troupe.common.nets.soft_actor_critic import SoftActorCritic
from troupe.common.rl.distributions import Categorical, MultiCategorical, TanhNormal
from troupe.common.rl.normalizers import ReturnScale
from troupe.common.rl.policy_losses import Multiplier

if TYPE_CHECKING:
    from troupe.common.agents.offline import OfflineConfig
    from troupe.common.agents.sac import SacConfig
    from troupe.common.envs import EnvSpec

DISCRETE_SHARE = 0.98
"""Of the largest entropy over several actions: the target (Christodoulou 2019, section 5)."""


def mean_q(critics: SoftActorCritic, features: Tensor, params: Tensor) -> Tensor:
    """The mean Q `[B]` of one choice of several, each the least that a critic says, drawn from a policy."""
    return (params.softmax(1) * critics.agreed(critics.q(features))).sum(1)


def mean_q_of_several(
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
        # Only the chances need a gradient: the critics of up to thousands of tried actions do not.
        with torch.no_grad():
            q = critics.agreed(critics.q(features.repeat_interleave(count, dim=0), tried))
        means.append((chances * q.unflatten(0, chances.shape)).sum(1))
    each = torch.stack(means)
    # The value of one part, the gradient of the other: `each - each.detach()` is 0 with a gradient.
    return each.detach().mean(0) + (each - each.detach()).sum(0)


def distribution_of_actions(config: SacConfig, spec: EnvSpec) -> Categorical | MultiCategorical | TanhNormal:
    """Of the policy; ConfigError where actions are neither choices nor real numbers with bounds."""
    actions = spec.actions
    if actions.count:
        return Categorical(actions.count)
    if not actions.reals:
        return MultiCategorical(actions.choices)
    # Tanh needs two bounds; beside choices the reparametrised gradient reaches only a part of the action.
    if actions.choices or not all(actions.bounded):
        raise ConfigError(
            "sac needs an action of choices, or of real numbers with two bounds each; that "
            f"of {spec.id} is {actions}: take --agent.algorithm policy_gradient"
        )
    return TanhNormal(actions.reals, "softplus", config.deviation_floor, config.deviation_start)


def entropy_cost(config: SacConfig, spec: EnvSpec) -> Multiplier:
    """The weight of the entropy: fixed, or adjusted to the target that is configured or published."""
    target: float | None = None
    if config.adjust_entropy_cost:
        target = config.target_entropy
        if target is None:
            choices = spec.actions.choices
            # Minus the number of reals is the paper's target for continuous actions.
            target = DISCRETE_SHARE * sum(map(math.log, choices)) if choices else -float(spec.actions.reals)
    speed = config.entropy_cost_adjustment_speed
    return Multiplier(config.entropy_cost, target, at_most=False, speed=speed)


def network_of(
    config: SacConfig | OfflineConfig, spec: EnvSpec, policy_size: int, **own: Any
) -> SoftActorCritic:
    """A new network; `own` are the arguments of `SoftActorCritic` that not all algorithms have fields for."""

    def make(torso: str) -> SoftActorCritic:
        return SoftActorCritic(
            spec.seen_shape,
            spec.actions,
            torso,
            policy_size=policy_size,
            critics=config.critics,
            hidden_units=config.hidden_units,
            mlp_units=config.mlp_units,
            inputs=network_inputs(config, spec, vectors=config.normalize_vectors),
            scale=ReturnScale() if config.normalize_rewards else None,
            layer_norm=config.layer_norm,
            **own,
        )

    return suited(config, spec, make)


def learner_of(
    net: SoftActorCritic, config: SacConfig | OfflineConfig, seed: int, *, period_updates: int
) -> TargetLearner[SoftActorCritic]:
    """Adam, with a rate of its own for the policy, and a target that moves each `period_updates`."""
    # By identity: tensors compare by elements.
    of_policy = {id(each) for each in net.policy.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [each for each in net.parameters() if id(each) not in of_policy]},
        {"params": list(net.policy.parameters()), "lr": config.policy_learning_rate or config.learning_rate},
    ]
    optimizer = Adam(groups, lr=config.learning_rate, eps=config.optimizer_epsilon, fused=True)
    return TargetLearner(
        net,
        optimizer,
        config.max_grad_norm,
        net.entropy_cost.parameters(),
        period_updates=period_updates,
        tau=config.tau,
        draws="noise",
        seed=seed,
    )


def found(sizes: Tensor, measured: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an agent's `learn` gives of the sizes of errors `[B]`, and of scalars for the log."""
    named = {f"learner/{name}": value.detach() for name, value in measured.items()}
    return {"priorities": sizes.double() + PRIORITY_FLOOR, **named}
