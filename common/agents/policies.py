"""What agents with a policy share: its distribution, the network that goes with it, and drawing from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.config.fields import PolicyConfig
from troupe.common.errors import ConfigError
from troupe.common.rl.distributions import Distribution, distribution_of
from troupe.common.rl.normalizers import Normalizer

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec


def policy_distribution(config: PolicyConfig, spec: EnvSpec) -> Distribution:
    """The distribution over actions; ConfigError where the configured one is not for them."""
    try:
        return distribution_of(
            spec.actions,
            config.action_distribution,
            config.deviation,
            config.deviation_floor,
            config.deviation_start,
        )
    except ValueError as error:
        message = f"agent.action_distribution does not suit {spec.id}: {error}; take normal"
        raise ConfigError(message) from None


def policy_options(config: PolicyConfig, policy: Distribution, spec: EnvSpec) -> dict[str, Any]:
    """Arguments of an `ActorCritic` that follow from its distribution, and its statistics of returns."""
    chance = config.action_distribution != "tanh"
    # Deviations that do not depend on the observation are parameters by themselves, as in PPO's reference
    # code.
    free = spec.actions.reals if chance and not config.deviation_of_input else 0
    returns = None
    if config.normalize_returns:
        # Rewards of a millionth are learned from as those of 1 are: the floor follows them.
        returns = Normalizer((), floor=1e-8, floor_of_mean=1e-4, window=config.returns_window)
    return {"policy_size": policy.size, "free": free, "returns": returns}


def drawn(
    policy: Distribution, params: np.ndarray, epsilon: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Actions `[S, ...]` drawn from policies with `params` `[S, P]`.

    That is with chance `epsilon` `[S]`; otherwise the most likely action is taken.
    """
    # Drawn for all slots, also where the best one is taken: a generator that advances alike makes runs
    # comparable.
    action = policy.sample(params, rng)
    best = rng.random(len(params)) >= epsilon
    if best.any():
        action[best] = policy.mode(params[best])
    return action
