"""Suites: lists of environments, with the scores between which returns are normalised."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from troupe.common.config.presets import is_path, read_toml
from troupe.common.errors import ConfigError
from troupe.common.stats.scores import DMLAB30, RANDOM_AND_HUMAN, random_and_human

Suite = dict[str, tuple[float, float] | None]
"""Environment to its scores of 0 and of 1; None where there are none."""

# Aitchison et al. 2023, "Atari-5": the five games whose scores say most about the median over all 57.
_ATARI5 = ("battle_zone", "double_dunk", "name_this_game", "phoenix", "qbert")
_MINATAR5 = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
_MUJOCO5 = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")

SUITES: dict[str, tuple[str, ...]] = {
    "atari57": tuple(f"atari:{game}" for game in RANDOM_AND_HUMAN),
    "atari5": tuple(f"atari:{game}" for game in _ATARI5),
    "minatar5": tuple(f"minatar:{game}" for game in _MINATAR5),
    "dmlab30": tuple(f"dmlab:{level}" for level in DMLAB30),
    "mujoco5": tuple(f"mujoco:{name}" for name in _MUJOCO5),
}


def load(name: str) -> Suite:
    """The suite of this name, or that of a TOML file: `[tasks."ENV_ID"]` with `low` and `high`, or empty.

    Raises:
        ConfigError: there is no such suite, or the file is none.
    """
    if is_path(name):
        return _from_file(Path(name))
    if name not in SUITES:
        near = difflib.get_close_matches(name, SUITES, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown suite {name!r}; nearest: {near[0]} (there are {', '.join(SUITES)}, or a TOML file)"
        )
    return {env_id: random_and_human(env_id) for env_id in SUITES[name]}


def _from_file(path: Path) -> Suite:
    tables = read_toml(path)
    tasks = tables.get("tasks")
    if set(tables) != {"tasks"} or not isinstance(tasks, Mapping) or not tasks:
        raise ConfigError(
            f'{path} should have a table [tasks."ENV_ID"] for each environment, and nothing else'
        )
    return {str(env_id): _reference(path, str(env_id), scores) for env_id, scores in tasks.items()}


def _reference(path: Path, env_id: str, scores: Any) -> tuple[float, float] | None:
    if not isinstance(scores, Mapping):
        raise ConfigError(f'{path}: tasks."{env_id}" should be a table with low and high, or an empty one')
    if not scores:
        return random_and_human(env_id)
    values = [scores.get(name) for name in ("low", "high")]
    if set(scores) != {"low", "high"} or not all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        raise ConfigError(f'{path}: tasks."{env_id}" should have two numbers, low and high, or nothing')
    low, high = (float(value) for value in values if value is not None)
    # Infinite bounds have a difference of inf, and every score would be 0 or nan.
    if not low < high or high - low == float("inf"):
        raise ConfigError(f'{path}: tasks."{env_id}": low ({low:g}) should be less than high ({high:g})')
    return low, high
