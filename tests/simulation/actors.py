"""Actors and evaluators with all of their protocol: what acts is a sleep and a counter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.common import system
from troupe.common.config import Config
from troupe.common.data.schema import Chunk, FieldSpec
from troupe.common.envs import EnvSpec
from troupe.common.runtime import watchdog
from troupe.common.runtime.usage import OwnUsage
from troupe.common.spaces import ActionSpec
from troupe.common.stats.played import Result
from troupe.common.wire.control.client import ControlClient
from troupe.common.wire.control.member import Params
from troupe.services.actor.acting import Place
from troupe.services.actor.local_inference import LocalActing
from troupe.services.actor.service import ActorService
from troupe.services.actor.timing import Blocked, Timing
from troupe.services.evaluator.service import Evaluator

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger

SPECS = (FieldSpec("number", "int64", ()), FieldSpec("obs", "float32", (2,)))
CHUNK_STEPS = 3
GAME_S = 0.3


def contents(numbers: np.ndarray) -> np.ndarray:
    """What `obs` holds in these steps: who reads a step can tell whether it is whole."""
    found = np.empty((len(numbers), 2), np.float32)
    found[:, 0], found[:, 1] = numbers % 9973, numbers // 9973
    return found


class _Env:
    """Copies of nothing."""

    spec = EnvSpec("simulated", (2,), "float32", ActionSpec.discrete(2), 0, 1, False)

    def __init__(self, slots: int) -> None:
        self.num_slots = slots
        self.failures: Any = deque()
        self.calls = self

    def running(self) -> list[Any]:
        return []

    def assign(self, slots: list[int], total: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Agent:
    fields = SPECS
    eval_epsilon = 0.0
    loaded = -1.0

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        self.loaded = float(params["version"][0])


class _Rollout:
    """Steps that are numbered over all actors, and cut into chunks."""

    def __init__(
        self, ledger: Ledger, slots: list[int], timing: Timing, incarnation: int, step_s: float
    ) -> None:
        self._step_s = step_s
        self._ledger, self._slots, self._timing, self._incarnation = ledger, slots, timing, incarnation
        self._steps: dict[int, list[int]] = {slot: [] for slot in slots}

    def explore(self, slots: list[int], total_slots: int) -> None:
        self._slots = list(slots)
        self._steps = dict(zip(slots, self._steps.values(), strict=True))

    def step(self, version: int) -> list[Chunk]:
        system.sleep(self._step_s * (0.5 + system.random.random()))
        self._timing.steps += len(self._slots)
        self._timing.calls += 1
        self._ledger.acted(self._incarnation, self._slots, version, self._timing.steps)
        chunks = []
        for slot, steps in self._steps.items():
            steps.append(self._ledger.new_number(of=(self._incarnation, slot)))
            if len(steps) == CHUNK_STEPS:
                chunks.append(make_chunk(steps, version))
                steps.clear()
        return chunks

    def flush(self) -> list[Chunk]:
        chunks = [make_chunk(steps, 0) for steps in self._steps.values() if steps]
        for steps in self._steps.values():
            steps.clear()
        return chunks


def make_chunk(steps: list[int], version: int) -> Chunk:
    numbers = np.array(steps, np.int64)
    count = len(steps)
    return Chunk(
        {"number": numbers, "obs": contents(numbers)},
        count,
        np.arange(count, dtype=np.int32),
        np.ones(count, np.int32),
        np.ones(count),
        max(version, 0),
    )


class _Acting(LocalActing):
    """Local acting with all of its protocol, and without a network."""

    def __init__(self, config: Config, place: Place, ledger: Ledger) -> None:
        self.timing = Timing()
        self.version = -1
        self._config, self._place, self._ledger = config, place, ledger
        self._steps_with_params = 0
        self._blocked = Blocked(self.timing)
        self._wait_log = self._held_since_s = self._pace = None

    def prepare(self, slots: int) -> None:
        self._env = self._make_env(slots)  # type: ignore[assignment]
        self._agent = _Agent()  # type: ignore[assignment]

    def _make_env(self, slots: int) -> _Env:  # type: ignore[override]
        return _Env(slots)

    def _take_slots(self, welcome: Any) -> None:
        self._env = self._make_env(len(welcome.slots))  # type: ignore[assignment]
        self.rollout = _Rollout(  # type: ignore[assignment]
            self._ledger, welcome.slots, self.timing, self._control.incarnation, self._ledger.plan.step_s
        )

    def _load(self, params: Params) -> None:
        super()._load(params)
        self._ledger.loaded(self._control.incarnation, params.session, params.version, params.params)


class SimulatedActor(ActorService):
    ledger: Ledger

    def _make_acting(self) -> Any:
        from tests.simulation.central import SimulatedCentralActing

        kind = SimulatedCentralActing if self._config.inference.mode == "central" else _Acting
        return kind(self._config, self._place, self.ledger)


class SimulatedEvaluator(Evaluator):
    """Plays games that return the version of the parameters that it has loaded."""

    def __init__(self, config: Config, client: ControlClient, stop: Any) -> None:
        self._config, self._client, self._stop = config, client, stop
        self._agent = _Agent()  # type: ignore[assignment]
        self._next_video_s = self._next_usage_s = 0.0
        self._usage = OwnUsage("eval")
        self._loop = watchdog.Loop("the evaluator")


def play(
    agent: _Agent, env: Any, *, episodes: int, should_stop: Callable[[], bool], **options: Any
) -> Result | None:
    """See `troupe.services.evaluator.games.play`."""
    for _ in range(4):
        system.sleep(GAME_S * system.random.random())
        if should_stop():
            return None
    return Result([agent.loaded] * episodes, [1] * episodes)
