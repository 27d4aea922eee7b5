"""Which modules outside Troupe a configuration of somebody else may have this process import.

Environments (`package.module:ID`) and algorithms (`package.module`, or the name of an entry point) are found
by importing their module, which runs it. They are named by whoever starts a training; a service that gets the
configuration from a learner, or from a checkpoint, imports them only where its own user permits it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping
from typing import Any

from troupe.common.config import Config, config_from_dict
from troupe.common.config.algorithms import algorithm_module
from troupe.common.envs import environment_module
from troupe.common.errors import ConfigError

VARIABLE = "TROUPE_MODULES"
OWN = ("troupe.common.envs",)
"""Troupe's own environments, which are always permitted."""


class NotPermittedError(ConfigError):
    """Somebody else's configuration names modules that are not permitted."""


def add_module_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--modules`; its default is an environment variable."""
    parser.add_argument(
        "--modules",
        metavar="MODULE,...",
        type=_names,
        default=_names(os.environ.get(VARIABLE, "")),
        help="modules from which an environment or algorithm of your own may be imported, with everything "
        f"below them; importing a module runs its code (default: ${VARIABLE}, or none)",
    )


def modules_of(config: Config) -> list[str]:
    """The modules outside Troupe that a run with this configuration imports."""
    return list(dict.fromkeys(_named(config, plays=True, thinks=True).values()))


def check_modules(
    config: Config, permitted: Collection[str], source: str, *, plays: bool = True, thinks: bool = True
) -> None:
    """Refuse a configuration of somebody else that names modules which are not permitted.

    Args:
        config: its section `[agent]` may be unchecked, since to check it imports the algorithm.
        permitted: modules, each with what is below it.
        source: who says so.
        plays: the environment will be made.
        thinks: the network will be.

    Raises:
        ConfigError: names all of them, and says how to permit them.
    """
    if isinstance(permitted, str):  # from Python: its letters are no modules
        permitted = _names(permitted)
    missing = {
        what: module
        for what, module in _named(config, plays=plays, thinks=thinks).items()
        if not _is_below(module, permitted)
    }
    if missing:
        modules = list(dict.fromkeys(missing.values()))
        for module in modules:  # the advice below goes into somebody's shell
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError(
                    f"{source} names something to import that is not a module: {module[:100]!r}"
                )
        words = ",".join(modules)
        ways = f"--modules {words}, {VARIABLE}={words}, or modules={modules} in Python"
        raise NotPermittedError(
            f"{source} has {' and '.join(missing)}, which would run {' and '.join(modules)}: "
            f"if you trust that, permit it with {ways}"
        )


def permitted_config(
    values: Mapping[str, Any], permitted: Collection[str], source: str, *, plays: bool = True
) -> Config:
    """The checked configuration in `values`, nested plain ones, that somebody else wrote.

    Raises:
        ConfigError: it is not valid, or `check_modules` refuses it; nothing is imported then.
    """
    check_modules(config_from_dict(values, source=source, typed_agent=False), permitted, source, plays=plays)
    return config_from_dict(values, source=source)


def _named(config: Config, *, plays: bool, thinks: bool) -> dict[str, str]:
    """What names a module outside Troupe, in words, and the module."""
    found = {}
    if plays:
        found[f"the environment {config.env.id}"] = environment_module(config.env.id)
        for wrapper in config.env.wrappers:
            module = wrapper.partition(":")[0]
            # Gymnasium's own wrappers only: its other modules make environments and import what they are told
            # to.
            found[f"the wrapper {wrapper}"] = "" if module == "gymnasium.wrappers" else module
    if thinks:
        found[f"the algorithm {config.agent.algorithm}"] = algorithm_module(config.agent.algorithm)
    return {what: module for what, module in found.items() if module and not _is_below(module, OWN)}


def _is_below(module: str, names: Collection[str]) -> bool:
    # With the dot: `my_envs_evil` is not below `my_envs`.
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
