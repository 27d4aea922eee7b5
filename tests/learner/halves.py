"""What tests of central inference run: the learner's half, its agent that notes things, the actor's half."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import zmq

from tests.harness import until
from troupe.common.agents import Act, Inputs
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.accumulators.n_step import NStepAccumulator, n_step_fields
from troupe.common.data.schema import Chunk
from troupe.common.envs import VectorEnv, make_spec, make_vector
from troupe.common.envs.transfer import pack_start, pack_step
from troupe.common.wire.sockets import Security
from troupe.services.actor.inference_client import Answer, InferenceClient
from troupe.services.learner.inference.service import CentralInference

ENV = EnvConfig(
    id="tests.envs.counting:Counting-v0", kwargs={"length": 7, "signed": True}, reward_clip="sign"
)
SPEC = make_spec(ENV)


class CountingAgent:
    """Actions are always 1; the memory counts the steps since it was forgotten."""

    spec = SPEC
    memory_size = 1
    fields = n_step_fields(SPEC.obs_shape, SPEC.obs_dtype, 0, 1)

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.epsilons: set[float] = set()
        self.bonus = 0

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        return np.asarray(indices, np.float32) / total_slots

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        slots = len(inputs.obs)
        self.batches.append(slots)
        self.epsilons.update(epsilon.tolist())
        memory = np.where(inputs.first[:, None], 1.0, inputs.memory + 1).astype(np.float32)
        extras = {"value_taken": np.zeros(slots, np.float32), "value_max": memory[:, 0]}
        return Act(np.ones(slots, np.int64), extras, memory)

    def values(self, inputs: Inputs) -> np.ndarray:
        return np.zeros(len(inputs.obs), np.float32)

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> NStepAccumulator:
        return NStepAccumulator(1, 1.0, chunk_steps, 0)

    def load_params(self, params: dict[str, np.ndarray]) -> None:
        self.bonus = int(params["bonus"])


class FakeReplay:
    """Takes every chunk while it is `open`."""

    open = True
    outstanding = 0
    paused = False
    blocked_reason = "the shard is full"

    def __init__(self, context: zmq.Context, chunks: list[Chunk]) -> None:
        self.sockets = [context.socket(zmq.PAIR)]
        self.counters = {"pack_us": 0}
        self._chunks = chunks

    def set_shards(self, endpoints: list[str]) -> None:
        pass

    def insert(self, chunk: Chunk, table: str) -> bool:
        if self.open:
            self._chunks.append(chunk)
        return self.open

    def poll(self, timeout_ms: int) -> None:
        time.sleep(timeout_ms / 1000)

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.sockets[0].close(linger=0)


class Learner:
    """The inference service, and what it needs of the learner."""

    def __init__(self, context: zmq.Context, security: Security | None = None, **options: Any) -> None:
        overrides = {"actor.chunk_steps": "3", "actor.total_slots": "8", "net.inference": "tcp://127.0.0.1:1"}
        preset = options.pop("preset", None)
        overrides |= {f"inference.{name}": str(value) for name, value in options.items()}
        config = load_config(preset, overrides=overrides)
        self.context = context
        self.chunks: list[Chunk] = []
        self.leases: dict[int, set[int]] = {}
        self.agent = CountingAgent()
        self.replay = FakeReplay(context, self.chunks)
        self.service = CentralInference(
            context,
            config,
            self.agent,  # type: ignore[arg-type]
            SPEC,
            leases=lambda: dict(self.leases),
            shards=lambda: ["shard"],
            replay=self.replay,  # type: ignore[arg-type]
            seed=1,
            security=security,
        )
        self.service.endpoint = "tcp://127.0.0.1:*"
        self.service.start()
        self.offer(3)

    def offer(self, version: int) -> None:
        self.service.offer(version, {"bonus": np.array(version)})


class Actor:
    """One group of slots of one incarnation."""

    def __init__(self, learner: Learner, incarnation: int, slots: list[int], group: int = 0, **kwargs: Any):
        learner.leases.setdefault(incarnation, set()).update(slots)
        self.learner, self.slots, self.group = learner, slots, group
        self.env: VectorEnv = make_vector(ENV, len(slots), 1)
        self.obs = self.env.reset()
        self.client = InferenceClient(
            learner.context,
            learner.service.endpoint,
            name=f"actor-{incarnation}",
            incarnation=incarnation,
            **kwargs,
        )
        self.version = -1

    def begin(self) -> None:
        self.client.begin(self.group, self.slots, pack_start(self.obs))

    def answer(self) -> Answer:
        got = until(lambda: self.client.poll(20))
        assert len(got) == 1
        return got[0]

    def step(self) -> Answer:
        """Do what the answer says, and report it."""
        answer = self.answer()
        if answer.actions is None:
            self.begin()
        else:
            assert answer.actions.tolist() == [1] * len(self.slots)
            self.version = answer.version
            step = self.env.step(answer.actions)
            self.obs = step.obs
            self.client.go_on(self.group, pack_step(step, 0))
        return answer

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def check_consecutive(chunks: list[Chunk]) -> dict[int, list[tuple[int, int]]]:
    """Every chunk is of one copy, in one piece; the (episode, t) acted on, by copy."""
    seen: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks:
        episode, t, pid, copy = chunk.fields["obs"].astype(int).T
        assert len(set(pid)) == len(set(copy)) == len(set(episode)) == 1, chunk
        np.testing.assert_array_equal(np.diff(t), np.ones(chunk.steps))
        seen.setdefault(copy[0], []).extend(zip(episode[:-1].tolist(), t[:-1].tolist(), strict=True))
    return seen
