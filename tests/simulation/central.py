"""Central inference with all of its protocol: environments that count, and a network that always says 0."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.actors import CHUNK_STEPS, SPECS, contents, make_chunk
from troupe.common import system
from troupe.common.agents import Act, Inputs
from troupe.common.config import Config
from troupe.common.data.schema import Chunk, SlotStep
from troupe.common.envs import EnvSpec, Step
from troupe.common.spaces import ActionSpec
from troupe.services.actor.acting import Place
from troupe.services.actor.central_inference import CentralActing

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger

SPEC = EnvSpec("simulated", (2,), "float32", ActionSpec.discrete(2), 0, 1, False)


class CountingEnv:
    """Copies of a game that never ends, whose observations are numbers that are nowhere twice."""

    spec = SPEC

    def __init__(self, acting: SimulatedCentralActing, slots: int) -> None:
        self._acting, self.num_slots = acting, slots
        self.failures: Any = deque()
        self.calls = self
        self._numbers: list[int] = []

    def running(self) -> list[Any]:
        return []

    def number_from(self, first: int) -> None:
        pass

    def assign(self, slots: list[int], total: int) -> None:
        pass

    def close(self) -> None:
        pass

    def reset(self, seed: int) -> np.ndarray:
        self._numbers = [self._acting.ledger.new_number() for _ in range(self.num_slots)]
        return contents(np.array(self._numbers))

    def step(self, actions: np.ndarray) -> Step:
        acting, ledger = self._acting, self._acting.ledger
        system.sleep(ledger.plan.step_s * (0.5 + system.random.random()))
        made = acting.timing.steps + len(actions)
        # Not those of `assign`: where a lease has ended, games go on in others.
        slots = next(group.slots for group in acting._groups if group.env is self)
        ledger.acted(acting.incarnation, slots, acting.version, made)
        self._numbers = [ledger.new_number(before) for before in self._numbers]
        none = np.zeros(self.num_slots, bool)
        return Step(contents(np.array(self._numbers)), none.astype(np.float32), none, none)


class SimulatedCentralActing(CentralActing):
    """Central acting in `CountingEnv`s."""

    def __init__(self, config: Config, place: Place, ledger: Ledger) -> None:
        super().__init__(config, place)
        self.ledger = ledger

    @property
    def incarnation(self) -> int:
        return self._control.incarnation

    def prepare(self, slots: int) -> None:
        self._close_envs()
        sizes = [len(part) for part in self._split(list(range(slots)))]
        self._envs = [CountingEnv(self, size) for size in sizes]  # type: ignore[misc]


class Steps:
    """The accumulator of a slot."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._obs = np.zeros(2, np.float32)

    def start(self, obs: np.ndarray) -> None:
        self._obs = np.array(obs)

    def add(self, step: SlotStep) -> list[Chunk]:
        self._numbers.append(int(self._obs[0]) + 9973 * int(self._obs[1]))
        self._obs = np.array(step.next_obs)
        if len(self._numbers) < CHUNK_STEPS:
            return []
        return self.flush()

    def flush(self) -> list[Chunk]:
        numbers, self._numbers = self._numbers, []
        return [make_chunk(numbers, 0)] if numbers else []

    discard = flush


class SameAgent:
    """Acts alike whatever it sees."""

    spec, fields, item_steps, memory_size, eval_epsilon = SPEC, SPECS, (1, CHUNK_STEPS), 0, 0.0

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        pass

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        return np.zeros(len(indices), np.float32)

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        return Act(inputs.last_action * 0)

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> Steps:
        return Steps()
