"""Which modules outside Troupe a configuration of somebody else may have this process import.

Environments (`package.module:ID`) and algorithms (`package.module`, or the name of an entry point) are found
by importing their module, which runs it. Who starts a training names them himself; a service that gets the
configuration from a learner, or from a checkpoint, imports them only where its own user permits it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Mapping
from typing import Any

from common.config import Config, config_from_dict
from common.config.algorithms import algorithm_module
from common.envs import environment_module
from common.errors import ConfigError

VARIABLE = "TROUPE_MODULES"
OWN = "common.envs"
"""Troupe's own environments, which are always permitted."""


def add_module_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--modules`; its default is an environment variable."""
    parser.add_argument(
        "--modules",
        metavar="MODULE,...",
        type=_names,
        default=_names(os.environ.get(VARIABLE, "")),
        help="modules that environment and algorithm may be from, and what is below them, where they are not "
        f"Troupe's own: importing one runs it (default: ${VARIABLE}, or none)",
    )


def modules_of(config: Config) -> list[str]:
    """The modules outside Troupe that a run with this configuration imports."""
    names = environment_module(config.env.id), algorithm_module(config.agent.algorithm)
    wrappers = (_module_of(wrapper) for wrapper in config.env.wrappers)
    return list(dict.fromkeys(name for name in (*names, *wrappers) if name))


def check_environment(
    env_id: str, permitted: Collection[str], source: str, wrappers: Collection[str] = ()
) -> None:
    """Refuse an environment, or `wrappers`, of a module that is not permitted; `source` says who names it.

    Raises:
        ConfigError: says how to permit it.
    """
    _check(environment_module(env_id), permitted, f"{source} has the environment {env_id}")
    for wrapper in wrappers:
        _check(_module_of(wrapper), permitted, f"{source} has the wrapper {wrapper}")


def check_algorithm(algorithm: str, permitted: Collection[str], source: str) -> None:
    """Refuse an algorithm of a module that is not permitted; see `check_environment`."""
    _check(algorithm_module(algorithm), permitted, f"{source} has the algorithm {algorithm}")


def permitted_config(
    values: Mapping[str, Any], permitted: Collection[str], source: str, *, plays: bool = True
) -> Config:
    """The checked configuration in `values`, nested plain ones, that somebody else wrote.

    `plays` says that the environment will be made, so that its module has to be permitted as well.

    Raises:
        ConfigError: it is not valid, or names a module that is not permitted, which is not imported.
    """
    agent = values.get("agent") if isinstance(values, Mapping) else None
    algorithm = agent.get("algorithm") if isinstance(agent, Mapping) else None
    if isinstance(algorithm, str):  # to check the section imports it, and refuses what is no text
        check_algorithm(algorithm, permitted, source)
    config = config_from_dict(values, source=source)
    if plays:
        check_environment(config.env.id, permitted, source, config.env.wrappers)
    return config


def _module_of(wrapper: str) -> str:
    """The module that using a wrapper imports; empty for Gymnasium's own."""
    module = wrapper.partition(":")[0]
    return "" if module == "gymnasium.wrappers" else module


def _check(module: str, permitted: Collection[str], names: str) -> None:
    if module and not any(f"{module}.".startswith(f"{name}.") for name in (OWN, *permitted)):
        raise ConfigError(
            f"{names}, which runs the module {module}: if you trust it, permit that with --modules {module} "
            f"or {VARIABLE}={module}"
        )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
