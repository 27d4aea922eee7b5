"""The environments of several actors as one vector, for actors that step in lockstep in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from troupe.common.envs import Step, VectorEnv
from troupe.common.envs.base import KEPT_FAILURES, Seed, slot_seeds


class JoinedVector(VectorEnv):
    """Vectors that step one after the other; their slots are numbered through, in their order.

    What a slot plays depends on its number among all slots and not on which vector it is in: a seed is
    divided among slots here, before the vectors see it.
    """

    def __init__(self, parts: Sequence[VectorEnv]) -> None:
        """Join `parts`, all of one environment, which `close` closes."""
        counts = [part.num_slots for part in parts]
        self.spec, self.num_slots = parts[0].spec, sum(counts)
        self.steps_per_s = parts[0].steps_per_s
        self._parts = parts
        self._firsts = [sum(counts[:index]) for index in range(len(parts))]
        self.failures = deque(maxlen=KEPT_FAILURES)
        self.assign(range(self.num_slots), self.num_slots)

    def assign(self, slots: Sequence[int], total_slots: int) -> None:
        """See `VectorEnv`."""
        for own, part in self._of_parts(list(slots)):
            part.assign(own, total_slots)

    def reset(self, seed: Seed | None = None) -> np.ndarray:
        """See `VectorEnv`."""
        if seed is None:
            obs = [part.reset() for part in self._parts]
        else:
            seeds: list[int] = slot_seeds(seed, self.num_slots).tolist()
            obs = [part.reset(own) for own, part in self._of_parts(seeds)]
        self._take_failures()
        return np.concatenate(obs)

    def step(self, actions: np.ndarray) -> Step:
        """See `VectorEnv`."""
        steps = [
            part.step(actions[first : first + part.num_slots])
            for first, part in zip(self._firsts, self._parts, strict=True)
        ]
        joined = replace(
            steps[0],
            obs=np.concatenate([step.obs for step in steps]),
            reward=np.concatenate([step.reward for step in steps]),
            terminated=np.concatenate([step.terminated for step in steps]),
            truncated=np.concatenate([step.truncated for step in steps]),
            final_obs={},
            episodes=[],
            discarded=[],
            idle=[],
        )
        for first, step in zip(self._firsts, steps, strict=True):
            joined.final_obs |= {first + slot: obs for slot, obs in step.final_obs.items()}
            joined.episodes += [each._replace(slot=first + each.slot) for each in step.episodes]
            joined.discarded += [first + slot for slot in step.discarded]
            joined.idle += [first + slot for slot in step.idle]
        self._take_failures()
        return joined

    def _take_failures(self) -> None:
        """Number the slots of what has failed through, as all others are."""
        for first, part in zip(self._firsts, self._parts, strict=True):
            while part.failures:
                failure = part.failures.popleft()
                slot = None if failure.slot is None else first + failure.slot
                self.failures.append(replace(failure, slot=slot))
        self.restarts_total = sum(part.restarts_total for part in self._parts)

    def render_frame(self, slot: int) -> np.ndarray:
        """See `VectorEnv`."""
        part = max(index for index, first in enumerate(self._firsts) if first <= slot)
        return self._parts[part].render_frame(slot - self._firsts[part])

    def close(self) -> None:
        """See `VectorEnv`."""
        for part in self._parts:
            part.close()

    def _of_parts(self, values: list[int]) -> list[tuple[list[int], VectorEnv]]:
        """The values of the slots of each part, and the part."""
        return [
            (values[first : first + part.num_slots], part)
            for first, part in zip(self._firsts, self._parts, strict=True)
        ]
