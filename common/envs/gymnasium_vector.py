"""Environments that step all their copies at once: `vector:ID`, `vector:package.module:ID`.

The ID is registered with Gymnasium and has a `vector_entry_point`, or it is a class or function of the module
that makes a `gymnasium.vector.VectorEnv` of `num_envs` environments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from troupe.common.envs.base import EnvSpec, VectorEnv
from troupe.common.envs.engine import EngineVector
from troupe.common.envs.observed import spec_of
from troupe.common.envs.registration import hint_of_module, maker_of, registered_by
from troupe.common.errors import ConfigError, caught, raised_line
from troupe.common.installation import import_module, install_command

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "vector:"


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    pictures = {"frame_size", "grayscale", "frame_stack"} if spec.pixels else set()
    return {"kwargs", "flatten", "action_bins", "action_bins_ratio"} | pictures


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shape and actions, from an engine of one environment that is closed again."""
    engine = _make(config, 1)
    try:
        return spec_of(config, engine.single_observation_space, engine.single_action_space)
    finally:
        engine.close()


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """One engine of `num_slots` environments. It has its own threads, or none: `threads` are not used."""
    return EngineVector(
        config,
        make_spec(config),
        lambda: _make(config, num_slots, render=evaluation),
        num_slots,
        seed,
        evaluation=evaluation,
    )


def _make(config: EnvConfig, num_envs: int, *, render: bool = False) -> Any:
    """The engine, with every expected failure turned into one line that says what to do."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"environments need the package gymnasium: {install_command('actor')}") from error
    env_id = config.id.removeprefix(PREFIX)
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module, config.id)
    known, make = gymnasium.registry.get(name), maker_of(module, name) if module else None
    kwargs = dict(config.kwargs)
    if known is None and make is None:
        own = registered_by(module, gymnasium.registry) if module else []
        hint = hint_of_module(module, name, own) if module else "no such ID is registered with Gymnasium"
        raise ConfigError(f"unknown environment {config.id!r}: {hint}")
    if known is not None and known.vector_entry_point is None:
        raise ConfigError(
            f"{config.id}: {name} is registered without a vector_entry_point, so nothing steps all copies at "
            f"once: play it as {env_id if module else f'gym:{env_id}'}"
        )
    try:
        if render and known is not None and "render_mode" not in kwargs:
            kwargs |= _drawing(gymnasium, known)
        if known is not None:
            mode = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT
            engine = gymnasium.make_vec(name, num_envs, vectorization_mode=mode, **kwargs)
        else:
            assert make is not None
            engine = make(num_envs=num_envs, **kwargs)
    except caught() as error:  # whatever the engine's own constructor raises
        raise ConfigError(f"{config.id} cannot be made with kwargs {kwargs}: {raised_line(error)}") from error
    if not isinstance(engine, gymnasium.vector.VectorEnv):
        raise ConfigError(
            f"{config.id} makes a {type(engine).__name__}, which is no gymnasium.vector.VectorEnv: without "
            f"{PREFIX} it is played in a copy for each slot"
        )
    return engine


def _drawing(gymnasium: Any, known: Any) -> dict[str, str]:
    """The argument that makes an engine draw, if it says that it can."""
    creator = known.vector_entry_point
    if isinstance(creator, str):
        creator = gymnasium.envs.registration.load_env_creator(creator)
    modes = getattr(creator, "metadata", {}).get("render_modes", [])
    return {"render_mode": "rgb_array"} if "rgb_array" in modes else {}
