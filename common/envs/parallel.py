"""Games of several agents, each with a slot of its own, put together to one auto-resetting `VectorEnv`.

A game is over when no agent is left. Until then the slots of those that have left stand idle (`Step.idle`),
as do those of agents that have not come yet. PettingZoo's agents never come back in the same game.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common.envs.base import (
    KEPT_FAILURES,
    EnvError,
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
    told_in,
)
from troupe.common.envs.calls import MAKING, RESET, STEP, Calls
from troupe.common.envs.gymnasium_envs import close_env
from troupe.common.envs.observed import View
from troupe.common.envs.returned import BadReturn, check_outcome, reset_result
from troupe.common.envs.spectator import picture_of
from troupe.common.errors import caught

if TYPE_CHECKING:
    from troupe.common.config.env_section import EnvConfig

MAX_GAMES_AWAY = 1000
"""Games in a row without one of the agents, after which its slot is a mistake."""

_USUAL_STEPS_PER_S = 15


@dataclass
class Moved:
    """What a step of one copy came to, for each of its `A` agents."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    obs: dict[int, np.ndarray]
    """Of the agents that took part, and of those that have come."""
    infos: dict[Any, Any]


class Copy:
    """One game. Agents are numbered in the order of `possible_agents`.

    Attributes:
        env: the environment.
        names: of its agents.
        here: bool `[A]`, who acts next.
        steps: of the game.
        failing: its last call failed.
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, make: Callable[[], Any], seed: int) -> None:
        self._config, self._spec, self._make = config, spec, make
        self.here = np.zeros(spec.agents, bool)
        self.steps = 0
        self.rebuilder = Rebuilder()
        self.failing = False
        self.build(seed)

    def build(self, seed: int) -> None:
        """Make the environment, or another in its place."""
        self._seed: int | None = seed
        self.env = self._make()
        self.names = list(self.env.possible_agents)
        if len(self.names) != self._spec.agents:
            raise BadReturn(f"has {len(self.names)} possible_agents, and had {self._spec.agents}")
        spaces = map(self.env.observation_space, self.names)
        self._views = [View(self._config, self._spec, space) for space in spaces]

    def reset(self, seed: int | None = None) -> dict[int, np.ndarray]:
        """A new game; what those see who are in it from the beginning."""
        seen = reset_result(self.env.reset(seed=self._seed if seed is None else seed))
        self._seed, self.steps = None, 0
        self._left = np.zeros(len(self.names), bool)
        self.here[:] = False
        obs = self._arrive(seen)
        if not obs:
            raise BadReturn("began a game without any agent")
        return obs

    def step(self, actions: Sequence[Any]) -> Moved:
        """One step of all who are here; the others' actions are not looked at."""
        names, count = self.names, len(self.names)
        acting = np.flatnonzero(self.here).tolist()
        result = self.env.step({names[agent]: actions[agent] for agent in acting})
        if not isinstance(result, tuple) or len(result) != 5:
            raise BadReturn(
                "did not return (observations, rewards, terminations, truncations, infos) from step()"
            )
        seen, rewards, terminations, truncations, infos = result
        moved = Moved(np.zeros(count), np.zeros(count, bool), np.zeros(count, bool), {}, infos)
        for agent in acting:
            name = names[agent]
            try:
                reward, ended, cut = rewards[name], terminations[name], truncations[name]
                raw = seen[name]
            except KeyError:
                raise BadReturn(f"left {name} out of what it returned from step()") from None
            check_outcome(reward, ended, cut)
            moved.reward[agent], moved.terminated[agent], moved.truncated[agent] = reward, ended, cut
            moved.obs[agent] = self._views[agent].of(raw)
            if not (ended or cut) and name not in self.env.agents:
                raise BadReturn(f"took {name} out of the game without terminating or truncating it")
        self._left |= moved.terminated | moved.truncated
        self.here &= ~self._left
        moved.obs |= self._arrive(seen)
        self.steps += 1
        return moved

    def _arrive(self, seen: Any) -> dict[int, np.ndarray]:
        """Let those in who are in the game and were not; what they see."""
        listed, obs = set(self.env.agents), {}
        for agent, name in enumerate(self.names):
            if name in listed and not self.here[agent] and not self._left[agent]:
                if name not in seen:
                    raise BadReturn(f"returned no observation of {name}, which is in the game")
                self._views[agent].begin()
                obs[agent] = self._views[agent].of(seen[name])
                self.here[agent] = True
        if listed - set(self.names):
            strange = sorted(map(str, listed - set(self.names)))
            raise BadReturn(f"has agents that are not in possible_agents: {', '.join(strange)}")
        return obs


