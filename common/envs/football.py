"""Google Research Football: `football:SCENARIO`, one player, seen as the super minimap of four planes.

Written against the documented interface of gfootball 2.10 with gym 0.25; tests use a stand-in for it. Planes
are stacked here, four steps deep (`env.frame_stack`), and stored once per step. The engine repeats actions
itself: `env.frame_skip` has to be 1, and the other fields about frames do not apply. Games are not seeded.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from common.envs.base import EnvSpec, VectorEnv, options
from common.envs.pictures import push_frame
from common.envs.slots import SlotVector
from common.errors import ConfigError, MissingEngineError
from common.spaces import ActionSpec

if TYPE_CHECKING:
    from common.config.schema import EnvConfig

PREFIX = "football:"
OPTIONS: dict[str, Any] = {"rewards": "scoring", "width": 96, "height": 72}
"""What `env.kwargs` may hold; `rewards` is `scoring` or `scoring,checkpoints`."""

PLANES = 4
NUM_ACTIONS = 19


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, besides those that all families know."""
    return {"frame_skip", "frame_stack", "kwargs"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shapes follow from the options; ConfigError where the engine is not installed."""
    _import_football()
    chosen = options(config, OPTIONS)
    if chosen["rewards"] not in ("scoring", "scoring,checkpoints"):
        raise ConfigError(f"env.kwargs rewards of {config.id} should be scoring or scoring,checkpoints")
    if config.frame_skip != 1:
        raise ConfigError(f"{config.id} repeats actions itself: set env.frame_skip to 1")
    return EnvSpec(
        id=config.id,
        obs_shape=(config.frame_stack, PLANES, chosen["height"], chosen["width"]),
        obs_dtype="uint8",
        actions=ActionSpec.discrete(NUM_ACTIONS),
        stack=config.frame_stack,
        frames_per_step=1,
        pixels=True,
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` engines; evaluation counts goals only."""
    spec = make_spec(config)
    slots = [FootballSlot(config, spec, evaluation=evaluation) for _ in range(num_slots)]
    vector = SlotVector(config, spec, slots, seed, threads, evaluation=evaluation)
    vector.steps_per_s = 10.0
    return vector


class FootballSlot:
    """One engine."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, *, evaluation: bool) -> None:
        chosen = options(config, OPTIONS)
        self._spec = spec
        self._arguments = {
            "env_name": config.id.removeprefix(PREFIX),
            "stacked": False,
            "representation": "extracted",
            "rewards": "scoring" if evaluation else chosen["rewards"],
            "render": False,
            "channel_dimensions": (chosen["width"], chosen["height"]),
        }
        self._env: Any = _import_football().create_environment(**self._arguments)
        self.obs = np.zeros(spec.obs_shape, np.uint8)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new game; the frames before its first are zeros."""
        self.obs = np.zeros(self._spec.obs_shape, np.uint8)
        return self._push(self._env.reset())

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """One action; a game that is over is terminated."""
        planes, reward, done, _ = self._env.step(int(action))
        return self._push(planes), float(reward), bool(done), False

    def _push(self, planes: np.ndarray) -> np.ndarray:
        self.obs = push_frame(self.obs, np.moveaxis(planes, -1, 0))
        return self.obs

    def rebuild(self, seed: int) -> None:
        """A new engine."""
        with contextlib.suppress(Exception):  # a failed engine may fail at this as well
            self.close()
        self._env = _import_football().create_environment(**self._arguments)

    def render(self) -> np.ndarray:
        """The minimap: own team, other team, and ball with active player as red, green and blue."""
        own, other, active, ball = self.obs[-1]
        return np.stack([own, other, np.maximum(active, ball)], axis=-1)

    def close(self) -> None:
        """Stop the engine."""
        self._env.close()


def _import_football() -> Any:
    try:
        import gfootball.env as football
    except ImportError as error:
        raise MissingEngineError(
            f"football needs the module {error.name or 'gfootball'}: install gfootball 2.10.2 and gym 0.25.2 "
            "as docs/environments.md describes"
        ) from error
    return football
