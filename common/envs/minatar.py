"""MinAtar: `minatar:GAME`, five Atari games as planes of 10 x 10 cells (Young & Tian 2019).

An observation is uint8 `[C, 10, 10]`, a plane for each kind of object: 255 where one is, else 0, so that a
network that divides by 255 sees the paper's input. Sticky actions are drawn here (`env.sticky_actions`; the
paper has 0.1). Without `env.full_action_space` there are only the actions that do something in the game.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec, VectorEnv, options, slot_seeds
from troupe.common.envs.slots import Outcome, SlotVector
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.installation import install_command
from troupe.common.spaces import ActionSpec

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "minatar:"
GAMES = ("asterix", "breakout", "freeway", "seaquest", "space_invaders")
OPTIONS: dict[str, Any] = {"difficulty_ramping": True}
"""What `env.kwargs` may hold: whether asterix, seaquest and space_invaders become harder in a game."""

_CELL_PIXELS = 16
_STEPS_PER_S = 10.0


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"sticky_actions", "full_action_space", "kwargs"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """Planes and actions of the game; ConfigError where there is no such game, or MinAtar is missing."""
    options(config, OPTIONS)
    package, name = _package(config)
    game = package.Environment(name)
    height, width, planes = game.state_shape()
    return EnvSpec(
        id=config.id,
        obs_shape=(planes, height, width),
        obs_dtype="uint8",
        actions=ActionSpec.discrete(len(_actions(config, game))),
        stack=0,
        frames_per_step=1,
        pixels=True,
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` games that step one after the other."""
    spec = make_spec(config)
    slots = [MinAtarSlot(config, slot_seed) for slot_seed in slot_seeds(seed, num_slots).tolist()]
    vector = MinAtarVector(config, spec, slots, seed, threads, evaluation=evaluation, returned=slots[0].obs)
    vector.steps_per_s = _STEPS_PER_S
    return vector


class MinAtarVector(SlotVector):
    """Games whose cells become bytes for all of them together."""

    def _seen(self, returned: np.ndarray) -> np.ndarray:
        """Planes uint8 `[N, C, 10, 10]` of states bool `[N, 10, 10, C]`."""
        planes = returned.transpose(0, 3, 1, 2).copy().view(np.uint8)
        return np.negative(planes, out=planes)  # -1 is 255, in half the time of a product


class MinAtarSlot:
    """One game, whose observation `obs` is the game's own bool `[10, 10, C]`."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._package, self._name = _package(config)
        self._sticky = config.sticky_actions
        self._ramping = options(config, OPTIONS)["difficulty_ramping"]
        self.rebuild(seed)
        self._actions = _actions(config, self._game)
        self.obs = np.zeros(self._game.state_shape(), bool)

    def rebuild(self, seed: int) -> None:
        """A new game with draws of its own."""
        self._game: Any = self._package.Environment(self._name, self._sticky, self._ramping)
        self._game.seed(seed)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new game. Without a seed the last action may stick to its first steps, as in the original."""
        if seed is not None:
            self._game.seed(seed)
            # Otherwise the first step might repeat an action of the game before, and a seed would not
            # determine a game.
            self._game.last_action = 0
        self._game.reset()
        self.obs = self._game.state()
        return self.obs

    def step(self, action: int) -> Outcome:
        """One action, or by chance the last one again."""
        reward, over = self._game.act(self._actions[action])
        self.obs = self._game.state()
        return self.obs, reward, over, False

    def render(self) -> np.ndarray:
        """The planes in colours of their own, later ones over earlier ones, uint8 `[160, 160, 3]`."""
        picture = np.zeros((*self.obs.shape[:2], 3), np.uint8)
        for number in range(self.obs.shape[2]):
            picture[self.obs[..., number]] = _COLOURS[number % len(_COLOURS)]
        return picture.repeat(_CELL_PIXELS, 0).repeat(_CELL_PIXELS, 1)

    def close(self) -> None:
        """Nothing is held."""


_COLOURS = np.array(
    [
        (66, 135, 245),
        (255, 255, 255),
        (120, 120, 120),
        (230, 85, 60),
        (245, 200, 66),
        (80, 200, 120),
        (190, 90, 220),
        (60, 210, 220),
        (250, 140, 190),
        (150, 110, 60),
    ],
    np.uint8,
)


def _actions(config: EnvConfig, game: Any) -> list[int]:
    """The game's numbers of the actions to choose from."""
    return list(range(game.num_actions())) if config.full_action_space else game.minimal_action_set()


def _package(config: EnvConfig) -> tuple[Any, str]:
    """MinAtar, and its name of the game; ConfigError where there is none of this name."""
    name = config.id.removeprefix(PREFIX).lower().replace("-", "_")
    if name not in GAMES:
        near = difflib.get_close_matches(name, GAMES, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown MinAtar game {name!r}: did you mean {PREFIX}{near}?")
    try:
        return importlib.import_module("minatar"), name
    except ImportError as error:
        message = f"{config.id} needs the module minatar: {install_command('minatar')}"
        raise MissingEngineError(message) from error
