"""Environments behind one `make`: a family is one file and one line in `FAMILIES`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from common.envs.base import EnvError, EnvSpec, Episode, Step, VectorEnv
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.config.schema import EnvConfig

__all__ = ["EnvError", "EnvSpec", "Episode", "Step", "VectorEnv", "make_spec", "make_vector"]

FAMILIES = {
    "atari": "common.envs.atari",
    "dmlab": "common.envs.dmlab",
    "football": "common.envs.football",
    "gym": "common.envs.gymnasium_envs",
}


def make_spec(config: EnvConfig) -> EnvSpec:
    """What networks and accumulators need to know about the configured environment; cheap."""
    return _family(config.id).make_spec(config)


def make_vector(
    config: EnvConfig, num_slots: int, seed: int, threads: int = 1, *, evaluation: bool = False
) -> VectorEnv:
    """`num_slots` copies of the configured environment; `evaluation` plays full games without clipping."""
    return _family(config.id).make_vector(config, num_slots, seed, threads, evaluation=evaluation)


def _family(env_id: str) -> Any:
    prefix, colon, name = env_id.partition(":")
    if not colon or not name:
        raise ConfigError(
            f"environment id {env_id!r} has no family: write atari:GAME, gym:ID, dmlab:LEVEL, "
            "football:SCENARIO or package.module:ID"
        )
    # A prefix that is no family is the module that registers a stranger's environment with Gymnasium.
    return importlib.import_module(FAMILIES.get(prefix, FAMILIES["gym"]))
