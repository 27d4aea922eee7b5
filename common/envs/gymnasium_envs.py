"""Any Gymnasium environment: `gym:CartPole-v1`, or a stranger's `package.module:Id-v0` or `:ClassName`.

Families whose environments are registered with Gymnasium have a file with `registered`, see `_REGISTERED`.

Pictures go through grey, resize and stack; everything else becomes a flat float32 vector. What only looks
like a picture is refused, for little would learn from it as a vector, unless `env.flatten` says so.
"""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import logging
import operator
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec, VectorEnv, slot_seeds
from troupe.common.envs.gymnasium_spaces import action_spec, observation_leaves, picture_scales, stored_dtype
from troupe.common.envs.names import own_name
from troupe.common.envs.pictures import FrameProcessor, Layout, layout_of, push_frame
from troupe.common.envs.registration import hint_of_module, maker_of, registered_by
from troupe.common.envs.returned import (
    OLD_INTERFACE,
    BadReturn,
    check_finite,
    check_observation,
    check_step,
    reset_result,
)
from troupe.common.envs.slots import Outcome, SlotVector
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError
from troupe.common.installation import import_module, install_command
from troupe.common.spaces import Leaf, packed, unpacked

if TYPE_CHECKING:
    from troupe.common.config.schema import EnvConfig

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
        return _spec_of(config, env)
    finally:
        _close(env, config.id)


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` separate copies that step one after the other, or in `threads` threads."""
    spec, seeds = make_spec(config), slot_seeds(seed, num_slots).tolist()
    slots = [_Slot(config, spec, slot_seed, render=evaluation) for slot_seed in seeds]
    returned = slots[0].returned
    vector = SlotVector(config, spec, slots, seed, threads, evaluation=evaluation, returned=returned)
    vector.steps_per_s = float(slots[0].env.metadata.get("render_fps") or _USUAL_STEPS_PER_S)
    return vector


def make_plain(config: EnvConfig) -> Any:
    """One copy without any wrapper, for methods that are its own."""
    return _make_env(config, render=False).unwrapped


def inspect(config: EnvConfig) -> dict[str, Any]:
    """The spaces in Gymnasium's words, and what its own checker or `close` objects to (`objections`)."""
    from gymnasium.utils.env_checker import check_env

    env = _make_env(config, render=False)
    spaces = {
        name: " ".join(str(getattr(env, name)).split()) for name in ("observation_space", "action_space")
    }
    objections = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        except Exception as error:
            objections.append(f"Gymnasium's checker refuses it: {type(error).__name__}: {_one_line(error)}")
    if trouble := _close(env, config.id):
        objections.append(trouble)
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            text = str(warning.message).removeprefix("\x1b[33mWARN: ").removesuffix("\x1b[0m")
            objections.append(f"Gymnasium's checker warns: {' '.join(text.split())}")
    return {**spaces, "objections": list(dict.fromkeys(objections))}


def _close(env: Any, env_id: str, level: int = logging.WARNING) -> str:
    """Close a copy that is not needed any more. What it raises is logged and returned in words."""
    try:
        env.close()
    except Exception as error:
        trouble = f"close() raised {type(error).__name__}: {_one_line(error)}"
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
        self.obs = np.zeros(spec.obs_shape, spec.obs_dtype)
        self._build()
        self._frames: FrameProcessor | None = None
        if spec.pixels:
            layout = _layout(config, self._space)
            self._frames = FrameProcessor(config.frame_size, grayscale=config.grayscale, layout=layout)
        # Nothing to convert: `SlotVector` checks and converts the arrays of all copies at once.
        self._plain = not spec.pixels and not spec.obs_leaves and hasattr(self._space, "low")
        self.returned = np.zeros(self._space.shape, self._space.dtype) if self._plain else self.obs

    def _build(self) -> None:
        self.env = _make_env(self._config, render=self._render)
        self._mode = getattr(self.env, "render_mode", None)
        self._space = self.env.observation_space  # through all wrappers, which takes a while
        self._scales = picture_scales(self._space) if self._spec.obs_leaves else ()

    def reset(self, seed: int | None = None) -> Any:
        """First observation of a new episode; the first one after building is seeded in any case."""
        try:
            result = self.env.reset(seed=self._seed if seed is None else seed)
        except TypeError as error:
            if "reset() got an unexpected keyword argument" not in str(error):
                raise
            raise BadReturn(f"takes no seed: {_one_line(error)}; {OLD_INTERFACE}") from None
        raw = reset_result(result)
        self._seed = None
        if self._frames is not None:
            # A new array: the old stack may still be the last observation of the episode before.
            self.obs = np.zeros_like(self.obs)
        return raw if self._plain else self._observe(raw)

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
        return raw if self._plain else self._observe(raw), reward, terminated, truncated

    def _observe(self, raw: Any) -> np.ndarray:
        check_observation(self._space, raw)
        if self._frames is not None:
            self.obs = push_frame(self.obs, self._frames(raw))
        elif self._spec.obs_leaves:
            self.obs = self._packed(raw)
        else:
            self.obs = _import_gymnasium().spaces.flatten(self._space, raw).astype(np.float32)
        return self.obs

    def _packed(self, raw: Any) -> np.ndarray:
        leaves = self._spec.obs_leaves
        for leaf, scale in zip(leaves, self._scales, strict=True):
            if scale is not None:  # of pixels nothing would be left to see afterwards
                check_finite(np.asarray(functools.reduce(operator.getitem, leaf.path, raw)), leaf.path)
        row = packed(leaves, raw, self._scales)
        for leaf, array in zip(leaves, unpacked(leaves, row), strict=True):
            check_finite(array, leaf.path)
        return row

    def rebuild(self, seed: int) -> None:
        """Throw the environment away and make a new one."""
        _close(self.env, self._config.id, logging.DEBUG)
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
                return self.obs[-1]
            raise

    def close(self) -> None:
        """Close the environment; one that cannot be closed is a warning, for it has done its work."""
        _close(self.env, self._config.id)


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


def _spec_of(config: EnvConfig, env: Any) -> EnvSpec:
    actions = action_spec(config.id, env.action_space, config.action_bins, config.action_bins_ratio)
    space = env.observation_space
    pixels = _layout(config, space) is not None
    parts = _parts(config, space)
    dtype = "uint8"
    if parts:
        shape: tuple[int, ...] = (sum(leaf.nbytes for leaf in parts),)
    elif pixels:
        frame_shape = FrameProcessor(config.frame_size, grayscale=config.grayscale).frame_shape
        shape = (config.frame_stack, *frame_shape)
    else:
        shape = (_flat_size(config, space),)
        box = hasattr(space, "low")
        dtype = stored_dtype(space.dtype) if box else "float32"
    return EnvSpec(
        id=config.id,
        obs_shape=shape,
        obs_dtype=dtype,
        actions=actions,
        stack=config.frame_stack if pixels else 0,
        frames_per_step=1,
        pixels=pixels,
        obs_leaves=parts,
    )


def _layout(config: EnvConfig, space: Any) -> Layout | None:
    """How the environment shows pictures; None for vectors. ConfigError for pictures of no use."""
    if config.flatten:
        return None
    name, why = next(_unfit_pictures(space), ("", ""))
    if not why:
        return layout_of(space)
    size = _flat_size(config, space)
    raise ConfigError(
        f"{config.id} has pictures{name} {why}: wrap it, so that it returns one uint8 picture [H, W], "
        "[H, W, 1 or 3] or [1 or 3, H, W], or set env.flatten to true to have all that it returns as one "
        f"vector of {size:,} numbers"
    )


def _unfit_pictures(space: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and what is wrong of every picture that no convolution would get."""
    parts = getattr(space, "spaces", None)
    if parts is not None:
        for key, part in parts.items() if hasattr(parts, "items") else enumerate(parts):
            yield from _unfit_pictures(part, f"{name or ' in its observation'}[{key!r}]")
    else:
        try:
            layout_of(space)
        except ValueError as error:
            yield name, str(error)


def _flat_size(config: EnvConfig, space: Any) -> int:
    gym = _import_gymnasium()
    try:
        return int(gym.spaces.flatdim(space))
    except (NotImplementedError, ValueError) as error:
        message = f"{config.id} has observations {space} that cannot be made a vector: wrap it"
        raise ConfigError(message) from error


def _parts(config: EnvConfig, space: Any) -> tuple[Leaf, ...]:
    """The parts of an observation that is no Box; ConfigError where one has no use."""
    if config.flatten:
        return ()
    try:
        return observation_leaves(space)
    except ValueError as error:
        message = f"{config.id} has observations {space} that no network here can take: {error}; wrap it"
        raise ConfigError(message) from None


def _gym_id(config_id: str) -> str:
    """What `gymnasium.make` takes, for `env.id`."""
    family, _, name = config_id.partition(":")
    if family in _REGISTERED:
        return str(importlib.import_module(_REGISTERED[family]).registered(name))
    return config_id.removeprefix(PREFIX)


def _make_env(config: EnvConfig, *, render: bool) -> Any:
    """`gymnasium.make`, with every expected failure turned into one line that says what to do."""
    gym = _import_gymnasium()
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
        return _wrapped(config, gym.make(known or env_id, **{"disable_env_checker": True, **kwargs}))
    except ConfigError:
        raise
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{config.id} lacks a package: {_one_line(error)}") from error
    except (gym.error.UnregisteredEnv, gym.error.Error) as error:
        raise ConfigError(_unknown_id(gym, config.id, env_id, error)) from error
    except Exception as error:  # whatever the environment's own constructor raises
        why = f"{type(error).__name__}: {_one_line(error)}"
        if "must inherit from the gymnasium.Env class" in why:
            why += f"; {OLD_INTERFACE}"
        raise ConfigError(f"{config.id} cannot be made with kwargs {kwargs}: {why}") from error


def _wrapped(config: EnvConfig, env: Any) -> Any:
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
    registry = _import_gymnasium().registry
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
    near = difflib.get_close_matches(name, list(gym.registry), n=1, cutoff=0.5)
    prefix = config_id.removesuffix(name)
    hint = f"did you mean {prefix}{near[0]}?" if near and near[0] != name else _one_line(error)
    return f"unknown environment {config_id!r}: {hint}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _import_gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"environments need the package gymnasium: {install_command('actor')}") from error
    return gymnasium
