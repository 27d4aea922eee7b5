"""Registering environments with Gymnasium, so that `env.id` can name them."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from troupe.common.envs import in_process
from troupe.common.errors import ConfigError

# Ids that one line names.
_SHOWN = 8


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
    # The same module may be imported twice, as a script and by its name, and registers the same each time.
    if known is not None and known.entry_point != entry_point:
        raise ConfigError(f"{name} of {module} has the same name as an environment of {known.entry_point}")
    if known is None:
        gymnasium.register(name, entry_point=entry_point, **options)
    return f"{module}:{name}"


def maker_of(module: str, name: str) -> Callable[..., Any] | None:
    """The class or function of this name that `module`, or a module below it, defines; None where none is.

    A configuration of somebody else may have chosen the name, and the arguments. So nothing is called that a
    module only has at hand, such as `os.system`, nor what Troupe's own modules define: they need no
    permission.

    Raises:
        ConfigError: it was in another process.
    """
    if module == in_process.__name__:
        return in_process.held(name)
    if f"{module}.".startswith(f"{__package__}."):
        return None
    make: Any = sys.modules.get(module)
    for part in name.split("."):
        make = getattr(make, part, None)
    home = getattr(make, "__module__", None)
    defined = isinstance(home, str) and f"{home}.".startswith(f"{module}.")
    return make if defined and callable(make) else None


def registered_by(module: str, registry: Mapping[str, Any]) -> list[str]:
    """Return the ids in a registry, Gymnasium's or gym's, of what `module` defines, or else its package."""
    homes = {name: f"{_home(spec)}." for name, spec in registry.items()}
    of_module, of_package = (
        [name for name, home in homes.items() if home.startswith(f"{place}.")]
        for place in (module, module.partition(".")[0])
    )
    return of_module or of_package


def hint_of_module(module: str, name: str, known: list[str]) -> str:
    """Return what to say where `module`, as `env.id` names it, has no `name` among its `known` ids."""
    there = [] if module == in_process.__name__ else list(vars(sys.modules.get(module, object)))
    callables = [each for each in there if each[0] != "_" and maker_of(module, each)]
    near = difflib.get_close_matches(name, [*known, *callables], n=1, cutoff=0.5)
    if near:
        return f"did you mean {module}:{near[0]}?"
    if not known:
        return (
            "the module registers no environment of its own (troupe.register_env does), and defines no "
            f"{name} to call"
        )
    return f"the module registers {', '.join(known[:_SHOWN])}{', ...' if len(known) > _SHOWN else ''}"


def _home(spec: Any) -> str:
    """The module of what makes an environment."""
    creator = spec.entry_point
    return creator.partition(":")[0] if isinstance(creator, str) else getattr(creator, "__module__", "") or ""
