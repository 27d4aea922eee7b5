"""Acting in one process: environments, and the network that chooses for them."""

from __future__ import annotations

import time

import numpy as np

from common.agents import Agent
from common.agents.slot_states import Slots
from common.data.schema import Chunk
from common.envs import Episode, VectorEnv
from services.actor.acting import Timing


class Rollout:
    """Acts in all slots at once and cuts what happened into chunks; `timing.steps` counts every slot."""

    def __init__(
        self, agent: Agent, env: VectorEnv, chunk_steps: int, seed: int, timing: Timing | None = None
    ) -> None:
        self.env = env
        self.timing = timing or Timing()
        self._agent = agent
        seeds = np.random.SeedSequence(seed).generate_state(2)
        self._rng = np.random.default_rng(int(seeds[0]))
        self._slots = Slots(agent, env.reset(int(seeds[1])), chunk_steps)

    @property
    def episodes(self) -> list[Episode]:
        """Games that finished since the caller last cleared the list."""
        return self.timing.episodes

    @property
    def epsilons(self) -> np.ndarray:
        """Exploration of each slot, `[S]` float32."""
        return self._slots.epsilons

    def explore(self, slots: list[int], total_slots: int) -> None:
        """Take over the exploration of these `slots` of the run, one for each environment."""
        self._slots.explore(slots, total_slots)

    def step(self, version: int) -> list[Chunk]:
        """One step of every slot with the current parameters, number `version`; the chunks it completed."""
        start = time.perf_counter()
        act = self._agent.act(self._slots.inputs, self._slots.epsilons, self._rng)
        acted = time.perf_counter()
        step = self.env.step(act.action)
        stepped = time.perf_counter()
        chunks = self._slots.take(act, step, version)
        timing = self.timing
        timing.episodes += step.episodes
        timing.steps += self.env.num_slots
        timing.calls += 1
        timing.inference_s += acted - start
        timing.env_s += stepped - acted
        timing.accumulate_s += time.perf_counter() - stepped
        return chunks

    def flush(self) -> list[Chunk]:
        """What can be inserted of the running episodes."""
        return self._slots.flush()
