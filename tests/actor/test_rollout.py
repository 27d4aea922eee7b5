from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness import games
from troupe.common.agents import Act, Inputs
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.schema import Chunk, SlotStep, check_chunk
from troupe.common.envs import Step, VectorEnv, make_spec, make_vector
from troupe.services.actor.local_inference import Rollout
from troupe.services.actor.timing import TimingReports

COUNTING = "tests.envs.counting:Counting-v0"


class RecordingAccumulator:
    """Keeps the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.extras: list[dict[str, Any]] = []

    def start(self, obs: np.ndarray) -> None:
        self.calls.append(("start", *obs.tolist()))

    def add(self, step: SlotStep) -> list:
        self.calls.append(("add", *step.next_obs.tolist(), *step[4:]))
        self.extras.append(step.extras)
        return []

    def discard(self) -> list[Chunk]:
        self.calls.append(("discard",))
        return []

    def flush(self) -> list[Chunk]:
        self.calls.append(("flush",))
        return []


class CountingAgent:
    """Actions are always 1; the memory counts the steps of the episode."""

    spec = make_spec(EnvConfig(id=COUNTING))
    memory_size = 1

    def __init__(self) -> None:
        self.accumulators: list[RecordingAccumulator] = []
        self.inputs: list[Inputs] = []

    def slot_epsilons(self, indices: list[int], total_slots: int) -> np.ndarray:
        return np.asarray(indices, np.float32) / total_slots

    def act(self, inputs: Inputs, epsilon: np.ndarray, rng: np.random.Generator) -> Act:
        self.epsilon = epsilon
        self.inputs.append(inputs)
        slots = len(inputs.obs)
        extras = {"time": inputs.obs[:, 1], "both": inputs.obs}
        return Act(np.ones(slots, np.int64), extras, np.where(inputs.first[:, None], 1, inputs.memory + 1))

    def values(self, inputs: Inputs) -> np.ndarray:
        self.valued = inputs
        return inputs.obs[:, 1] + 100

    def accumulator(self, chunk_steps: int, phase: float = 0.0) -> RecordingAccumulator:
        self.accumulators.append(RecordingAccumulator())
        return self.accumulators[-1]


def rollout_of(slots: int = 1, **kwargs: Any) -> tuple[Rollout, CountingAgent]:
    env = make_vector(EnvConfig(id=COUNTING, kwargs=kwargs), slots, seed=1)
    agent = CountingAgent()
    return Rollout(agent, env, 50, 0), agent  # type: ignore[arg-type]


def test_termination_hands_over_the_last_observation_of_the_old_episode() -> None:
    rollout, agent = rollout_of(length=2)
    for _ in range(3):
        assert rollout.step(7) == []
    # (next_obs, terminated, truncated, final_value, version)
    assert agent.accumulators[0].calls == [
        ("start", 0, 0),
        ("add", 0, 1, False, False, 0.0, 7),
        ("add", 0, 2, True, False, 0.0, 7),
        ("start", 1, 0),
        ("add", 1, 1, False, False, 0.0, 7),
    ]
    assert [(e.return_raw, e.steps) for e in rollout.episodes] == [(5.0, 2)]
    assert rollout.timing.steps == 3


def test_truncation_is_bootstrapped_from_the_last_observation() -> None:
    rollout, agent = rollout_of(slots=2, length=2, ends_by="truncation")
    rollout.step(0)
    rollout.step(0)
    for accumulator in agent.accumulators:
        assert accumulator.calls[-2:] == [("add", 0, 2, False, True, 102.0, 0), ("start", 1, 0)]


def test_failed_environment_breaks_the_link_between_episodes() -> None:
    rollout, agent = rollout_of(fail_at=(0, 2), length=9)
    for _ in range(3):
        rollout.step(0)
    assert agent.accumulators[0].calls[-3:] == [
        ("add", 0, 2, False, False, 0.0, 0),
        ("discard",),
        ("start", 0, 0),
    ]


def test_agent_sees_its_last_step_and_its_memory() -> None:
    rollout, agent = rollout_of(length=3)
    for _ in range(4):
        rollout.step(0)
    seen = agent.inputs
    assert [i.first[0] for i in seen] == [True, False, False, True]
    assert [i.memory[0, 0] for i in seen] == [0, 1, 2, 3]  # forgetting is up to the agent
    assert [i.last_action[0] for i in seen[1:]] == [1, 1, 1]
    assert seen[1].last_reward[0] != 0


def test_last_observation_of_a_truncated_episode_is_valued_with_the_memory_of_that_episode() -> None:
    rollout, agent = rollout_of(slots=2, length=2, ends_by="truncation")
    rollout.step(0)
    rollout.step(0)
    assert agent.valued.obs.tolist() == [[0, 2], [0, 2]]
    assert agent.valued.first.tolist() == [False, False]
    assert agent.valued.memory[:, 0].tolist() == [2, 2]
    assert agent.valued.last_reward.tolist() == agent.inputs[1].last_reward.tolist()


def test_failed_environment_begins_an_episode() -> None:
    rollout, agent = rollout_of(fail_at=(0, 2), length=9)
    for _ in range(4):
        rollout.step(0)
    assert [i.first[0] for i in agent.inputs] == [True, False, False, True]


def test_accumulator_gets_the_extras_of_its_slot() -> None:
    rollout, agent = rollout_of(length=9)
    rollout.step(0)
    rollout.step(0)
    extras = agent.accumulators[0].extras[1]
    assert extras["time"] == 1
    assert isinstance(extras["time"], float)
    assert extras["both"].tolist() == [0, 1]


def test_exploration_follows_the_slots() -> None:
    rollout, agent = rollout_of(slots=2)
    rollout.explore([3, 5], 8)
    rollout.step(0)
    assert agent.epsilon.tolist() == [0.375, 0.625]


def test_real_agent_makes_valid_chunks() -> None:
    pytest.importorskip("torch")
    from troupe.common.agents import make_agent
    from troupe.common.agents.apex import ApexConfig

    env = make_vector(EnvConfig(id="gym:CartPole-v1"), 3, seed=1)
    agent = make_agent(ApexConfig(mlp_units=(8,), hidden_units=8), env.spec)
    rollout = Rollout(agent, env, 10, 0)
    rollout.explore([0, 1, 2], 3)
    chunks = [chunk for _ in range(60) for chunk in rollout.step(4)] + rollout.flush()
    assert chunks
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
        assert chunk.version == 4
        assert np.isfinite(chunk.priorities).all()
    assert 180 - 3 * 3 <= sum(chunk.steps for chunk in chunks) <= 180


class StillEnv(VectorEnv):
    """Nothing ever happens."""

    num_slots = 4

    def reset(self, seed: int | None = None) -> np.ndarray:
        return np.zeros((4, 2), np.float32)

    def step(self, actions: np.ndarray) -> Step:
        no = np.zeros(4, bool)
        return Step(self.reset(), np.zeros(4, np.float32), no, no)

    def render_frame(self, slot: int) -> np.ndarray:
        raise NotImplementedError


def test_meter_reports_totals_and_rates() -> None:
    rollout = Rollout(CountingAgent(), StillEnv(), 50, 0)  # type: ignore[arg-type]
    meter = TimingReports()
    assert meter.due(0.0)
    for _ in range(5):
        rollout.step(0)
    rollout.timing.blocked_s, rollout.timing.chunks = 1.5, 9
    metrics, fields = meter.report(rollout.timing, staleness=2)
    assert metrics["actor/steps"] == 20
    assert metrics["actor/insert_blocked_s"] == 1.5
    assert metrics["params/staleness"] == 2
    assert metrics["actor/chunks_total"] == 9
    assert metrics["actor/env_ms"] > 0
    assert fields == games()
    metrics, _ = meter.report(rollout.timing, staleness=2)
    assert metrics["actor/steps"] == 20
    assert metrics["actor/steps_per_s"] == 0
    assert metrics["actor/insert_blocked_share"] == 0
    assert "actor/compression_ratio" not in metrics  # nothing was packed
    rollout.timing.packed({"pack_us": 2_000_000, "entry_bytes": 300, "block_bytes": 100})
    metrics, _ = meter.report(rollout.timing, staleness=2)
    assert metrics["actor/compression_ratio"] == 3.0
    assert metrics["actor/pack_share"] == 1.0  # two seconds, in less time than that


def test_meter_sends_every_game_once() -> None:
    rollout, _ = rollout_of(length=2)
    for _ in range(4):
        rollout.step(0)
    meter = TimingReports()
    assert meter.report(rollout.timing, 0)[1] == games([5.0, 2, 0], [5.0, 2, 0])
    assert meter.report(rollout.timing, 0)[1] == games()


def test_games_have_the_numbers_of_their_slots_in_the_run() -> None:
    rollout, _ = rollout_of(slots=2, length=2)
    rollout.explore([7, 3], 10)
    for _ in range(2):
        rollout.step(0)
    ended = TimingReports().report(rollout.timing, 0)[1].episodes
    assert [game.slot for game in ended] == [7, 3]