class ParallelVector(VectorEnv):
    """Copies whose agents have a slot each; a copy is reset in the step in which its last agents leave."""

    def __init__(
        self,
        config: EnvConfig,
        spec: EnvSpec,
        copies: Sequence[Copy],
        roles: Sequence[str],
        seed: int,
        threads: int,
        *,
        evaluation: bool,
    ) -> None:
        """`copies` step in turn, or in `threads` threads; `roles` are the tasks of the agents of each."""
        self.spec, self.num_slots = spec, len(copies) * spec.agents
        self._config, self._copies, self._roles = config, copies, roles
        self._clip = "none" if evaluation else config.reward_clip
        self._most_steps = math.ceil(config.max_episode_frames / spec.frames_per_step)
        self._seeds = np.random.SeedSequence(seed)
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.calls = Calls(self.num_slots)
        self._games = GameTracker(self.num_slots)
        self._away = [0] * self.num_slots  # games in a row that the agent took no part in
        for number, own in enumerate(self._copy_seeds(seed)):
            self.calls.seeded(number * spec.agents, own)
        metadata = getattr(self._copies[0].env, "metadata", None) or {}
        self.steps_per_s = float(metadata.get("render_fps") or _USUAL_STEPS_PER_S)
        self._pool = ThreadPoolExecutor(threads, "env") if threads > 1 else None

    def _copy_seeds(self, seed: Seed) -> list[int]:
        """Of each copy: that of its first slot."""
        return slot_seeds(seed, self.num_slots)[:: self.spec.agents].tolist()

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """New games everywhere, `[S, *obs_shape]`; zeros where an agent is not in the game yet."""
        self._games = GameTracker(self.num_slots)
        obs = np.zeros((self.num_slots, *self.spec.obs_shape), self.spec.obs_dtype)
        seeds = [None] * len(self._copies) if seed is None else self._copy_seeds(seed)
        for number, own in enumerate(seeds):
            if own is not None:
                self.calls.seeded(number * self.spec.agents, own)
            self._begin(number, obs, own)
        return obs

    def step(self, actions: np.ndarray) -> Step:
        """One step of every agent that is in its game."""
        agents, shape = self.spec.agents, (self.num_slots, *self.spec.obs_shape)
        step = Step(
            np.zeros(shape, self.spec.obs_dtype),
            np.zeros(self.num_slots, np.float32),
            np.zeros(self.num_slots, bool),
            np.zeros(self.num_slots, bool),
        )
        here = np.concatenate([copy.here for copy in self._copies])
        results = self._play(self.spec.actions.natives(actions))
        rewards = np.zeros(self.num_slots)
        for number, moved in enumerate(results):
            if isinstance(moved, Moved):
                rewards[number * agents : (number + 1) * agents] = moved.reward
        self._games.add(rewards)
        step.reward[:] = clip_rewards(rewards, self._clip)
        for number, moved in enumerate(results):
            slots = range(number * agents, (number + 1) * agents)
            if isinstance(moved, Moved):
                step.idle += [slot for slot in slots if not here[slot]]
                self._take(number, moved, step, here[slots.start : slots.stop])
            else:
                step.discarded += slots
                self._recover(number, moved, step.obs, self._copies[number].steps + 1)
        return step

    def _play(self, actions: Sequence[Any]) -> list[Moved | BaseException]:
        """One step of each copy, or why there is none."""
        agents = self.spec.agents

        def run(number: int) -> Moved | BaseException:
            first, copy = number * agents, self._copies[number]
            self.calls.enter(first, STEP, copy.steps + 1)
            try:
                return copy.step(actions[first : first + agents])
            except caught() as error:
                return error
            finally:
                self.calls.leave(first)

        return list((self._pool.map if self._pool else map)(run, range(len(self._copies))))

    def _take(self, number: int, moved: Moved, step: Step, acted: np.ndarray) -> None:
        """Take in a step of a copy, in which the agents `acted` `[A]` took part."""
        copy, first = self._copies[number], number * self.spec.agents
        if copy.failing:
            copy.failing = False
            copy.rebuilder.succeeded()
        if copy.steps >= self._most_steps:
            # Termination wins: a game that ends in its last permitted step has no value after it.
            moved.truncated |= acted & ~moved.terminated
            copy.here[:] = False
        over = moved.terminated | moved.truncated
        slots = slice(first, first + self.spec.agents)
        step.terminated[slots], step.truncated[slots] = moved.terminated, moved.truncated
        for agent, obs in moved.obs.items():
            slot = first + agent
            if over[agent]:
                step.final_obs[slot] = obs.copy()
                frames = self._games.length(slot) * self.spec.frames_per_step
                info = moved.infos.get(copy.names[agent]) if isinstance(moved.infos, dict) else None
                episode = self._games.finish(slot, frames, self._roles[agent], told=told_in(info))
                step.episodes.append(episode)
                self._away[slot] = -1
            else:
                step.obs[slot] = obs
                if not acted[agent]:
                    self._games.clear(slot)  # it has come in this step
        if not copy.here.any():
            self._count_away(number)
            self._begin(number, step.obs)

    def _count_away(self, number: int) -> None:
        """Count a game, which is over, for those who had no part in it."""
        for agent, name in enumerate(self._copies[number].names):
            slot = number * self.spec.agents + agent
            self._away[slot] += 1
            if self._away[slot] >= MAX_GAMES_AWAY:
                raise EnvError(
                    f"{self.spec.id}: {name} is one of possible_agents, and took part in none of "
                    f"{MAX_GAMES_AWAY:,} games: leave it out of possible_agents"
                )

    def _begin(self, number: int, obs: np.ndarray, seed: int | None = None) -> None:
        """A new game of a copy; its first observations go into `obs` `[S, ...]`, zeros for who is away."""
        first = number * self.spec.agents
        obs[first : first + self.spec.agents] = 0
        self.calls.enter(first, RESET)
        try:
            seen = self._copies[number].reset(seed)
        except caught() as error:
            self._recover(number, error, obs, 0)
            return
        finally:
            self.calls.leave(first)
        for slot in range(first, first + self.spec.agents):
            self._games.clear(slot)
        for agent, each in seen.items():
            obs[first + agent] = each

    def _recover(self, number: int, error: BaseException, obs: np.ndarray, step: int) -> None:
        """Rebuild a copy until a reset succeeds, or until the rebuilder gives up; fills in `obs`."""
        copy, first = self._copies[number], number * self.spec.agents
        copy.failing = True
        failure = Failure(self.spec.id, cause_of(error), first, step, self.calls.seed_of(first))
        self._count_failure(failure, copy.rebuilder)
        # Another seed than before: a crash that the old one leads to would only come again.
        seed = int(self._seeds.spawn(1)[0].generate_state(1)[0] >> 1)
        self.calls.seeded(first, seed)
        self.calls.enter(first, MAKING)
        close_env(copy.env, self.spec.id, logging.DEBUG)
        try:
            copy.build(seed)
        except caught() as again:
            self._recover(number, again, obs, 0)
            return
        finally:
            self.calls.leave(first)
        self._begin(number, obs)

    def render_frame(self, slot: int) -> np.ndarray:
        """The picture of the slot's copy."""
        return picture_of(self.spec.id, self._copies[slot // self.spec.agents].env.render)

    def close(self) -> None:
        """Close every copy."""
        if self._pool:
            self._pool.shutdown()
        for copy in self._copies:
            close_env(copy.env, self.spec.id)
        super().close()
