"""Any Gymnasium environment: `gym:CartPole-v1`, or a stranger's `package.module:Id-v0` or `:ClassName`.

Families whose environments are registered with Gymnasium have a file with `registered`, see `_REGISTERED`.
What networks see of their observations is made in `observed.py`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

from troupe.common.envs.base import EnvSpec, VectorEnv, slot_seeds
from troupe.common.envs.names import own_name
from troupe.common.envs.observed import View, import_gymnasium, spec_of
from troupe.common.envs.registration import hint_of_module, maker_of, registered_by
from troupe.common.envs.returned import (
    OLD_INTERFACE,
    BadReturn,
    check_step,
    one_line,
    other_dtypes,
    reset_result,
)
from troupe.common.envs.slots import Outcome, SlotVector
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError, caught, raised_line
from troupe.common.installation import import_module

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

_log = logging.getLogger(__name__)

_USUAL_STEPS_PER_S = 30

PREFIX = "gym:"
# Modules whose `registered(name)` gives Gymnasium's id of what such a family calls `name`.
_REGISTERED = {"mujoco": "troupe.common.envs.mujoco", "old_gym": "troupe.common.envs.old_gym"}


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"kwargs", "flatten", "action_bins", "action_bins_ratio", "wrappers"} | (
        {"frame_size", "grayscale", "frame_stack"} if spec.pixels else set()
    )


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shape and actions, from one copy that is closed again."""
    env = _make_env(config, render=False)
    try:
        return spec_of(config, env.observation_space, env.action_space)
    finally:
        close_env(env, config.id)


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` separate copies that step one after the other, or in `threads` threads."""
    spec, seeds = make_spec(config), slot_seeds(seed, num_slots).tolist()
    slots = [_Slot(config, spec, slot_seed, render=evaluation) for slot_seed in seeds]
    returned = slots[0].returned
    vector = SlotVector(config, spec, slots, seed, threads, evaluation=evaluation, returned=returned)
    vector.steps_per_s = float(slots[0].env.metadata.get("render_fps") or _USUAL_STEPS_PER_S)
    return vector


def make_one(config: EnvConfig) -> Any:
    """One copy in its wrappers, for methods that are its own, or theirs."""
    return _make_env(config, render=False)


def inspect(config: EnvConfig) -> dict[str, Any]:
    """The spaces in Gymnasium's words, and what its own checker or `close` objects to (`objections`)."""
    from gymnasium.utils.env_checker import check_env

    env = _make_env(config, render=False)
    spaces = {
        name: " ".join(str(getattr(env, name)).split()) for name in ("observation_space", "action_space")
    }
    objections = []
    with contextlib.suppress(Exception):  # what reset() raises, the checker tells below
        objections += other_dtypes(env.observation_space, env.reset(seed=0)[0])
        objections += other_dtypes(env.observation_space, env.step(env.action_space.sample())[0])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        except Exception as error:
            objections.append(f"Gymnasium's checker refuses it: {type(error).__name__}: {one_line(error)}")
    if trouble := close_env(env, config.id):
        objections.append(trouble)
    for warning in warned:
        if issubclass(warning.category, UserWarning):
            text = str(warning.message).removeprefix("\x1b[33mWARN: ").removesuffix("\x1b[0m")
            objections.append(f"Gymnasium's checker warns: {' '.join(text.split())}")
    return {**spaces, "objections": list(dict.fromkeys(objections))}


def close_env(env: Any, env_id: str, level: int = logging.WARNING) -> str:
    """Close a copy that is not needed any more. What it raises is logged and returned in words."""
    try:
        env.close()
    except caught() as error:
        trouble = f"close() raised {raised_line(error)}"
        _log.log(level, "%s: %s", env_id, trouble)
        return trouble
    return ""


class _Slot:
    """One copy of the environment. Vectors of numbers it returns as they are; its vector looks at them."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, seed: int, *, render: bool) -> None:
        self._config = config
        self._spec = spec
        self._render = render
        self._seed: int | None = seed
        self.info: Any = None  # of the last step
        self._build()
        self.returned = self._view.returned

    def _build(self) -> None:
        self.env = _make_env(self._config, render=self._render)
        self._mode = getattr(self.env, "render_mode", None)
        # Through all wrappers, which takes a while.
        self._view = View(self._config, self._spec, self.env.observation_space)
        # Nothing to convert: `SlotVector` checks and converts the arrays of all copies at once.
        self._plain = self._view.plain

    def reset(self, seed: int | None = None) -> Any:
        """First observation of a new episode; the first one after building is seeded in any case."""
        try:
            result = self.env.reset(seed=self._seed if seed is None else seed)
        except TypeError as error:
            if "reset() got an unexpected keyword argument" not in str(error):
                raise
            raise BadReturn(f"takes no seed: {one_line(error)}; {OLD_INTERFACE}") from None
        raw = reset_result(result)
        self._seed = None
        self._view.begin()
        return raw if self._plain else self._view.of(raw)

    def step(self, action: Any) -> Outcome:
        """Next observation, raw reward, terminated, truncated; does not reset."""
        try:
            result = self.env.step(action)
        except ValueError as error:
            raise _unpacking_error(error) or error from None
        # `type` and not `isinstance`: the quick test passes nearly always, and the slow one is behind it.
        if type(result) is not tuple or len(result) != 5:
            check_step(result)
        raw, reward, terminated, truncated, self.info = result
        return raw if self._plain else self._view.of(raw), reward, terminated, truncated

    def rebuild(self, seed: int) -> None:
        """Throw the environment away and make a new one."""
        close_env(self.env, self._config.id, logging.DEBUG)
        self._build()
        self._seed = seed

    def render(self) -> Any:
        """The environment's own picture, or what the agent sees; only evaluation environments can draw."""
        try:
            frame = self.env.render()
            if frame is None:
                raise NoPictureError(
                    f"the render() of {self._spec.id} returns None (render mode: {self._mode})"
                )
            return frame
        except Exception:
            if self._spec.pixels:
                return self._view.obs[-1]
            raise

    def close(self) -> None:
        """Close the environment; one that cannot be closed is a warning, for it has done its work."""
        close_env(self.env, self._config.id)


def _unpacking_error(error: ValueError) -> BadReturn | None:
    """What to say where one of Gymnasium's wrappers could not take apart what the environment returned."""
    trace = error.__traceback__
    # Where it was raised says whose fault it is: an environment may raise the same words for reasons of its
    # own.
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    if not module.startswith("gymnasium.") or "values to unpack" not in str(error):
        return None
    return BadReturn(
        "returned another number of values from step() than five (observation, reward, terminated, "
        f"truncated, info): {error}; {OLD_INTERFACE}"
    )


def _gym_id(config_id: str) -> str:
    """What `gymnasium.make` takes, for `env.id`."""
    family, _, name = config_id.partition(":")
    if family in _REGISTERED:
        return str(importlib.import_module(_REGISTERED[family]).registered(name))
    return config_id.removeprefix(PREFIX)


def _make_env(config: EnvConfig, *, render: bool) -> Any:
    """`gymnasium.make`, with every expected failure turned into one line that says what to do."""
    gym = import_gymnasium()
    env_id = _gym_id(config.id)
    module = env_id.rpartition(":")[0]
    if module:
        import_module(module, config.id)
    kwargs = dict(config.kwargs)
    if render:  # pygame is to draw into memory, and to keep quiet
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        known = _known(gym, env_id)
        if render and "render_mode" not in kwargs and "rgb_array" in _render_modes(gym, known, env_id):
            kwargs["render_mode"] = "rgb_array"
        if known is not None:
            known.order_enforce = False  # every copy is reset before it is stepped
        # What it returns is checked here, at every step; Gymnasium would look at the first, and only warn.
        env = wrapped(config, gym.make(known or env_id, **{"disable_env_checker": True, **kwargs}))
        _ = env.observation_space, env.action_space  # one may be missing, or made only now
        return env
    except ConfigError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{config.id} lacks a package: {one_line(error)}") from error
    except (gym.error.UnregisteredEnv, gym.error.Error) as error:
        raise ConfigError(_unknown_id(gym, config.id, env_id, error)) from error
    except caught() as error:  # whatever the environment's own constructor raises
        why = raised_line(error)
        if "must inherit from the gymnasium.Env class" in why:
            why += f"; {OLD_INTERFACE}"
        raise ConfigError(f"{config.id} cannot be made with kwargs {kwargs}: {why}") from error


def wrapped(config: EnvConfig, env: Any) -> Any:
    """The environment in `env.wrappers`, the first one innermost."""
    for name in config.wrappers:
        module, _, attribute = name.partition(":")
        wrapper = getattr(import_module(module, f"env.wrappers of {config.id}"), attribute, None)
        if not callable(wrapper):
            raise ConfigError(f"env.wrappers {name!r}: the module {module} has no {attribute} to call")
        env = wrapper(env)
    return env


def _known(gym: Any, env_id: str) -> Any:
    """What Gymnasium knows of an id, or a specification for a class or function of the module; else None."""
    module, _, name = env_id.rpartition(":")
    if name in gym.registry:
        return copy.copy(gym.registry[name])
    make = maker_of(module, name)
    return gym.envs.registration.EnvSpec(name, entry_point=make) if make is not None else None


def _render_modes(gym: Any, known: Any, env_id: str) -> list[str]:
    """The render modes that the class advertises; reading them must not need a window system."""
    creator = (known or gym.spec(env_id.rpartition(":")[2])).entry_point
    if isinstance(creator, str):
        creator = gym.envs.registration.load_env_creator(creator)
    return list(getattr(creator, "metadata", {}).get("render_modes", []))


def nearest_registered(env_id: str) -> str:
    """Return the `gym:` id that is `env_id` or much like it; empty where Gymnasium has none."""
    registry = import_gymnasium().registry
    near = difflib.get_close_matches(env_id.removeprefix("gym:"), list(registry), n=1, cutoff=0.8)
    return f"gym:{near[0]}" if near else ""


def _unknown_id(gym: Any, config_id: str, env_id: str, error: Exception) -> str:
    name = env_id.rpartition(":")[2]
    known = own_name(env_id)
    if known.startswith("atari:"):
        return f"unknown environment {config_id!r}: did you mean {known}?"
    module = env_id.rpartition(":")[0]
    if module and name not in gym.registry:
        own = hint_of_module(config_id.removesuffix(f":{name}"), name, registered_by(module, gym.registry))
        return f"unknown environment {config_id!r}: {own}"
    ids = {_bare(each): each for each in gym.registry}
    near = difflib.get_close_matches(_bare(name), ids, n=1, cutoff=0.7)
    prefix = config_id.removesuffix(name)
    resembles = near and name not in gym.registry
    hint = f"did you mean {prefix}{ids[near[0]]}?" if resembles else one_line(error)
    return f"unknown environment {config_id!r}: {hint}"


def _bare(env_id: str) -> str:
    """An id as it is compared: its version and capitals, which many share, make none alike."""
    return (env_id.rpartition("-v")[0] or env_id).lower()
