"""Several agents in one game: parallel environments of PettingZoo's interface (Terry et al. 2021).

`pettingzoo:classic/rps-v2` is an ID of its registry, `pettingzoo:package.module` a module with a function or
class `parallel_env`, and `pettingzoo:package.module:Name` one of another name. All agents share one network,
so they need the same two spaces; only shorter vectors are filled up with zeros. Their slots are stepped in
`parallel.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from troupe.common.envs.base import EnvSpec, VectorEnv, check_copies, slot_seeds
from troupe.common.envs.gymnasium_envs import close_env, settings, wrapped
from troupe.common.envs.observed import spec_of
from troupe.common.envs.parallel import Copy, ParallelVector
from troupe.common.envs.registration import maker_of
from troupe.common.errors import ConfigError, MissingEngineError, caught, raised_line
from troupe.common.families import FAMILIES
from troupe.common.installation import import_module, install_command

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

__all__ = ["SEVERAL_AGENTS", "make_spec", "make_vector", "settings"]

PREFIX = "pettingzoo:"
_TURNS = "wrap it with pettingzoo.utils.conversions.aec_to_parallel, in a function of your own"
SEVERAL_AGENTS = True


def make_spec(config: EnvConfig) -> EnvSpec:
    """The spaces that all agents share, from one copy that is closed again."""
    env = _make_env(config, render=False)
    try:
        names = _names(config, env)
        space, action_space = (
            _shared(config, [get(name) for name in names], names, what)
            for get, what in ((env.observation_space, "observation"), (env.action_space, "action"))
        )
        roles = tuple(dict.fromkeys(map(_role, names)))
        # Where all play the same part, there is nothing to be told apart.
        tasks = roles if len(roles) > 1 else ()
        sides = [roles.index(_role(name)) for name in names] if tasks else range(len(names))
        spec = spec_of(config, space, action_space)
        return replace(spec, agents=len(names), tasks=tasks, sides=tuple(sides))
    finally:
        close_env(env, config.id)


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """As many copies as fill the slots; ConfigError where these do not divide among whole copies."""
    spec = make_spec(config)
    check_copies(spec, num_slots)

    def make() -> Any:
        return _make_env(config, render=evaluation)

    seeds = slot_seeds(seed, num_slots)[:: spec.agents].tolist()
    copies = [Copy(config, spec, make, own) for own in seeds]
    roles = [_role(name) if spec.tasks else "" for name in copies[0].names]
    return ParallelVector(config, spec, copies, roles, seed, threads, evaluation=evaluation)


def _names(config: EnvConfig, env: Any) -> list[Any]:
    names = list(getattr(env, "possible_agents", None) or ())
    if not names:
        raise ConfigError(
            f"{config.id} has no `possible_agents`: who may take part must be known before a game begins"
        )
    return names


def _role(name: Any) -> str:
    """`adversary` for `adversary_2`: agents that are only numbered play the same part."""
    return re.sub(r"[_-]?\d+$", "", str(name)) or "agent"  # of numbers alone


def _shared(config: EnvConfig, spaces: Sequence[Any], names: Sequence[Any], what: str) -> Any:
    """The space of all, or the longest of vectors that differ in length alone; else ConfigError."""
    first = spaces[0]
    if what == "observation" and all(_is_vector(space, first) for space in spaces):
        return max(spaces, key=lambda space: space.shape[0])
    for space, name in zip(spaces, names, strict=True):
        if space != first:
            raise ConfigError(
                f"{config.id} has unlike {what} spaces, which agents with one network cannot share "
                f"({_short(first)} for {names[0]}, {_short(space)} for {name}): make them alike in a wrapper "
                "of env.wrappers"
            )
    return first


def _is_vector(space: Any, like: Any) -> bool:
    """Whether both are rows of numbers of one type."""
    rows = [getattr(each, "shape", None) is not None and hasattr(each, "low") for each in (space, like)]
    return all(rows) and len(space.shape) == len(like.shape) == 1 and space.dtype == like.dtype


def _short(space: Any) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _make_env(config: EnvConfig, *, render: bool) -> Any:
    """One copy, in its wrappers, with every expected failure turned into one line that says what to do."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    if render:  # pygame is to draw into memory
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    make = _maker(config)
    try:
        env = wrapped(config, _made(make, dict(config.kwargs), render=render))
    except ConfigError:
        raise
    except caught() as error:  # whatever the environment's own constructor raises
        why = raised_line(error)
        raise ConfigError(f"{config.id} cannot be made with kwargs {config.kwargs}: {why}") from error
    if hasattr(env, "agent_iter"):
        raise ConfigError(f"{config.id} is an environment whose agents take turns (AEC): {_TURNS}")
    return env


def _maker(config: EnvConfig) -> Callable[..., Any]:
    """What makes a copy; ConfigError where there is nothing of that name."""
    module_name, _, name = config.id.removeprefix(PREFIX).partition(":")
    if "/" in module_name:
        zoo = _imported(config, "pettingzoo")
        if module_name not in zoo.parallel_registry:
            near = difflib.get_close_matches(module_name, zoo.parallel_registry, n=1, cutoff=0.0)
            raise ConfigError(f"unknown environment {config.id!r}: did you mean {PREFIX}{''.join(near)}?")
        return partial(zoo.make, "parallel", module_name)
    module = _imported(config, module_name)
    make = maker_of(module_name, name) if name else getattr(module, "parallel_env", None)
    if make is None:
        turns = f"; it has an `env`, whose agents take turns: {_TURNS}" if hasattr(module, "env") else ""
        missing = name or "parallel_env"
        raise ConfigError(f"{config.id}: the module {module_name} defines no {missing} to call{turns}")
    return make


def _imported(config: EnvConfig, module: str) -> Any:
    """A module; MissingEngineError with the extra where PettingZoo is what is missing."""
    try:
        return import_module(module, config.id)
    except ConfigError as error:
        # An environment of one's own may do without the packages.
        missing = (getattr(error.__cause__, "name", None) or "").partition(".")[0]
        if missing not in FAMILIES["pettingzoo"].packages:
            raise
        message = f"{config.id} needs the module {missing}: {install_command('pettingzoo')}"
        raise MissingEngineError(message) from error


def _made(make: Any, kwargs: dict[str, Any], *, render: bool) -> Any:
    if render and "render_mode" not in kwargs:
        try:
            return make(render_mode="rgb_array", **kwargs)
        except TypeError as error:
            if "render_mode" not in str(error):
                raise
    return make(**kwargs)
