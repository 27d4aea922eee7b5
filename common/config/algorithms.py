"""The registry of algorithms: a name and where its configuration model lives.

Models are imported only when an agent section is checked, and by name, so that this package (and with it the
replay service) works where torch is not installed.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from common.config.fields import AgentConfig, UntypedAgentConfig

ALGORITHMS: dict[str, str] = {
    "apex": "common.agents.apex:ApexConfig",
    "impala": "common.agents.impala:ImpalaConfig",
    "r2d2": "common.agents.r2d2:R2d2Config",
}

DEFAULT_ALGORITHM = "apex"


def agent_model(algorithm: str) -> type[AgentConfig]:
    """Return the configuration model of an algorithm; `UntypedAgentConfig` where torch is not installed.

    Raises ValueError for an unknown name.
    """
    try:
        module_name, _, attribute = ALGORITHMS[algorithm].partition(":")
    except (KeyError, TypeError):  # a file may hold a list
        near = difflib.get_close_matches(str(algorithm), ALGORITHMS, n=1, cutoff=0.0)
        raise ValueError(f"unknown algorithm {algorithm!r}; nearest: {', '.join(near)}") from None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torch":
            raise
        return UntypedAgentConfig
    model: type[AgentConfig] = getattr(module, attribute)
    return model


def agent_section(values: Mapping[str, Any]) -> AgentConfig:
    """Return `values` as the algorithm's own model."""
    return agent_model(values.get("algorithm", DEFAULT_ALGORITHM)).model_validate(dict(values))
