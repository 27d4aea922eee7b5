"""DeepMind Control Suite: `dm_control:walker-walk`, the domain and the task (Tassa et al. 2018).

An observation is the numbers of all that the task shows, float32, in the suite's order; an action is its real
numbers. Episodes are cut after the suite's time limit, which truncates them: no task ends by itself, but for
those whose last discount is 0.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs import mujoco
from troupe.common.envs.base import EnvSpec, VectorEnv, slot_seeds
from troupe.common.envs.slots import Outcome, SlotVector
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.installation import install_command
from troupe.common.spaces import ActionSpec, Leaf

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "dm_control:"
_PICTURE = {"height": 240, "width": 320, "camera_id": 0}


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"kwargs", "action_bins", "action_bins_ratio"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """Numbers and actions of the task, from one copy that is closed again."""
    env = _make(config, 0)
    try:
        limits = env.action_spec()
        low, high = (np.broadcast_to(each, limits.shape).ravel() for each in (limits.minimum, limits.maximum))
        leaf = Leaf((), limits.shape, limits.dtype.name, low=tuple(low.tolist()), high=tuple(high.tolist()))
        return EnvSpec(
            id=config.id,
            obs_shape=tuple(env.observation_spec()["observations"].shape),
            obs_dtype="float32",
            actions=ActionSpec((leaf,), config.action_bins, config.action_bins_ratio),
            stack=0,
            frames_per_step=1,
            pixels=False,
        )
    finally:
        env.close()


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` copies that step one after the other, or in `threads` threads."""
    spec = make_spec(config)
    slots = [ControlSlot(config, spec, slot_seed) for slot_seed in slot_seeds(seed, num_slots).tolist()]
    returned = slots[0].returned
    vector = SlotVector(config, spec, slots, seed, threads, evaluation=evaluation, returned=returned)
    vector.steps_per_s = slots[0].steps_per_s
    return vector


class ControlSlot:
    """One copy of a task."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, seed: int) -> None:
        self._config = config
        self.rebuild(seed)
        self.steps_per_s = 1.0 / float(self._env.control_timestep())
        self.returned = np.zeros(spec.obs_shape, self._env.observation_spec()["observations"].dtype)

    def rebuild(self, seed: int) -> None:
        """A new copy with draws of its own."""
        self._env: Any = _make(self._config, seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new episode."""
        if seed is not None:
            self._env.task.random.seed(seed)
        return self._env.reset().observation["observations"]

    def step(self, action: np.ndarray) -> Outcome:
        """One step of control; the last one of an episode is truncated unless its discount is 0."""
        step = self._env.step(action)
        # dm_env's way of telling the two ends apart: the discount after a termination is 0, and at a time
        # limit it is not.
        last, over = step.last(), bool(step.discount == 0.0)
        return step.observation["observations"], step.reward, last and over, last and not over

    def render(self) -> np.ndarray:
        """What the first camera sees."""
        return np.asarray(self._env.physics.render(**_PICTURE))

    def close(self) -> None:
        """Free the simulation."""
        self._env.close()


def _make(config: EnvConfig, seed: int) -> Any:
    """A task of the suite; ConfigError where there is none of this name or with these kwargs."""
    mujoco.load(config.id, "dm-control")  # before the suite, which looks for a way to draw
    try:
        from dm_control import suite
    except ImportError as error:
        message = (
            f"{config.id} needs the module {error.name or 'dm_control'}: {install_command('dm-control')}"
        )
        raise MissingEngineError(message) from error
    name = config.id.removeprefix(PREFIX)
    tasks = {f"{domain}-{task}": (domain, task) for domain, task in suite.ALL_TASKS}
    if name not in tasks:
        near = difflib.get_close_matches(name, tasks, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown task {name!r} of the Control Suite: did you mean {PREFIX}{near}?")
    domain, task = tasks[name]
    try:
        return suite.load(
            domain,
            task,
            task_kwargs={**config.kwargs, "random": seed},
            environment_kwargs={"flat_observation": True},
        )
    except TypeError as error:  # what the task's function says of an argument that it does not have
        raise ConfigError(f"{config.id} cannot be made with kwargs {config.kwargs}: {error}") from error
