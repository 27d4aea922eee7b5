"""Algorithms, one file each. To add one: write the file, and a line in `troupe.common.config.algorithms`.

One outside this tree calls `register_algorithm` instead.
"""

from __future__ import annotations

import importlib
from inspect import getattr_static, signature
from typing import TYPE_CHECKING

from troupe.common.agents.base import Accumulator, Act, Agent, Batch, Inputs, Pending, Update
from troupe.common.config.algorithms import ALGORITHMS, agent_model
from troupe.common.config.fields import AgentConfig
from troupe.common.errors import ConfigError

if TYPE_CHECKING:
    from troupe.common.envs import EnvSpec

__all__ = ["Accumulator", "Act", "Agent", "Batch", "Inputs", "Pending", "Update", "make_agent"]

_MEMBERS = [name for name in {**Agent.__annotations__, **vars(Agent)} if not name.startswith("_")]


def make_agent(agent_config: AgentConfig, spec: EnvSpec, *, seed: int = 0, device: str = "cpu") -> Agent:
    """Builds the agent that `agent_config` describes, for environments of `spec`.

    The algorithm's module is the one that defined the class of `agent_config`; it has a function `make`.
    """
    if spec.instruction_words and not agent_config.reads_instructions:
        readers = [name for name in ALGORITHMS if agent_model(name).reads_instructions]
        raise ConfigError(
            f"{agent_config.algorithm} does not read the instructions of {spec.id}: take agent.algorithm "
            f"{' or '.join(readers)}, or env.kwargs with instructions = false"
        )
    if not spec.actions.count and not agent_config.takes_any_action:
        takers = [name for name in ALGORITHMS if agent_model(name).takes_any_action]
        bins = ", or --env.action_bins 11" if spec.actions.bounded == (True,) else ""
        raise ConfigError(
            f"{agent_config.algorithm} needs an action that is one choice of several, that of {spec.id} is "
            f"{spec.actions}: take --agent.algorithm {' or '.join(takers)}{bins}"
        )
    module = importlib.import_module(type(agent_config).__module__)
    if not hasattr(module, "make"):
        raise ConfigError(f"the module {module.__name__} has no function `make` that builds its agent")
    given = {"seed": seed, "device": device}
    try:
        signature(module.make).bind(agent_config, spec, **given)
    except TypeError as error:
        raise ConfigError(
            f"{module.__name__}.make is called as make(config, spec, *, seed, device): {error}"
        ) from None
    agent: Agent = module.make(agent_config, spec, **given)
    # Not `hasattr` alone: it would make what is made at first use, such as an optimiser.
    lacks = [
        name for name in _MEMBERS if getattr_static(agent, name, None) is None and not hasattr(agent, name)
    ]
    if lacks:
        raise ConfigError(
            f"{module.__name__}.make returned a {type(agent).__name__}, which has no {', '.join(lacks)}: "
            "troupe.common.agents.base.Agent says what an agent has"
        )
    return agent
