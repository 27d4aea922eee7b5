"""Environments behind one `make`: a family is one file and one entry of `FAMILIES`, or a module elsewhere."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from troupe.common.envs.base import EnvError, EnvSpec, Episode, Step, VectorEnv, means_told
from troupe.common.envs.names import own_name
from troupe.common.envs.outside import OutsideFamily
from troupe.common.errors import ConfigError
from troupe.common.families import FAMILIES, installed_forms, outside_families, outside_family

if TYPE_CHECKING:
    from collections.abc import Iterable

    from troupe.common.config.env_section import EnvConfig

__all__ = [
    "EnvError",
    "EnvSpec",
    "Episode",
    "Step",
    "VectorEnv",
    "check_settings",
    "copy_slots",
    "environment_module",
    "inspect",
    "make_spec",
    "make_vector",
    "means_told",
]


def make_spec(config: EnvConfig) -> EnvSpec:
    """What networks and accumulators need to know about the configured environment; cheap."""
    return _family(config.id).make_spec(config)


def copy_slots(config: EnvConfig) -> int:
    """Slots that one copy takes, `EnvSpec.agents`; 1 without making one, where the family has no others."""
    family = _family(config.id)
    return make_spec(config).agents if hasattr(family, "SEVERAL_AGENTS") else 1


def make_vector(
    config: EnvConfig, num_slots: int, seed: int, threads: int = 1, *, evaluation: bool = False
) -> VectorEnv:
    """`num_slots` copies of the configured environment; `evaluation` plays full games without clipping."""
    if config.processes:
        from troupe.common.envs.workers import WorkerVector

        return WorkerVector(config, num_slots, seed, threads, evaluation=evaluation)
    return _family(config.id).make_vector(config, num_slots, seed, threads, evaluation=evaluation)


def inspect(config: EnvConfig) -> dict[str, Any]:
    """What `gymnasium_envs.inspect` finds out; nothing where the family is another."""
    inspector = getattr(_family(config.id), "inspect", None)
    return {} if inspector is None else inspector(config)


def environment_module(env_id: str) -> str:
    """The module that making this environment imports; empty where only Troupe's own code is concerned.

    >>> environment_module("atari:pong"), environment_module("my.module:Env-v0")
    ('', 'my.module')
    """
    family, _, name = env_id.partition(":")
    if family in ("gym", "old_gym", "vector"):
        return name.rpartition(":")[0]
    if family == "pettingzoo":
        return "" if "/" in name else name.partition(":")[0]
    if family in FAMILIES:
        return ""
    return outside_family(family) or env_id.rpartition(":")[0]


COMMON_SETTINGS = {
    *("id", "reward_clip", "max_episode_frames", "check_timeout_s", "processes", "step_timeout_s")
}
"""Fields of `[env]` that every family knows."""


def check_settings(config: EnvConfig, spec: EnvSpec, given: Iterable[str]) -> None:
    """Raise ConfigError where a field of `[env]` that somebody has `given` means nothing to the family."""
    known = COMMON_SETTINGS | _family(config.id).settings(spec)
    strange = [name for name in given if name not in known]
    if strange:
        fields = ", ".join(f"env.{name}" for name in strange)
        family = config.id.partition(":")[0]
        family = family if family in (*FAMILIES, *outside_families()) else "gym"
        kind = "" if spec.pixels or family != "gym" else " with observations that are no pictures"
        kwargs = "; the environment's own options go into env.kwargs" if "kwargs" in known else ""
        raise ConfigError(
            f"{fields} would have no effect: {config.id} is of the family `{family}`{kind}, which has no use "
            f"for {'it' if len(strange) == 1 else 'them'}; leave out what does not apply{kwargs}"
        )


def _family(env_id: str) -> Any:
    prefix, colon, name = env_id.partition(":")
    if not colon or not name:
        known = own_name(env_id)
        if known.startswith("gym:"):
            known = _module("gym").nearest_registered(known)
        if known:
            raise ConfigError(f"environment id {env_id!r} has no family: did you mean {known}?")
        *forms, last = installed_forms()
        raise ConfigError(f"environment id {env_id!r} has no family: write {', '.join(forms)} or {last}")
    if prefix in FAMILIES:
        return _module(prefix)
    if outside := outside_family(prefix):
        return OutsideFamily(prefix, outside)
    near = difflib.get_close_matches(prefix, [*FAMILIES, *outside_families()], n=1, cutoff=0.75)
    if near and "." not in prefix and importlib.util.find_spec(prefix) is None:
        raise ConfigError(
            f"{env_id}: there is neither a family nor a module {prefix}; did you mean {near[0]}:{name}? "
            "(A file of yours is found if PYTHONPATH names its folder)"
        )
    # A prefix that is no family is the module that registers a stranger's environment with Gymnasium.
    return _module("gym")


def _module(family: str) -> Any:
    return importlib.import_module(f"troupe.common.envs.{FAMILIES[family].module}")
