"""Atari through ale-py's native vectoriser, with the standard preprocessing as named options.

What the vectoriser does differently from the classic wrappers, and what is done about it here:

* Its `episodic_life` resets the game at every lost life, so later lives are never seen. `life_loss_info` is
  used instead: a lost life terminates for learning while the game goes on, as in DQN's EpisodicLifeEnv.
* It reports a stale frame as `final_obs` of a lost life; the game goes on, so the current one is right.
* It clips rewards inside, which hides the score: raw rewards are taken and clipped here.
* It draws no-ops from `0 .. noop_max - 1`; one more is passed, so that up to `noop_max` happen.
* Sticky actions default to 0.25 for the registered ids: the probability is always passed.
* The stack is padded with zeros at reset, and the last frame of a finished game is the one before the end;
  both are the same in gymnasium's AtariPreprocessing.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import (
    KEPT_FAILURES,
    EnvSpec,
    Failure,
    GameTracker,
    Rebuilder,
    Seed,
    Step,
    VectorEnv,
    cause_of,
    clip_rewards,
    slot_seeds,
)
from troupe.common.envs.calls import RESET, STEP, Calls
from troupe.common.envs.spectator import NoPictureError
from troupe.common.errors import ConfigError
from troupe.common.installation import install_command
from troupe.common.spaces import ActionSpec

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "atari:"
_FRAMES_PER_S = 60


@dataclass(frozen=True)
class _Reset:
    """New games in every slot; `seeds` int64 `[S]`, None to go on from the former ones."""

    seeds: np.ndarray | None


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {
        *("frame_skip", "frame_size", "grayscale", "frame_stack", "noop_max", "episodic_life"),
        *("fire_reset", "sticky_actions", "full_action_space"),
    }


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shape and actions of the game, without starting a vector environment."""
    ale_py = _import_ale()
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    game = game_of(config.id)
    ale = ale_py.ALEInterface()
    ale.loadROM(ale_py.roms.get_rom_path(game))
    actions = ale.getLegalActionSet() if config.full_action_space else ale.getMinimalActionSet()
    size, stack = config.frame_size, config.frame_stack
    channels: tuple[int, ...] = () if config.grayscale else (3,)
    return EnvSpec(
        id=config.id,
        obs_shape=(stack, *channels, size, size),
        obs_dtype="uint8",
        actions=ActionSpec.discrete(len(actions)),
        stack=stack,
        frames_per_step=config.frame_skip,
        pixels=True,
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """All slots of one process in one native vectoriser."""
    return AtariVector(config, num_slots, seed, threads, evaluation=evaluation)


def game_of(env_id: str) -> str:
    """`atari:MsPacman` and `atari:ms_pacman` are both `ms_pacman`; an unknown name gets the nearest one."""
    ale_py = _import_ale()
    name = env_id.removeprefix(PREFIX)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace("-", "_")
    games = list(ale_py.roms.get_all_rom_ids())
    if snake in games:
        return snake
    # Gymnasium's names tell no word borders of digits and capitals: `UpNDown` is `up_n_down`.
    squeezed = {game.replace("_", ""): game for game in games}
    if snake.replace("_", "") in squeezed:
        return squeezed[snake.replace("_", "")]
    near = difflib.get_close_matches(snake, games, n=1, cutoff=0.4)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else "ale-py lists the games"
    raise ConfigError(f"unknown Atari game {name!r}: {hint}")


class AtariVector(VectorEnv):
    """`num_slots` games in C++ threads; one call steps them all."""

    def __init__(
        self, config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool
    ) -> None:
        self.spec = make_spec(config)
        self.num_slots = num_slots
        self._config = config
        self._clip = "none" if evaluation else config.reward_clip
        self._lives_end_episodes = config.episodic_life and not evaluation
        self._threads = threads
        self._seed: Seed | None = seed  # of the next reset
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(num_slots, whole=True)
        self._rebuilder = Rebuilder()
        self._games = GameTracker(num_slots)
        self._env: Any = self._build(num_slots)
        self._evaluation = evaluation
        self._played: list[_Reset | np.ndarray] = []  # since the last seeded reset; kept for films only
        self._twin: _Twin | None = None
        self.steps_per_s = _FRAMES_PER_S / config.frame_skip
        self._obs = np.zeros((num_slots, *self.spec.obs_shape), np.uint8)
        # Frame counters of the emulator, of the current game and of its whole life, as of the last step.
        self._game_frames = np.zeros(num_slots, np.int64)
        self._total_frames = np.zeros(num_slots, np.int64)

    def _build(self, num_slots: int, picture: tuple[int, int] | None = None) -> Any:
        """The vectoriser: of what the agent sees, or of pictures of this height and width, in colour."""
        from ale_py.vector_env import AtariVectorEnv

        config = self._config
        height, width = picture or (config.frame_size, config.frame_size)
        return AtariVectorEnv(
            game=game_of(config.id),
            num_envs=num_slots,
            num_threads=min(num_slots, self._threads),
            max_num_frames_per_episode=config.max_episode_frames,
            repeat_action_probability=config.sticky_actions,
            full_action_space=config.full_action_space,
            # The protocol of `Step`. In the other mode the step after an end is a dummy that belongs to no
            # episode.
            autoreset_mode="SameStep",
            img_height=height,
            img_width=width,
            grayscale=config.grayscale and picture is None,
            stack_num=config.frame_stack,
            frameskip=config.frame_skip,
            maxpool=config.frame_skip > 1,
            noop_max=config.noop_max + 1 if config.noop_max else 0,
            use_fire_reset=config.fire_reset,
            episodic_life=False,
            life_loss_info=self._lives_end_episodes,
            reward_clipping=False,
        )

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """New games everywhere; uint8 `[S, stack, size, size]`."""
        seed, self._seed = self._seed if seed is None else seed, None
        # A seed makes the emulator load its ROM again, which takes a tenth of a second per slot.
        self.calls.enter(0, RESET)
        seeds = None if seed is None else slot_seeds(seed, self.num_slots)
        obs, info = self._env.reset(seed=seeds)
        self.calls.leave(0)
        self._games = GameTracker(self.num_slots)
        # A seed begins a history anew, so what came before is not needed to play it again.
        if seeds is not None:
            self._played, self._twin = [], None
        if self._evaluation:
            self._played.append(_Reset(seeds))
        self._obs = self._oriented(obs)
        self._game_frames = info["episode_frame_number"].astype(np.int64)
        self._total_frames = info["frame_number"].astype(np.int64)
        return self._obs

    def step(self, actions: np.ndarray) -> Step:
        """One agent step of every game."""
        self.calls.enter(0, STEP, self._games.longest() + 1)
        try:
            obs, rewards, terminated, truncated, info = self._env.step(actions)
        except Exception as error:
            return self._rebuild(error)
        finally:
            self.calls.leave(0)
        self._rebuilder.succeeded()
        if self._evaluation:
            self._played.append(actions.astype(np.int32))
        self._games.add(rewards)
        step = Step(self._oriented(obs), clip_rewards(rewards, self._clip), terminated, truncated)
        self._obs = step.obs
        for slot in np.flatnonzero(terminated | truncated).tolist():
            self._end(step, slot, info)
        self._game_frames = info["episode_frame_number"].astype(np.int64)
        self._total_frames = info["frame_number"].astype(np.int64)
        return step

    def _end(self, step: Step, slot: int, info: dict[str, np.ndarray]) -> None:
        """Fill in what ended in `slot`: a life, or a whole game."""
        # Within a game the frame number only grows; a lower one means that the game was started again. After
        # a time limit of a few frames it need not be lower: a game begins with up to `noop_max` of them.
        restarted = step.truncated[slot] or int(info["episode_frame_number"][slot]) <= self._game_frames[slot]
        if not restarted:
            step.final_obs[slot] = step.obs[slot]
            return
        step.final_obs[slot] = self._oriented(info["final_obs"][slot][None])[0]
        since = int(info["frame_number"][slot]) - self._total_frames[slot]
        # The counter of the new game has begun already; the emulator's own goes on through it and says how
        # many frames passed.
        frames = self._game_frames[slot] + since - int(info["episode_frame_number"][slot])
        step.episodes.append(self._games.finish(slot, int(frames)))

    def _rebuild(self, error: Exception) -> Step:
        """The vectoriser is one object: when it fails, every slot starts again."""
        failure = Failure(self._config.id, cause_of(error), None, self._games.longest() + 1)
        self._count_failure(failure, self._rebuilder)
        self._env = self._build(self.num_slots)
        zeros = np.zeros(self.num_slots, bool)
        obs = self.reset(seed=int(np.random.SeedSequence().generate_state(1)[0]))
        reward = np.zeros(self.num_slots, np.float32)
        return Step(obs, reward, zeros, zeros.copy(), discarded=list(range(self.num_slots)))

    def _oriented(self, obs: np.ndarray) -> np.ndarray:
        """Colour frames come as `[S, stack, H, W, 3]` and are handed on channel-first."""
        return obs if self._config.grayscale else np.ascontiguousarray(np.moveaxis(obs, -1, 2))

    def close(self) -> None:
        """Stop the emulator's threads. A vectoriser that lives until the interpreter ends prints warnings."""
        self._env = self._twin = None
        super().close()

    def render_frame(self, slot: int) -> np.ndarray:
        """The emulator's own picture, uint8 `[210, 160, 3]` for most games.

        The vectoriser hands out nothing but what the agent sees. So a second one, of one slot, in colour and
        full size, plays the same game: seed and actions determine it. It follows when it is asked.
        """
        if not self._evaluation:
            raise NoPictureError(f"{self.spec.id} is recorded as a video in evaluations only")
        if self._twin is None or self._twin.slot != slot:
            self._twin = _Twin(self._build(1, picture=_screen_size(self._config.id)), slot)
        return self._twin.follow(self._played)


class _Twin:
    """A vectoriser of one slot that does what a slot of another one has done."""

    def __init__(self, env: Any, slot: int) -> None:
        self.slot = slot
        self._env = env
        self._done = 0
        self._frame = np.zeros(0, np.uint8)

    def follow(self, played: Sequence[_Reset | np.ndarray]) -> np.ndarray:
        """Do what is new in `played`, and show the picture, uint8 `[H, W, 3]`."""
        for what in itertools.islice(played, self._done, None):
            if isinstance(what, np.ndarray):
                obs = self._env.step(what[self.slot : self.slot + 1])[0]
            else:
                seeds = None if what.seeds is None else what.seeds[self.slot : self.slot + 1]
                obs = self._env.reset(seed=seeds)[0]
            self._frame = obs[0, -1]
        self._done = len(played)
        return self._frame


def _screen_size(env_id: str) -> tuple[int, int]:
    """Height and width of the emulator's screen."""
    ale_py = _import_ale()
    ale = ale_py.ALEInterface()
    ale.loadROM(ale_py.roms.get_rom_path(game_of(env_id)))
    height, width = ale.getScreenDims()
    return height, width


def _import_ale() -> Any:
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise ConfigError(f"Atari needs the package ale-py: {install_command('actor')}") from error
    return ale_py
