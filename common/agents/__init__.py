"""Algorithms, one file each. To add one: write the file, and a line in `common.config.algorithms`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from common.agents.base import Accumulator, Act, Agent, Inputs, TableNeeds, Update
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.envs import EnvSpec

__all__ = ["Accumulator", "Act", "Agent", "Inputs", "TableNeeds", "Update", "make_agent"]

READ_INSTRUCTIONS = ("impala", "r2d2")
"""Algorithms whose networks understand `EnvSpec.instruction_words`."""


def make_agent(agent_config: Any, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> Agent:
    """Builds the agent that `agent_config` describes, for environments of `spec`.

    The algorithm's module is the one that defined the class of `agent_config`; it has a function `make`.
    """
    if spec.instruction_words and agent_config.algorithm not in READ_INSTRUCTIONS:
        raise ConfigError(
            f"{agent_config.algorithm} does not read the instructions of {spec.id}: take agent.algorithm "
            f"{' or '.join(READ_INSTRUCTIONS)}, or env.kwargs with instructions = false"
        )
    module = importlib.import_module(type(agent_config).__module__)
    agent: Agent = module.make(agent_config, spec, seed=seed, device=device)
    return agent
