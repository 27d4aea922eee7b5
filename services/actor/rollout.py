"""The slots of one actor process: environments, exploration, and an accumulator for each."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from common.agents import Act, Agent, Inputs
from common.data.fields import Chunk
from common.envs import Episode, Step, VectorEnv


@dataclass
class Timing:
    """Seconds spent in each part of acting since the actor started."""

    steps: int = 0
    inference_s: float = 0.0
    env_s: float = 0.0
    accumulate_s: float = 0.0


class Rollout:
    """Acts in all slots at once and cuts what happened into chunks.

    Attributes:
        episodes: games that finished since the caller last cleared the list.
        timing: running totals; `timing.steps` counts every slot.
    """

    def __init__(self, agent: Agent, env: VectorEnv, chunk_steps: int, seed: int) -> None:
        self.env = env
        self.episodes: list[Episode] = []
        self.timing = Timing()
        self._agent = agent
        self._chunk_steps = chunk_steps
        seeds = np.random.SeedSequence(seed).generate_state(2)
        self._rng = np.random.default_rng(int(seeds[0]))
        self._epsilons = np.zeros(env.num_slots, np.float32)
        obs = env.reset(int(seeds[1]))
        self._inputs = Inputs.start(obs, agent.memory_size)
        self._accumulators = [agent.accumulator(chunk_steps) for _ in range(env.num_slots)]
        for accumulator, first in zip(self._accumulators, obs, strict=True):
            accumulator.start(first)

    def explore(self, slots: list[int], total_slots: int) -> None:
        """Take over the exploration of these `slots` of the run, one for each environment."""
        self._epsilons = self._agent.slot_epsilons(slots, total_slots)

    def step(self, version: int) -> list[Chunk]:
        """One step of every slot with the current parameters, number `version`; the chunks it completed."""
        start = time.perf_counter()
        act = self._agent.act(self._inputs, self._epsilons, self._rng)
        acted = time.perf_counter()
        step = self.env.step(act.action)
        stepped = time.perf_counter()
        chunks = self._accumulate(act, step, version)
        ended = step.terminated | step.truncated
        ended[step.discarded] = True
        self._inputs = self._inputs.after(act, step.obs, step.reward, ended)
        self.episodes += step.episodes
        timing = self.timing
        timing.steps += self.env.num_slots
        timing.inference_s += acted - start
        timing.env_s += stepped - acted
        timing.accumulate_s += time.perf_counter() - stepped
        return chunks

    def flush(self) -> list[Chunk]:
        """What can be inserted of the running episodes."""
        return [chunk for accumulator in self._accumulators for chunk in accumulator.flush()]

    def _accumulate(self, act: Act, step: Step, version: int) -> list[Chunk]:
        # Plain lists: indexing an array a thousand times a second for single numbers is most of the work.
        actions, extras = act.action.tolist(), act.extras_by_slot()
        rewards, terminated, truncated = (
            step.reward.tolist(),
            step.terminated.tolist(),
            step.truncated.tolist(),
        )
        final_values = self._final_values(act, step)
        chunks: list[Chunk] = []
        for slot, accumulator in enumerate(self._accumulators):
            if slot in step.discarded:
                # The environment failed in this step: complete items stay valid, the unfinished ones do not.
                chunks += accumulator.discard()
                accumulator.start(step.obs[slot])
                continue
            ended = terminated[slot] or truncated[slot]
            chunks += accumulator.add(
                actions[slot],
                rewards[slot],
                extras[slot],
                step.final_obs[slot] if ended else step.obs[slot],
                terminated[slot],
                truncated[slot],
                final_values.get(slot, 0.0),
                version,
            )
            if ended:
                accumulator.start(step.obs[slot])
        return chunks

    def _final_values(self, act: Act, step: Step) -> dict[int, float]:
        """Values of the last observations of episodes that a time limit cut: one more, rare, forward."""
        cut = np.flatnonzero(step.truncated & ~step.terminated).tolist()
        if not cut:
            return {}
        last = self._inputs.after(act, step.obs, step.reward, np.zeros(len(step.obs), bool)).rows(cut)
        values = self._agent.values(replace(last, obs=np.stack([step.final_obs[slot] for slot in cut])))
        return dict(zip(cut, values.tolist(), strict=True))
