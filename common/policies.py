"""A checkpoint as an agent that plays: for evaluations, exports and `troupe.load`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from troupe.common.agents import Agent, make_agent
from troupe.common.config import Config, with_overrides
from troupe.common.envs import EnvSpec, check_settings, make_spec
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.permits import permitted_config
from troupe.common.runtime.checkpoint import Checkpoint


def restore(
    checkpoint: Checkpoint,
    modules: Collection[str] = (),
    fields: Mapping[str, str] | None = None,
    device: str = "cpu",
) -> tuple[Config, Agent]:
    """Build the agent that a checkpoint holds, to play; it brings its own configuration.

    Environment and algorithm may be from Troupe itself or from `modules`: importing a module runs it.
    `fields` of `[env]`, as on a command line, take the place of those of the training; an environment that
    they name needs no permission, and gets none of the training's `env.kwargs` and `env.wrappers`.

    Raises:
        CheckpointError: it does not say what it is of.
        ConfigError: the environment that `fields` make shows or takes something else than the training's.
    """
    own_id = not fields or "env.id" not in fields
    config = config_of(checkpoint, modules, plays=own_id)
    if not fields:
        return config, agent_of(checkpoint, config, make_spec(config.env), device)
    config, spec = _replaced(config, fields)
    if "spec" in checkpoint.meta:
        # Compared with what the training saw, so that the message names what differs; the network would only
        # name a matrix.
        _check_fits(spec, spec_of(checkpoint))
    return config, agent_of(checkpoint, config, spec, device)


def with_environment(config: Config, trained: EnvSpec, env_id: str) -> Config:
    """The configuration of a policy with another environment, as `restore` makes it.

    Raises:
        ConfigError: it shows or takes something else than the training's, whose shapes `trained` has.
    """
    config, spec = _replaced(config, {"env.id": env_id})
    _check_fits(spec, trained)
    return config


def _replaced(config: Config, fields: Mapping[str, str]) -> tuple[Config, EnvSpec]:
    """A configuration with other fields of `[env]`, and what such an environment shows."""
    if "env.id" in fields:
        config = config.model_copy(
            # They were chosen for the other environment, and would be refused here, or mean something else.
            update={"env": config.env.model_copy(update={"kwargs": {}, "wrappers": ()})}
        )
    loaded = with_overrides(config, fields)
    spec = make_spec(loaded.config.env)
    check_settings(loaded.config.env, spec, loaded.chosen("env"))
    return loaded.config, spec


def _check_fits(spec: EnvSpec, trained: EnvSpec) -> None:
    """Refuse an environment that another network would be for."""
    shown = ("obs_shape", "obs_dtype", "obs_leaves", "stack", "instruction_words", "packed_bits")
    for name in (*shown, "actions"):
        now, before = getattr(spec, name), getattr(trained, name)
        if now != before:
            what = {"actions": "actions", "stack": "frames in a stack"}.get(name, "observations")
            raise ConfigError(
                f"the network does not fit {spec.id}: it was trained with other {what} "
                f"({name} {_shown(before)}) than these ({_shown(now)})"
            )


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def config_of(checkpoint: Checkpoint, modules: Collection[str], *, plays: bool = True) -> Config:
    """The configuration of the run that a checkpoint is of; see `troupe.common.permits.permitted_config`."""
    values = _part(checkpoint, "config")
    return permitted_config(values, modules, f"checkpoint {checkpoint.path}", plays=plays)


def spec_of(checkpoint: Checkpoint) -> EnvSpec:
    """What the run's environment showed, without making it."""
    values = _part(checkpoint, "spec")
    try:
        return TypeAdapter(EnvSpec).validate_python(values)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("spec", *problem["loc"])))
        raise CheckpointError(
            f"checkpoint {checkpoint.path}: {where} in meta.json: {problem['msg']}"
        ) from None


def agent_of(checkpoint: Checkpoint, config: Config, spec: EnvSpec, device: str = "cpu") -> Agent:
    """The agent of a checkpoint, ready to act.

    Raises:
        CheckpointError: its arrays are not those of the network, or not finite.
    """
    agent = make_agent(config.agent, spec, seed=config.run.seed, device=device)
    agent.load_state(checkpoint.arrays, _part(checkpoint, "agent"), to_learn=False)
    for name, array in agent.params().items():
        if not np.isfinite(array).all():  # it would play, at random
            raise CheckpointError(
                f"checkpoint {checkpoint.path}: the array {name} is not finite: training had diverged; "
                "give an earlier checkpoint"
            )
    return agent


def _part(checkpoint: Checkpoint, name: str) -> Any:
    try:
        return checkpoint.meta[name]
    except KeyError:
        raise CheckpointError(f"checkpoint {checkpoint.path} has no {name!r} in meta.json") from None
