"""DeepMind Lab: `dmlab:LEVEL`, or `dmlab:dmlab30` for its thirty levels, shared out among a run's slots.

Written against the documented interface of the module `deepmind_lab`, which no package index has; tests use
a stand-in for it. `env.frame_skip` is the number of action repeats; of the other fields about frames none
applies. Observations are the picture `[3, height, width]` with the level's instruction in a row below it.

An episode ends when the engine stops, and has no observation then: the last one stands for it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.data.instructions import MAX_WORDS, with_instruction, word_ids
from troupe.common.envs.base import EnvSpec, VectorEnv, options, slot_seeds
from troupe.common.envs.slots import SlotVector
from troupe.common.errors import ConfigError, MissingEngineError
from troupe.common.spaces import ActionSpec

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

PREFIX = "dmlab:"
OPTIONS: dict[str, Any] = {
    "width": 96,
    "height": 72,
    "instructions": True,
    "dataset_path": "",  # the pictures that two of the psychlab levels show
    "level_cache_dir": "",  # where compiled maps are kept: many levels are slow without
    "renderer": "software",
}
"""What `env.kwargs` may hold."""

ACTIONS = np.array(
    [
        (0, 0, 0, 1, 0, 0, 0),  # forward
        (0, 0, 0, -1, 0, 0, 0),  # back
        (0, 0, -1, 0, 0, 0, 0),  # strafe left
        (0, 0, 1, 0, 0, 0, 0),  # strafe right
        (-20, 0, 0, 0, 0, 0, 0),  # look left
        (20, 0, 0, 0, 0, 0, 0),  # look right
        (-20, 0, 0, 1, 0, 0, 0),  # look left, forward
        (20, 0, 0, 1, 0, 0, 0),  # look right, forward
        (0, 0, 0, 0, 1, 0, 0),  # fire
    ],
    np.intc,
)
"""The nine actions of Espeholt et al. 2018: look (sideways, up), strafe, move, fire, jump, crouch."""

DMLAB30 = (
    "rooms_collect_good_objects_train",
    "rooms_exploit_deferred_effects_train",
    "rooms_select_nonmatching_object",
    "rooms_watermaze",
    "rooms_keys_doors_puzzle",
    "language_select_described_object",
    "language_select_located_object",
    "language_execute_random_task",
    "language_answer_quantitative_question",
    "lasertag_one_opponent_small",
    "lasertag_three_opponents_small",
    "lasertag_one_opponent_large",
    "lasertag_three_opponents_large",
    "natlab_fixed_large_map",
    "natlab_varying_map_regrowth",
    "natlab_varying_map_randomized",
    "skymaze_irreversible_path_hard",
    "skymaze_irreversible_path_varied",
    "psychlab_arbitrary_visuomotor_mapping",
    "psychlab_continuous_recognition",
    "psychlab_sequential_comparison",
    "psychlab_visual_search",
    "explore_object_locations_small",
    "explore_object_locations_large",
    "explore_obstructed_goals_small",
    "explore_obstructed_goals_large",
    "explore_goal_locations_small",
    "explore_goal_locations_large",
    "explore_object_rewards_few",
    "explore_object_rewards_many",
)
HELD_OUT = {name: name.removesuffix("_train") + "_test" for name in DMLAB30 if name.endswith("_train")}
_TRAINED = {held_out: name for name, held_out in HELD_OUT.items()}
HELD_OUT_SEED = str(0x600D5EED)
"""Mixed into the levels' own draws, so that evaluation sees what training does not."""


def settings(spec: EnvSpec) -> set[str]:
    """Fields of `[env]` that mean something here, in addition to those of all families."""
    return {"frame_skip", "kwargs"}


def make_spec(config: EnvConfig) -> EnvSpec:
    """Shapes follow from the options; ConfigError where the engine is not installed."""
    _import_lab()
    chosen = options(config, OPTIONS)
    if chosen["width"] < 2 * MAX_WORDS:
        raise ConfigError(f"env.kwargs width of {config.id} should be at least {2 * MAX_WORDS}")
    words = MAX_WORDS if chosen["instructions"] else 0
    levels = levels_of(config.id, evaluation=False)
    return EnvSpec(
        id=config.id,
        obs_shape=(3, chosen["height"] + bool(words), chosen["width"]),
        obs_dtype="uint8",
        actions=ActionSpec.discrete(len(ACTIONS)),
        stack=0,
        frames_per_step=config.frame_skip,
        pixels=True,
        instruction_words=words,
        tasks=tuple(map(task_of, levels)) if len(levels) > 1 else (),
    )


def make_vector(config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool) -> VectorEnv:
    """`num_slots` engines, as if these were all slots until `assign`; evaluation plays held-out levels."""
    return LabVector(config, num_slots, seed, threads, evaluation=evaluation)


class LabVector(SlotVector):
    """Engines, each in its slot's share of the levels."""

    def __init__(
        self, config: EnvConfig, num_slots: int, seed: int, threads: int, *, evaluation: bool
    ) -> None:
        spec, self._levels = make_spec(config), levels_of(config.id, evaluation=evaluation)
        seeds = slot_seeds(seed, num_slots).tolist()
        self._labs = [
            LabSlot(config, spec, turns(i, num_slots, self._levels), seeds[i], evaluation=evaluation)
            for i in range(num_slots)
        ]
        super().__init__(config, spec, self._labs, seed, threads, evaluation=evaluation)
        self.steps_per_s = 60 / config.frame_skip

    def assign(self, slots: Sequence[int], total_slots: int) -> None:
        """Share the levels out anew; engines that are in the level of another slot here change places."""
        wanted = [turns(slot, total_slots, self._levels) for slot in slots]
        free, placed = list(self._labs), dict[int, LabSlot]()
        for place, levels in enumerate(wanted):
            fit = next((lab for lab in free if lab.level == levels[0]), None)
            if fit is not None:
                free.remove(fit)
                placed[place] = fit
        self._labs[:] = [placed.get(place) or free.pop() for place in range(len(wanted))]
        for lab, levels in zip(self._labs, wanted, strict=True):
            lab.take_turns(levels)

    def _task(self, slot: int) -> str:
        return task_of(self._labs[slot].level) if len(self._levels) > 1 else ""


