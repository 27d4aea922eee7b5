"""Environments with Gym's interface of before Gymnasium: `old_gym:package.module:Id-v0`.

`reset` returns an observation, or one with an info; `step` returns four values, or five. The module registers
its id with `gym` (0.21 to 0.26; wrappers are left out) or with `gymnasium`. Nothing is asked of its spaces
but to look like Gym's.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from troupe.common.envs.registration import hint_of_module, registered_by
from troupe.common.errors import ConfigError
from troupe.common.installation import import_module

PREFIX = "old_gym:"


def registered(name: str) -> str:
    """Gymnasium's id of an environment that answers as Gymnasium's do. Raises ConfigError without one."""
    own = f"old_gym/{name.replace(':', '.').replace('/', '--')}"  # an id has one namespace at most
    if own not in gymnasium.registry:
        make, limit = _found(name)
        # Registered under a name of its own, so that wrappers, limits and checks of Gymnasium apply as to any
        # other.
        gymnasium.register(
            own, entry_point=lambda **kwargs: OldGymEnv(make, **kwargs), max_episode_steps=limit
        )
    return own


class OldGymEnv(gymnasium.Env):
    """One that `make(**kwargs)` gives, with today's interface."""

    def __init__(self, make: Callable[..., Any], render_mode: str | None = None, **kwargs: Any) -> None:
        self._env = make(**kwargs)
        self.observation_space = _space(self._env.observation_space)
        self.action_space = _space(self._env.action_space)
        self.metadata = {**getattr(self._env, "metadata", {}), "render_modes": ["rgb_array"]}
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Observation and info; the seed goes to whichever of `reset` and `seed` takes it."""
        super().reset(seed=seed)  # what Gymnasium's checker looks for; the environment has draws of its own
        if seed is None:
            result = self._env.reset()
        else:
            try:
                result = self._env.reset(seed=seed)
            except TypeError:
                # Up to 0.21 `reset` took no seed and `seed` was a method; some versions have both.
                if hasattr(self._env, "seed"):
                    self._env.seed(seed)
                result = self._env.reset()
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
            return result
        return result, {}

    def step(self, action: Any) -> Any:
        """Five values; of four, `TimeLimit.truncated` in the info says what `done` meant."""
        result = self._env.step(action)
        if not isinstance(result, tuple) or len(result) != 4:
            return result
        obs, reward, done, info = result
        cut = isinstance(info, dict) and bool(info.get("TimeLimit.truncated", False))
        return obs, reward, bool(done) and not cut, bool(done) and cut, info

    def render(self) -> Any:
        """A picture, by either way of asking for one."""
        try:
            return self._env.render(mode="rgb_array")
        except TypeError:
            return self._env.render()

    def close(self) -> None:
        """Close it."""
        with contextlib.suppress(AttributeError):  # not all of that time have it
            self._env.close()


def _found(name: str) -> tuple[Callable[..., Any], int | None]:
    """What makes the environment, and after how many steps its episodes are cut."""
    module, _, plain = name.rpartition(":")
    if module:
        import_module(module, f"{PREFIX}{name}")
    known: dict[str, Any] = {}
    for registry in _registries():
        if plain in registry:
            spec = registry[plain]
            return _maker(spec), spec.max_episode_steps
        known |= registry
    if module:
        hint = hint_of_module(f"{PREFIX}{module}", plain, registered_by(module, known))
    else:
        near = difflib.get_close_matches(plain, known, n=1, cutoff=0.6)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "neither gym nor gymnasium has such an id"
        hint += "; write old_gym:package.module:ID, where that module registers it"
    raise ConfigError(f"unknown environment {PREFIX}{name}: {hint}")


def _registries() -> list[dict[str, Any]]:
    """Those of Gymnasium and, where it is installed, of gym."""
    found: list[dict[str, Any]] = [gymnasium.registry]
    try:
        registration = importlib.import_module("gym.envs.registration")
    except ImportError:
        return found
    registry = registration.registry  # of late a dictionary, which warns of `env_specs`
    return [dict(registry if isinstance(registry, Mapping) else registry.env_specs), *found]


def _maker(spec: Any) -> Callable[..., Any]:
    """Makes the environment itself, without the wrappers of a `make` that expect one interface."""
    creator = spec.entry_point
    if isinstance(creator, str):
        path, _, attribute = creator.partition(":")
        creator = getattr(import_module(path, spec.id), attribute)
    given = dict(getattr(spec, "kwargs", None) or getattr(spec, "_kwargs", None) or {})
    return lambda **kwargs: creator(**{**given, **kwargs})


def _space(space: Any) -> spaces.Space:
    """Gymnasium's space that is like one of gym's. Raises ConfigError where none is."""
    if isinstance(space, spaces.Space):
        return space
    if hasattr(space, "low"):
        dtype = np.dtype(space.dtype)
        return spaces.Box(space.low, space.high, space.shape, dtype.type)
    if hasattr(space, "nvec"):
        return spaces.MultiDiscrete(np.asarray(space.nvec))
    parts: Any = getattr(space, "spaces", None)
    if hasattr(parts, "items"):
        return spaces.Dict({key: _space(part) for key, part in parts.items()})
    if parts is not None:
        return spaces.Tuple([_space(part) for part in parts])
    if hasattr(space, "n"):
        if type(space).__name__ == "MultiBinary":
            return spaces.MultiBinary(space.n)
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    raise ConfigError(f"the space {space} is like none of Gymnasium's")
