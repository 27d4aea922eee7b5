"""Engines that step all environments in one call, in each of Gymnasium's ways to go on after an episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from troupe import register_env


class Clocks(VectorEnv):
    """Observations `[environment, episode, step, draw]`; a step's reward is its number.

    Episodes last 2 to 6 steps, drawn; those of an odd length terminate, the others are truncated.
    """

    def __init__(
        self,
        num_envs: int = 1,
        mode: str = "SameStep",
        masks: bool = True,
        fails_at: int = 0,
        how: str = "raise",
        endless: bool = False,
        parts: bool = False,
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode(mode)} if mode else {}
        self.num_envs, self._mode, self._masks = num_envs, mode, masks
        self._fails_at, self._how, self._calls = fails_at, how, 0
        self._endless, self._parts = endless, parts
        numbers = spaces.Box(-1e3, 1e6, (4,), np.float32)
        picture = spaces.Box(0, 255, (36, 36), np.uint8)
        self.single_observation_space = (
            spaces.Dict({"numbers": numbers, "picture": picture}) if parts else numbers
        )
        self.single_action_space = spaces.Discrete(2, start=5)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self._done = np.zeros(num_envs, bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None or not hasattr(self, "_rng"):
            self._rng = np.random.default_rng(seed)
            self._episode = np.full(self.num_envs, -1)
            self._step, self._length, self._draw = (np.zeros(self.num_envs, int) for _ in range(3))
        mask = options["reset_mask"] if options and self._masks else np.ones(self.num_envs, bool)
        for env in np.flatnonzero(mask):
            self._begin(env)
        return self._obs(), {}

    def _begin(self, env: int) -> None:
        self._episode[env] += 1
        self._step[env], self._done[env] = 0, False
        # Of the environment and its episode alone, so that all modes draw the same.
        draws = np.random.default_rng(
            [env, int(self._episode[env]), self._rng.bit_generator.seed_seq.entropy]
        )
        self._length[env], self._draw[env] = draws.integers(2, 7), draws.integers(1000)

    def step(self, actions: np.ndarray) -> Any:
        assert self.action_space.contains(actions), actions
        self._calls += 1
        wrong = self._fails_at and self._calls >= self._fails_at
        if wrong and self._how == "raise":
            raise RuntimeError("the engine\nstalled")
        resets = self._done.copy() if self._mode == "NextStep" else np.zeros(self.num_envs, bool)
        assert self._mode == "NextStep" or not self._done.any(), "an episode that is over was stepped"
        for env in np.flatnonzero(resets):
            self._begin(env)
        self._step[~resets] += 1
        reward = np.where(resets, 0.0, self._step)
        over = (self._step == self._length) & ~resets & (not self._endless)
        terminated, truncated = over & (self._length % 2 == 1), over & (self._length % 2 == 0)
        self._done = over.copy()
        obs, info = self._obs(), {"length": self._length.copy(), "_length": over.copy()}
        if self._mode == "SameStep" and over.any():
            info = {"final_obs": obs, "_final_obs": over.copy(), "final_info": info, "_final_info": over}
            for env in np.flatnonzero(over):
                self._begin(env)
            obs = self._obs()
        if wrong and self._how == "nan":
            obs[0, 3] = np.nan
        if wrong and self._how == "reward":
            reward = reward[:-1]
        return obs, reward, terminated, truncated, info

    def _obs(self) -> Any:
        places = np.arange(self.num_envs)
        numbers = np.stack([places, self._episode, self._step, self._draw], axis=1).astype(np.float32)
        if not self._parts:
            return numbers
        picture = np.broadcast_to(self._step[:, None, None], (self.num_envs, 36, 36)).astype(np.uint8)
        return {"numbers": numbers, "picture": picture}


def sync(num_envs: int, mode: str) -> VectorEnv:
    """Gymnasium's own engine, of copies of CartPole that are truncated after 20 steps."""
    make = [lambda: gymnasium.make("CartPole-v1", max_episode_steps=20) for _ in range(num_envs)]
    return SyncVectorEnv(make, autoreset_mode=mode)


def single(num_envs: int) -> gymnasium.Env:
    """No engine."""
    return gymnasium.make("CartPole-v1")


def registered() -> gymnasium.Env:
    """Never called: only the engine is registered with a use."""
    raise NotImplementedError


register_env("Clocks-v0", registered, vector_entry_point=Clocks)