def turns(slot: int, total_slots: int, levels: Sequence[str]) -> list[str]:
    """The levels that a slot of the run plays in turn, an episode each.

    With as many slots as levels a slot has one for good, for a new level is a new engine. With fewer, game
    `r` of slot `s` is level `s + r * total_slots`: together they play all, as evenly as can be.
    """
    if total_slots >= len(levels):
        return [levels[slot % len(levels)]]
    return list(levels[slot::total_slots])


def task_of(level: str) -> str:
    """A level's name in tables of scores: without the folder, and the same for its held-out variant."""
    name = level.rpartition("/")[2]
    return _TRAINED.get(name, name)


def levels_of(env_id: str, *, evaluation: bool) -> list[str]:
    """The engine's names of the levels that `env_id` stands for."""
    name = env_id.removeprefix(PREFIX)
    names = list(DMLAB30) if name == "dmlab30" else [name]
    if evaluation:
        names = [HELD_OUT.get(name, name) for name in names]
    known = {*DMLAB30, *HELD_OUT.values()}
    return [f"contributed/dmlab30/{name}" if name in known else name for name in names]


class LabSlot:
    """One engine, in one level after the other."""

    def __init__(
        self, config: EnvConfig, spec: EnvSpec, levels: list[str], seed: int, *, evaluation: bool
    ) -> None:
        self.level = levels[0]
        self.take_turns(levels)
        self._spec = spec
        self._options = options(config, OPTIONS)
        self._evaluation = evaluation
        self._random = np.random.default_rng(seed)
        self._lab: Any = self._make()
        self.obs = np.zeros(spec.obs_shape, np.uint8)

    def _make(self) -> Any:
        chosen = self._options
        settings = {"width": str(chosen["width"]), "height": str(chosen["height"]), "logLevel": "WARN"}
        if chosen["dataset_path"]:
            settings["datasetPath"] = chosen["dataset_path"]
        if self._evaluation:
            settings |= {"allowHoldOutLevels": "true", "mixerSeed": HELD_OUT_SEED}
        wanted = ["RGB_INTERLEAVED"] + (["INSTR"] if chosen["instructions"] else [])
        folder = chosen["level_cache_dir"]
        return _import_lab().Lab(
            self.level,
            wanted,
            config=settings,
            renderer=chosen["renderer"],
            level_cache=LevelCache(Path(folder)) if folder else None,
        )

    def take_turns(self, levels: list[str]) -> None:
        """Play these, an episode each, from the first on."""
        self._turns = itertools.cycle(levels)

    def reset(self, seed: int | None = None) -> np.ndarray:
        """A new episode with a seed of its own, in the next level."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        level = next(self._turns)
        # Only then: an engine takes seconds to start, and compiling a map may take much longer.
        if level != self.level:
            self.level = level
            self.close()
            self._lab = self._make()
        self._lab.reset(seed=int(self._random.integers(2**31)))  # the engine takes no numpy integer
        self.obs = self._observe()
        return self.obs

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool]:
        """One action, repeated; the engine ends episodes by itself, and levels know of their end."""
        reward = float(self._lab.step(ACTIONS[action], num_steps=self._spec.frames_per_step))
        ended = not self._lab.is_running()
        # The engine has no observation after its end and raises where it is asked for one.
        if not ended:
            self.obs = self._observe()
        return self.obs, reward, ended, False

    def _observe(self) -> np.ndarray:
        observations = self._lab.observations()
        picture = np.moveaxis(observations["RGB_INTERLEAVED"], -1, 0)
        if not self._spec.instruction_words:
            return np.ascontiguousarray(picture)
        return with_instruction(picture, word_ids(observations["INSTR"]))

    def rebuild(self, seed: int) -> None:
        """A new engine."""
        self.close()
        self._random = np.random.default_rng(seed)
        self._lab = self._make()

    def render(self) -> np.ndarray:
        """The picture that the agent sees."""
        height = self.obs.shape[1] - bool(self._spec.instruction_words)
        return np.ascontiguousarray(np.moveaxis(self.obs[:, :height], 0, -1))

    def close(self) -> None:
        """Stop the engine."""
        self._lab.close()


class LevelCache:
    """Compiled maps in a directory that processes may share, as the engine asks for them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _file(self, key: str) -> Path:
        # Keys are the engine's and may hold anything that a file name must not.
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._directory / name[:2] / name[2:]

    def fetch(self, key: str, pk3_path: str) -> bool:
        """Copy the map `key` to `pk3_path`; False where it is not here."""
        try:
            shutil.copyfile(self._file(key), pk3_path)
        except FileNotFoundError:
            return False
        return True

    def write(self, key: str, pk3_path: str) -> None:
        """Keep the map at `pk3_path` as `key`."""
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Another name and a rename: processes share the folder, and one must not read what another is
        # writing.
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        os.close(handle)
        shutil.copyfile(pk3_path, temporary)
        os.replace(temporary, file)  # a reader gets all of it or nothing


def _import_lab() -> Any:
    try:
        import deepmind_lab
    except ImportError as error:
        raise MissingEngineError(
            "dmlab needs the module deepmind_lab, which no package index has: build and install it as "
            "google-deepmind/lab describes under python/pip_package (see docs/environments.md)"
        ) from error
    return deepmind_lab
