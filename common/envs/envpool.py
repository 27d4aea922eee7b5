"""EnvPool's environments, stepped by its C++ threads: `envpool:CartPole-v1`, `envpool:Pong-v5`."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec, VectorEnv
from troupe.common.envs.engine import EngineVector, rows_of
from troupe.common.envs.gymnasium_spaces import action_spec
from troupe.common.envs.observed import spec_of
from troupe.common.errors import ConfigError, MissingEngineError, raised_line
from troupe.common.installation import install_command

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "envpool:"
_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_num_players")
"""Options of EnvPool that follow from other fields, or that would change what a step is."""


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"kwargs", "action_bins", "action_bins_ratio"} | (set() if spec.pixels else {"flatten"})


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shape and actions of the task."""
    pool = _make(config, 1, 1, 0)
    try:
        options, space = pool.config, pool.observation_space
        stack = int(options.get("stack_num", 0))
        shape: tuple[int, ...] = getattr(space, "shape", None) or ()
        if stack and len(shape) == 3 and shape[0] == stack and space.dtype == np.uint8:
            return EnvSpec(
                id=config.id,
                obs_shape=shape,
                obs_dtype="uint8",
                actions=action_spec(
                    config.id, pool.action_space, config.action_bins, config.action_bins_ratio
                ),
                stack=stack,
                frames_per_step=int(options.get("frame_skip", 1)),
                pixels=True,
            )
        return spec_of(config, space, pool.action_space)
    finally:
        pool.close()


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """One pool of `num_slots` environments with `threads` threads."""

    def make() -> _Pool:
        return _Pool(config, num_slots, threads, evaluation=evaluation)

    return EngineVector(config, make_spec(config), make, num_slots, seed, evaluation=evaluation)


class _Pool:
    """A pool with what `EngineVector` calls. A pool has its seed for life: another seed makes a new one."""

    def __init__(self, config: EnvConfig, num_envs: int, threads: int, *, evaluation: bool) -> None:
        self._config, self._threads, self._evaluation = config, min(threads, num_envs), evaluation
        self.num_envs = num_envs
        self._pool = self._made(0)
        self.metadata = self._pool.metadata
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space

    def _made(self, seed: int) -> Any:
        return _make(self._config, self.num_envs, self._threads, seed, evaluation=self._evaluation)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """With a mask the observations of its environments only."""
        if seed is not None:
            self._pool.close()
            self._pool = self._made(seed)
        obs, info = self._pool.reset(options=options)
        return rows_of(obs, np.argsort(info["env_id"]).tolist()), info

    def step(self, actions: Any) -> tuple[Any, ...]:
        """In the order of the environments."""
        obs, *outcome, info = self._pool.step(actions)
        order = np.argsort(info["env_id"]).tolist()
        return (rows_of(obs, order), *(part[order] for part in outcome), info)

    def render(self) -> Any:
        """A picture of each."""
        return self._pool.render(env_ids=np.arange(self.num_envs))

    def close(self) -> None:
        """Stop the threads."""
        self._pool.close()


def evaluation_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The same options for evaluations: whole games with their own rewards, which can be drawn."""
    whole = {name: False for name in ("episodic_life", "reward_clip") if name in kwargs}
    return {"render_mode": "rgb_array", **kwargs, **whole}


def _make(config: EnvConfig, num_envs: int, threads: int, seed: int, *, evaluation: bool = False) -> Any:
    """A pool; ConfigError where there is no such task, or not with these kwargs."""
    try:
        import envpool
    except ImportError as error:
        message = f"{config.id} needs the package {error.name or 'envpool'}: {install_command('envpool')}"
        raise MissingEngineError(message) from error
    name = config.id.removeprefix(PREFIX)
    known = envpool.list_all_envs()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"EnvPool has no {name!r}: did you mean {PREFIX}{near}?")
    for option in _OURS:
        if option in config.kwargs:
            raise ConfigError(f"env.kwargs {option} of {config.id} is set by Troupe: leave it out")
    options = evaluation_options(config.kwargs) if evaluation else config.kwargs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pool = envpool.make_gymnasium(name, num_envs=num_envs, num_threads=threads, seed=seed, **options)
            # Made when they are asked for first; Gymnasium then warns of bounds that EnvPool has as float64.
            _ = pool.observation_space, pool.action_space
            return pool
    except Exception as error:
        why = raised_line(error)
        raise ConfigError(f"{config.id} cannot be made with kwargs {config.kwargs}: {why}") from error
