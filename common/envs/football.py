"""Google Research Football: `football:SCENARIO`, one player, seen as the super minimap of four planes.

For gfootball 2.10.2 with gym 0.25.2. Planes are packed to a bit a pixel, stacked here, four steps deep
(`env.frame_stack`), and stored once per step. The engine repeats actions itself, so the other fields about
frames do not apply. It holds Python's lock while it computes: threads do not help, `env.processes` do.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import EnvSpec, VectorEnv, options, slot_seeds
from troupe.common.envs.pictures import push_frame
from troupe.common.envs.slots import SlotVector
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.spaces import ActionSpec

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "football:"
OPTIONS: dict[str, Any] = {"rewards": "scoring", "width": 96, "height": 72}
"""What `env.kwargs` may hold; `rewards` is `scoring` or `scoring,checkpoints`."""

PLANES = 4
"""Own team, other team, ball, active player."""
NUM_ACTIONS = 19
# Above all seeds that gfootball draws itself.
_MAX_SEED = 2_000_000_000


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"frame_stack", "kwargs"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shapes follow from the options; ConfigError where the engine or the scenario is not there."""
    _, builder = _import_football()
    name, scenarios = config.id.removeprefix(PREFIX), builder.all_scenarios()
    if name not in scenarios:  # gfootball would end the process
        near = difflib.get_close_matches(name, scenarios, n=1, cutoff=0.0)[0]
        raise ConfigError(f"gfootball has no scenario {name!r}: did you mean {PREFIX}{near}?")
    chosen = options(config, OPTIONS)
    if chosen["rewards"] not in ("scoring", "scoring,checkpoints"):
        raise ConfigError(f"env.kwargs rewards of {config.id} should be scoring or scoring,checkpoints")
    if chosen["width"] % 8 or min(chosen["width"], chosen["height"]) < 1:
        raise ConfigError(f"env.kwargs width and height of {config.id} should be at least 1, width in eights")
    return EnvSpec(
        id=config.id,
        obs_shape=(config.frame_stack, PLANES, chosen["height"], chosen["width"] // 8),
        obs_dtype="uint8",
        actions=ActionSpec.discrete(NUM_ACTIONS),
        stack=config.frame_stack,
        frames_per_step=1,
        pixels=True,
        packed_bits=True,
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` engines; evaluation counts goals only."""
    return FootballVector(config, num_slots, seed, threads, evaluation=evaluation)


class FootballVector(SlotVector):
    """Engines, whose games have a score."""

    def __init__(
        self, config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool
    ) -> None:
        spec, seeds = make_spec(config), slot_seeds(seed, num_slots).tolist()
        self._fields = [FootballSlot(config, spec, each, evaluation=evaluation) for each in seeds]
        super().__init__(config, spec, self._fields, seed, threads, evaluation=evaluation)
        self.steps_per_s = 10.0

    def _score(self, slot: int) -> float:
        return float(self._fields[slot].score)


class FootballSlot:
    """One engine."""

    score: int = 0
    """Goals of the game so far, less the other team's."""

    def __init__(self, config: EnvConfig, spec: EnvSpec, seed: int, *, evaluation: bool) -> None:
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
        self._random = np.random.default_rng(seed)
        self._env: Any = self._make()
        self.obs = np.zeros(spec.obs_shape, np.uint8)

    def _make(self) -> Any:
        football, _ = _import_football()
        with warnings.catch_warnings():  # gym's, of gfootball
            warnings.simplefilter("ignore", DeprecationWarning)
            return football.create_environment(**self._arguments)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new game with a seed of its own; the frames before its first are zeros."""
        config = self._env.unwrapped._config
        if seed is not None:
            self._random = np.random.default_rng(seed)
            config["episode_number"] = 0  # by which scenarios say who begins
        game = int(self._random.integers(_MAX_SEED))
        if not config.ScenarioConfig().deterministic:
            # As gfootball draws them, which would take `random`, one for all engines of a process.
            config.update({"game_engine_random_seed": game, "reverse_team_processing": game % 2 == 1})
        self.score = 0
        self.obs = np.zeros(self._spec.obs_shape, np.uint8)
        return self._push(self._env.reset())

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """One action. Where its time is over a game is cut short: the minimap shows no clock."""
        planes, reward, done, info = self._env.step(int(action))
        goals = int(info["score_reward"])
        self.score += goals
        # A goal may end a scenario in its very last step: then it has terminated.
        cut = bool(done) and not goals and self._env.unwrapped.observation()[0]["steps_left"] <= 0
        return self._push(planes), float(reward), bool(done) and not cut, cut

    def _push(self, planes: np.ndarray) -> np.ndarray:
        """The stack with `planes` uint8 `[H, W, 4]` as its newest frame, packed."""
        self.obs = push_frame(self.obs, np.packbits(np.moveaxis(planes, -1, 0), axis=-1))
        return self.obs

    def rebuild(self, seed: int) -> None:
        """A new engine."""
        with contextlib.suppress(AttributeError):  # closed, the failed one would be what gfootball takes next
            self._env.unwrapped._env._env = None
        self._random = np.random.default_rng(seed)
        self._env = self._make()

    def render(self) -> np.ndarray:
        """The minimap: own team, other team, and ball with active player as red, green and blue."""
        own, other, ball, active = np.unpackbits(self.obs[-1], axis=-1) * np.uint8(255)
        return np.stack([own, other, np.maximum(ball, active)], axis=-1)

    def close(self) -> None:
        """Stop the engine."""
        self._env.close()


def _import_football() -> tuple[Any, Any]:
    """Modules that make environments, and that know scenarios."""
    try:
        from gfootball import env
        from gfootball.env import scenario_builder
    except ImportError as error:
        raise MissingEngineError(
            f"football needs the module {error.name or 'gfootball'}: install gfootball 2.10.2 and gym 0.25.2 "
            "as docs/environments.md describes"
        ) from error
    logging.getLogger("absl").setLevel(logging.WARNING)  # or a line for every game
    return env, scenario_builder
