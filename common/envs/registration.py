"""Registering environments with Gymnasium, so that `env.id` can name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from troupe.common.errors import ConfigError


def register_env(name: str, make: Callable[..., Any], **options: Any) -> str:
    """Register a Gymnasium environment; returns what to write as `env.id`, `package.module:NAME`.

    For the module that defines the environment, which every service imports to make it.

    Args:
        name: such as `Maze-v0`.
        make: class or function that makes one, defined in that module.
        options: of `gymnasium.register`, such as `max_episode_steps`.

    Raises:
        ConfigError: another module has registered this name, or the module is the program itself, which no
            service can import.
    """
    import gymnasium

    module = make.__module__
    entry_point = f"{module}:{make.__qualname__}"
    if module == "__main__":
        raise ConfigError(f"{name} is defined in the program itself: put it into a module that it imports")
    known = gymnasium.registry.get(name)
    if known is not None and known.entry_point != entry_point:
        raise ConfigError(f"{name} of {module} has the name of an environment of {known.entry_point}")
    if known is None:
        gymnasium.register(name, entry_point=entry_point, **options)
    return f"{module}:{name}"
