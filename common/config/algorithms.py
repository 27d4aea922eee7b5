"""The registry of algorithms: a name and where its configuration model lives.

Models are imported only when an agent section is checked, and by name, so that this package (and with it the
replay service) works where torch is not installed. An algorithm outside this tree has the name of its module,
`package.module`, or that of an entry point in the group `troupe.algorithms`, whose value is the module; when
imported, the module calls `register_algorithm`.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import PydanticSchemaGenerationError
from pydantic_core import to_jsonable_python

from troupe.common.config.fields import AgentConfig, UntypedAgentConfig
from troupe.common.errors import ConfigError, raised_where
from troupe.common.installation import entry_point, entry_points, import_module

ALGORITHMS: dict[str, str] = {
    "apex": "troupe.common.agents.apex:ApexConfig",
    "impala": "troupe.common.agents.impala:ImpalaConfig",
    "iql": "troupe.common.agents.iql:IqlConfig",
    "policy_gradient": "troupe.common.agents.policy_gradient:PolicyGradientConfig",
    "pqn": "troupe.common.agents.pqn:PqnConfig",
    "r2d2": "troupe.common.agents.r2d2:R2d2Config",
    "sac": "troupe.common.agents.sac:SacConfig",
    "td3": "troupe.common.agents.td3:Td3Config",
    "td3_bc": "troupe.common.agents.td3_bc:Td3BcConfig",
}
"""Those of this tree."""

KNOWN_AS = {
    **dict.fromkeys(("dqn", "ddqn", "double_dqn", "dueling_dqn", "rainbow", "ape_x"), "apex"),
    **dict.fromkeys(("ppo", "appo", "a2c", "awr", "vmpo", "v_mpo"), "policy_gradient"),
    **dict.fromkeys(("vtrace", "v_trace"), "impala"),
    "ddpg": "td3",
    "td3bc": "td3_bc",
}
"""Names that others use, and the algorithm here that is the same or nearest to it."""

DEFAULT_ALGORITHM = "apex"
ENTRY_POINTS = "troupe.algorithms"

_TYPES = "bool, int, float, str, Literal, or tuples and dicts of them"
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# Filled when a module is imported, so the names that it holds depend on what has been imported so far;
# `agent_model` imports the one that it needs first.
_registered: dict[str, type[AgentConfig]] = {}

Model = TypeVar("Model", bound=AgentConfig)


def register_algorithm(model: type[Model]) -> type[Model]:
    """Make an algorithm outside this tree known; a decorator of its configuration model.

    The name is that of the model's field `algorithm`, a `Literal`: that of its module, or that of its entry
    point. The module also has the function `make` that `troupe.common.agents.make_agent` calls.

    Raises:
        ConfigError: the name is not usable, or taken.
    """
    if not (isinstance(model, type) and issubclass(model, AgentConfig)):
        raise ConfigError(
            f"{getattr(model, '__qualname__', model)} should be a class derived from AgentConfig"
        )
    annotation, module = model.model_fields["algorithm"].annotation, model.__module__
    names = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Literal else ()
    if len(names) != 1 or names[0] in ALGORITHMS:
        raise ConfigError(
            f'{module}.{model.__name__} should have a name of its own: algorithm: Literal["{module}"] = '
            f'structural("{module}", "...")'
        )
    for field, about in model.model_fields.items():
        if about.is_required() or about.default_factory is not None:
            continue
        try:
            to_jsonable_python(about.default)
        except ValueError:  # a run directory, a checkpoint and a message have to hold it
            kind = type(about.default).__name__
            raise ConfigError(
                f"the default of {field} in {module}.{model.__name__} is a {kind}, and no value of a "
                f"configuration ({_TYPES})"
            ) from None
    (name,) = names
    # A service on another machine gets nothing but the name, in WELCOME or from a checkpoint, and imports the
    # module that it names.
    if "." in name and name != module:
        raise ConfigError(
            f"the algorithm {name} cannot be found in the module {module}: it should be {module}"
        )
    other = _registered.get(name)
    # The same module may register twice: a notebook runs its cell again, tests reload it.
    if other is not None and other.__module__ != module:
        raise ConfigError(f"the algorithm {name} of {module} has the same name as that of {other.__module__}")
    _registered[name] = model
    return model


def outside_names() -> list[str]:
    """The algorithms outside this tree that are known by name: of entry points, and registered ones."""
    return [name for name in {**entry_points(ENTRY_POINTS), **_registered} if name not in ALGORITHMS]


def algorithm_module(algorithm: str) -> str:
    """The module outside this tree that holds an algorithm; empty where it is one of our own, or unknown.

    >>> algorithm_module("apex"), algorithm_module("my_package.qrdqn")
    ('', 'my_package.qrdqn')
    """
    if algorithm in ALGORITHMS:
        return ""
    if _MODULE.fullmatch(algorithm):
        return algorithm
    return entry_point(ENTRY_POINTS, algorithm)


def agent_model(algorithm: str) -> type[AgentConfig]:
    """Return the configuration model of an algorithm; `UntypedAgentConfig` where torch is not installed.

    Raises ValueError for an unknown name, and for a module that cannot be imported or does not register it.
    """
    if not isinstance(algorithm, str):  # a file may hold a list
        algorithm = str(algorithm)
    elif algorithm in _registered:
        return _registered[algorithm]
    own, module_name = ALGORITHMS.get(algorithm, ""), algorithm_module(algorithm)
    if not own and not module_name:
        known = [*ALGORITHMS, *outside_names()]
        means = KNOWN_AS.get(algorithm.lower().replace("-", "_"))
        # Likeness of letters would lead from `ppo` to `pqn`.
        near = [means] if means else difflib.get_close_matches(algorithm, known, n=1, cutoff=0.0)
        raise ValueError(f"unknown algorithm {algorithm!r}; nearest: {', '.join(near)}")
    own_module, _, attribute = own.partition(":")
    try:
        module = import_module(own_module or module_name, f"the algorithm {algorithm}")
    except ConfigError as error:
        cause = error.__cause__
        # Only torch may be missing. Any other missing module is a broken installation, or the user's own
        # mistake, and an untyped section would hide it until something fails far from here.
        if isinstance(cause, ModuleNotFoundError) and (cause.name or "").partition(".")[0] == "torch":
            return UntypedAgentConfig
        if own and cause is not None:
            raise cause from None  # a defect
        if isinstance(cause, PydanticSchemaGenerationError):  # its advice would be no way out
            what = cause.message.partition(". ")[0]
            raise ValueError(
                f"a field of {module_name} has no type of a configuration ({_TYPES}): "
                f"{what}{raised_where(cause)}"
            ) from None
        raise ValueError(str(error)) from None
    if own:
        model: type[AgentConfig] = getattr(module, attribute)
        return model
    if algorithm not in _registered:
        others = [name for name, model in _registered.items() if model.__module__ == module_name]
        instead = f"; it registers {', '.join(others)}" if others else ""
        raise ValueError(
            f"the module {module_name} registers no algorithm {algorithm!r} with "
            f"`troupe.register_algorithm`{instead}"
        )
    return _registered[algorithm]


def agent_section(values: Mapping[str, Any]) -> AgentConfig:
    """Return `values` as the algorithm's own model."""
    return agent_model(values.get("algorithm", DEFAULT_ALGORITHM)).model_validate(dict(values))
