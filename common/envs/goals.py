"""Environments with goals: Gymnasium's convention, and what another goal would have earned.

An observation is a dictionary with `observation`, `achieved_goal` and `desired_goal`; the environment has
`compute_reward(achieved_goal, desired_goal, info)` and perhaps `compute_terminated` with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec, clip_rewards
from troupe.common.envs.gymnasium_envs import make_one
from troupe.common.errors import ConfigError

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"


class EnvGoals:
    """`accumulators.hindsight.Goals` of packed observations, by one copy of the environment.

    `info` is empty: what depends on it cannot be worked out later.
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec) -> None:
        """Raises ConfigError where the environment has no goals, or cannot say what another one earns."""
        self._places: dict[str, tuple[slice, Any]] = {}
        begin = 0
        for leaf in spec.obs_leaves:
            if leaf.path in ((ACHIEVED,), (DESIRED,)):
                self._places[str(leaf.path[0])] = slice(begin, begin + leaf.nbytes), leaf
            begin += leaf.nbytes
        form = [(leaf.shape, leaf.dtype) for _, leaf in self._places.values()]
        env = make_one(config) if len(form) == 2 else None
        reward = None if env is None else getattr(env.unwrapped, "compute_reward", None)
        if env is None or reward is None:
            raise ConfigError(
                f"actor.hindsight_copies needs an environment with goals: {config.id} does not show "
                f"{ACHIEVED} and {DESIRED} and have compute_reward; set it to 0"
            )
        if form[0] != form[1]:
            raise ConfigError(f"{config.id} shows an {ACHIEVED} that is not of the form of its {DESIRED}")
        self._reward = reward
        self._wrapped = _reward_wrappers(env, config.id)
        self._terminated = getattr(env.unwrapped, "compute_terminated", None)
        self._clip = config.reward_clip

    def replaced(self, obs: np.ndarray, reached: np.ndarray) -> np.ndarray:
        """See `Goals`: uint8 `[bytes]`, a copy."""
        changed = obs.copy()
        changed[self._places[DESIRED][0]] = reached[self._places[ACHIEVED][0]]
        return changed

    def outcome(self, obs: np.ndarray, terminated: bool) -> tuple[float, bool]:
        """See `Goals`; without `compute_terminated` a step ends what it ended with its own goal."""
        goals = [self._part(obs, name) for name in (ACHIEVED, DESIRED)]
        reward = self._reward(*goals, {})
        for change in self._wrapped:
            reward = change(reward)
        clipped = clip_rewards(np.asarray([reward], np.float64), self._clip)
        if self._terminated is not None:
            terminated = bool(self._terminated(*goals, {}))
        return float(clipped[0]), terminated

    def _part(self, obs: np.ndarray, name: str) -> np.ndarray:
        place, leaf = self._places[name]
        return np.frombuffer(obs[place].tobytes(), leaf.dtype).reshape(leaf.shape)


def _reward_wrappers(env: Any, env_id: str) -> list[Callable[[Any], Any]]:
    """What wrappers make of a reward, the innermost first; ConfigError where that depends on others."""
    import gymnasium

    changes: list[Callable[[Any], Any]] = []
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.NormalizeReward):
            raise ConfigError(
                f"actor.hindsight_copies cannot say what NormalizeReward of {env_id} would make of another "
                "reward: leave one of them out"
            )
        if isinstance(env, gymnasium.RewardWrapper):
            changes.insert(0, env.reward)
        env = env.env
    return changes
