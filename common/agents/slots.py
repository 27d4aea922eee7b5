"""What acting keeps of a slot apart from its environment: what the network sees of it, and its open chunk.

This half of acting runs where the network is: in the actor, or, with central inference, in the learner.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from troupe.common.agents.base import Act, Agent, Inputs
from troupe.common.agents.hindsight import Hindsight
from troupe.common.agents.pace import Pace
from troupe.common.data.schema import Chunk, SlotStep
from troupe.common.envs import Step


class Slots:
    """`S` slots that step together.

    Attributes:
        inputs: what the network may look at now.
        epsilons: `[S]` float32, exploration.
        pace: how far they may run ahead of learning, where that is limited.
    """

    def __init__(
        self,
        agent: Agent,
        obs: np.ndarray,
        chunk_steps: int,
        hindsight: Hindsight | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Every slot begins at `obs` `[S, *obs_shape]`; none explores until `explore`."""
        self.inputs = Inputs.start(obs, agent.memory_size, agent.spec.actions)
        # Zeros until the learner says which slots these are: exploration belongs to a slot's index in the
        # run.
        self.epsilons = np.zeros(len(obs), np.float32)
        self.pace = pace
        self._agent = agent
        # Spread over a chunk's length, so that unrolls become complete one after the other, not all in one
        # step.
        self._accumulators = [agent.accumulator(chunk_steps, slot / len(obs)) for slot in range(len(obs))]
        if hindsight is not None:
            self._accumulators = [hindsight.around(each, chunk_steps) for each in self._accumulators]
        self._unbegun: set[int] = set()  # slots whose accumulators begin with the next step
        for slot, first in enumerate(obs):
            self._begin(slot, first)

    def __len__(self) -> int:
        return len(self._accumulators)

    def explore(self, indices: list[int], total_slots: int) -> None:
        """Take over the exploration of the slots with these indices among all of the run."""
        self.epsilons = self._agent.slot_epsilons(indices, total_slots)

    def take(self, act: Act, step: Step, version: int, others: Collection[int] = ()) -> list[Chunk]:
        """Take in where `act`, chosen by parameters `version`, has led; the chunks that are complete now.

        In the slots of `others` another policy has chosen: of these nothing is stored. A slot may become one
        of them, or cease to be, where an episode begins.
        """
        chunks = self._accumulate(act, step, version, {*step.idle, *others})
        ended = step.terminated | step.truncated
        # The failed environment was made again and shows a first observation: the memory must not reach
        # across. Nor may that of an agent which has left the game before.
        ended[step.discarded + step.idle] = True
        self.inputs = self.inputs.after(act, step.obs, step.reward, ended)
        if self.pace is not None:
            if self.pace.stepped(version):
                chunks += self.flush()
            self.pace.completed(len(chunks))
        return chunks

    def holds(self, version: int) -> bool:
        """Whether they have to wait for parameters newer than `version` before they act on."""
        return self.pace is not None and self.pace.holds(version)

    def flush(self) -> list[Chunk]:
        """What can be inserted of the running episodes."""
        return [chunk for accumulator in self._accumulators for chunk in accumulator.flush()]

    def _begin(self, slot: int, obs: np.ndarray) -> None:
        """The slot's next episode begins at `obs`."""
        if self._agent.spec.agents > 1:
            # Its agent may be away until a game begins, so what it sees first is known with its first step.
            self._unbegun.add(slot)
        else:
            self._accumulators[slot].start(obs)

    def _accumulate(self, act: Act, step: Step, version: int, left_out: Collection[int]) -> list[Chunk]:
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
                self._begin(slot, step.obs[slot])
                continue
            if slot in left_out:
                continue
            if slot in self._unbegun:
                accumulator.start(self.inputs.obs[slot])
                self._unbegun.remove(slot)
            ended = terminated[slot] or truncated[slot]
            chunks += accumulator.add(
                SlotStep(
                    actions[slot],
                    rewards[slot],
                    extras[slot],
                    step.final_obs[slot] if ended else step.obs[slot],
                    terminated[slot],
                    truncated[slot],
                    final_values.get(slot, 0.0),
                    version,
                )
            )
            if ended:
                self._begin(slot, step.obs[slot])
        return chunks

    def _final_values(self, act: Act, step: Step) -> dict[int, float]:
        """Values of the last observations of episodes that a time limit cut: one more, rare, forward."""
        cut = np.flatnonzero(step.truncated & ~step.terminated).tolist()
        if not cut:
            return {}
        # The value is that of the last observation with the memory after this step, so the inputs are moved
        # on first. The memory after `take` would not do: it belongs to the next episode.
        last = self.inputs.after(act, step.obs, step.reward, np.zeros(len(step.obs), bool)).rows(cut)
        values = self._agent.values(replace(last, obs=np.stack([step.final_obs[slot] for slot in cut])))
        return dict(zip(cut, values.tolist(), strict=True))
