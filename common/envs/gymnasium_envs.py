"""Any Gymnasium environment with discrete actions: `gym:CartPole-v1`, or a stranger's `package.module:Id-v0`.

Pictures go through grey, resize and stack; everything else becomes a flat float32 vector. Options that belong
to the Atari emulator (frame skip, no-op starts, lives, fire, sticky actions) do not apply: pass `env.kwargs`.
"""

from __future__ import annotations

import difflib
import importlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from common.envs.base import EnvSpec, VectorEnv, slot_seeds
from common.envs.pixels import FrameProcessor, is_image, push_frame
from common.envs.slots import SlotVector
from common.errors import ConfigError

if TYPE_CHECKING:
    from common.config.schema import EnvConfig

log = logging.getLogger(__name__)

PREFIX = "gym:"


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shape and actions, from one copy that is closed again."""
    env = _make_env(config, render=False)
    try:
        return _spec_of(config, env)
    finally:
        env.close()


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` separate copies that step one after the other, or in `threads` threads."""
    spec, seeds = make_spec(config), slot_seeds(seed, num_slots).tolist()
    slots = [_Slot(config, spec, slot_seed, render=evaluation) for slot_seed in seeds]
    return SlotVector(config, spec, slots, seed, threads, evaluation=evaluation)


class _Slot:
    """One copy of the environment, and the observation as the agent sees it."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, seed: int, *, render: bool) -> None:
        self._config = config
        self._spec = spec
        self._render = render
        self._seed: int | None = seed
        self._frames = FrameProcessor(config.frame_size, grayscale=config.grayscale) if spec.pixels else None
        self.env = _make_env(config, render=render)
        self._first_action = int(self.env.action_space.start)
        self.obs = np.zeros(spec.obs_shape, spec.obs_dtype)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """First observation of a new episode; the first one after building is seeded in any case."""
        raw, _ = self.env.reset(seed=self._seed if seed is None else seed)
        self._seed = None
        self.obs = np.zeros(self._spec.obs_shape, self._spec.obs_dtype)
        return self._observe(raw)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """Next observation, raw reward, terminated, truncated; does not reset."""
        raw, reward, terminated, truncated, _ = self.env.step(self._first_action + action)
        return self._observe(raw), float(reward), bool(terminated), bool(truncated)

    def _observe(self, raw: Any) -> np.ndarray:
        if self._frames is not None:
            self.obs = push_frame(self.obs, self._frames(raw))
        else:
            self.obs = _flat(self.env.observation_space, raw)
        return self.obs

    def rebuild(self, seed: int) -> None:
        """Throw the environment away and make a new one."""
        try:
            self.env.close()
        except Exception as error:
            log.debug("closing a failed %s also failed: %s", self._config.id, error)
        self.env = _make_env(self._config, render=self._render)
        self._seed = seed

    def render(self) -> np.ndarray | None:
        """The environment's own picture; only evaluation environments can draw."""
        try:
            frame = self.env.render()
        except Exception as error:
            log.debug("%s cannot draw itself: %s", self._spec.id, error)
            frame = None
        if isinstance(frame, np.ndarray) and frame.ndim == 3:
            return frame.astype(np.uint8)
        if self._spec.pixels and self._config.grayscale:
            return np.repeat(self.obs[-1][..., None], 3, axis=-1)
        return None

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _spec_of(config: EnvConfig, env: Any) -> EnvSpec:
    gym = _import_gymnasium()
    if not isinstance(env.action_space, gym.spaces.Discrete):
        raise ConfigError(
            f"{config.id} has actions of {env.action_space}: only discrete actions are supported"
        )
    space = env.observation_space
    pixels = is_image(space)
    if pixels:
        frame_shape = FrameProcessor(config.frame_size, grayscale=config.grayscale).frame_shape
        shape: tuple[int, ...] = (config.frame_stack, *frame_shape)
    else:
        shape = (_flat_size(config, space),)
    return EnvSpec(
        id=config.id,
        obs_shape=shape,
        obs_dtype="uint8" if pixels else "float32",
        num_actions=int(env.action_space.n),
        stack=config.frame_stack if pixels else 0,
        frames_per_step=1,
        pixels=pixels,
    )


def _flat_size(config: EnvConfig, space: Any) -> int:
    gym = _import_gymnasium()
    try:
        return int(gym.spaces.flatdim(space))
    except (NotImplementedError, ValueError) as error:
        message = f"{config.id} has observations {space} that cannot be made a vector: wrap it"
        raise ConfigError(message) from error


def _flat(space: Any, raw: Any) -> np.ndarray:
    """One observation as a float32 vector; one-hot for discrete spaces, concatenated for dictionaries."""
    if isinstance(raw, np.ndarray) and raw.dtype != np.object_ and hasattr(space, "low"):
        return raw.astype(np.float32).reshape(-1)
    return _import_gymnasium().spaces.flatten(space, raw).astype(np.float32)


def _make_env(config: EnvConfig, *, render: bool) -> Any:
    """`gymnasium.make`, with every expected failure turned into one line that says what to do."""
    gym = _import_gymnasium()
    env_id = config.id.removeprefix(PREFIX)
    module = env_id.rpartition(":")[0]
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(_missing_module(config.id, module, error)) from error
        except Exception as error:  # a stranger's code may raise anything
            raise ConfigError(
                f"{config.id}: importing {module} failed: {type(error).__name__}: {_one_line(error)}"
            ) from error
    kwargs = dict(config.kwargs)
    try:
        if render and "render_mode" not in kwargs and "rgb_array" in _render_modes(gym, env_id):
            kwargs["render_mode"] = "rgb_array"
        return gym.make(env_id, **kwargs)
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"{config.id} lacks a package: {_one_line(error)}") from error
    except (gym.error.UnregisteredEnv, gym.error.Error) as error:
        raise ConfigError(_unknown_id(gym, config.id, env_id, error)) from error
    except Exception as error:  # whatever the environment's own constructor raises
        raise ConfigError(
            f"{config.id} cannot be made with kwargs {kwargs}: {type(error).__name__}: {_one_line(error)}"
        ) from error


def _render_modes(gym: Any, env_id: str) -> list[str]:
    """The render modes that the class advertises; reading them must not need a window system."""
    creator = gym.spec(env_id.rpartition(":")[2]).entry_point
    if isinstance(creator, str):
        creator = gym.envs.registration.load_env_creator(creator)
    return list(getattr(creator, "metadata", {}).get("render_modes", []))


def _missing_module(config_id: str, module: str, error: ImportError) -> str:
    missing = getattr(error, "name", None) or module
    known = "atari:GAME, gym:ID or package.module:ID"
    package = missing.split(".")[0].replace("_", "-")
    return f"{config_id} needs the module {missing}: pip install {package} (environment ids are {known})"


def _unknown_id(gym: Any, config_id: str, env_id: str, error: Exception) -> str:
    name = env_id.rpartition(":")[2]
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
        raise ConfigError("environments need the package gymnasium: pip install 'troupe[actor]'") from error
    return gymnasium
