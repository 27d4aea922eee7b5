"""Environments that exist in this process only: `troupe.common.envs.in_process:NAME`, as long as it lives.

A training in one process plays what its caller has defined in a notebook or inside a function, which no other
process could import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from troupe.common.errors import ConfigError

_MAKERS: dict[str, Callable[..., Any]] = {}


def hold(name: str, make: Callable[..., Any]) -> str:
    """Keep what makes an environment, in the place of another one of this name; returns its `env.id`."""
    _MAKERS[name] = make
    return f"{__name__}:{name}"


def held(name: str) -> Callable[..., Any]:
    """Return what makes an environment. Raises ConfigError where it was another process that had it."""
    if name in _MAKERS:
        return _MAKERS[name]
    raise ConfigError(
        f"the environment {name} was in the process that trained: give it again, as in "
        f"troupe.evaluate(run, env={name})"
    )
