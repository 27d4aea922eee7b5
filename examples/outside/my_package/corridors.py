"""A family of environments of one's own: `corridors:LENGTH`, for an engine that Gymnasium does not know.

The entry point in pyproject.toml makes it known: group `troupe.families`, name `corridors`, this module. Its
three functions are what Troupe calls.
"""

from __future__ import annotations

import numpy as np

from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import EnvSpec, VectorEnv
from troupe.common.envs.base import options, slot_seeds
from troupe.common.envs.slots import Outcome, SlotVector
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec

_OPTIONS = {"wind": 0.0, "limit": 100}
"""`env.kwargs`: the chance that a step goes left whatever was chosen, and the steps until time is up."""


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here; a command line with another one is refused."""
    return {"kwargs"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """What the network sees, float32 `[length]`, and does: 0 goes left, 1 right."""
    name = config.id.removeprefix("corridors:")
    if not name.isdecimal() or int(name) < 2:
        raise ConfigError(f"{config.id}: the length should be a number from 2, as in corridors:6")
    options(config, _OPTIONS)  # refuses unknown ones
    return EnvSpec(
        id=config.id,
        obs_shape=(int(name),),
        obs_dtype="float32",
        actions=ActionSpec.discrete(2),
        stack=0,
        frames_per_step=1,
        pixels=False,
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """Copies, which `SlotVector` steps, resets where an episode ends, and makes anew where one fails."""
    spec = make_spec(config)
    slots = [Corridor(config, spec, slot_seed) for slot_seed in slot_seeds(seed, num_slots).tolist()]
    return SlotVector(config, spec, slots, seed, threads, evaluation=evaluation)


class Corridor:
    """One corridor, entered on the left; each step costs, and the right end pays 1."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, seed: int) -> None:
        self._options = options(config, _OPTIONS)
        self._length = spec.obs_shape[0]
        self.rebuild(seed)

    def rebuild(self, seed: int) -> None:
        """A new one; here is nothing that could break."""
        self._rng = np.random.default_rng(seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Enters the corridor."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        self._place = self._steps = 0
        return self._obs()

    def step(self, action: int) -> Outcome:
        """Goes one place. Time that is up truncates: the value of where it ends is still learned from."""
        right = bool(action) and self._rng.random() >= self._options["wind"]
        self._place = max(0, self._place + (1 if right else -1))
        self._steps += 1
        over = self._place == self._length - 1
        return self._obs(), 1.0 if over else -0.01, over, not over and self._steps >= self._options["limit"]

    def render(self) -> np.ndarray:
        """Nothing to see."""
        raise NoPictureError("a corridor cannot draw itself")

    def close(self) -> None:
        """Nothing to free."""

    def _obs(self) -> np.ndarray:
        obs = np.zeros(self._length, np.float32)
        obs[self._place] = 1.0
        return obs
