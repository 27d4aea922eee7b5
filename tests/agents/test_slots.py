"""Acting in two halves, with every frame sent once between them, makes the very chunks of acting in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from troupe.common.agents import Act, Agent, Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.agents.slots import Slots
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.schema import Chunk
from troupe.common.envs import make_vector
from troupe.common.envs.transfer import pack_start, pack_step, unpack_start, unpack_step
from troupe.common.spaces import ActionSpec
from troupe.common.wire.codec import decode, encode
from troupe.common.wire.inference import Actions
from troupe.services.actor.local_inference import Rollout

SLOTS, STEPS, SEED = 3, 60, 5
SMALL: dict[str, Any] = {"mlp_units": (8,), "hidden_units": 8}
AGENTS = {
    "apex": ApexConfig(**SMALL),
    "impala": ImpalaConfig(**SMALL, unroll_steps=7),
    "impala with memory": ImpalaConfig(**SMALL, unroll_steps=7, lstm_units=4),
    "r2d2": R2d2Config(
        **SMALL, lstm_units=4, head_units=8, sequence_steps=6, sequence_period_steps=3, burn_in_steps=2
    ),
}
ENVS = {
    "vectors": EnvConfig(id="gym:CartPole-v1", max_episode_frames=15),
    "failures": EnvConfig(id="tests.envs.counting:Counting-v0", kwargs={"length": 9, "fail_at": (1, 4)}),
    "agents": EnvConfig(id="pettingzoo:tests.envs.crowd:Crowd", kwargs={"copy": 1}),
    "stacks": EnvConfig(id="tests.envs.counting:Colour-v0", frame_size=36),
}
SPACES = {
    "numbers and choices": EnvConfig(id="tests.envs.matching:Match-v0", kwargs={"actions": "tuple"}),
    "unbounded numbers": EnvConfig(id="tests.envs.matching:Match-v0", kwargs={"actions": "dict"}),
    "several parts": EnvConfig(id="tests.envs.matching:Read-v0"),
}


def in_one(agent: Agent, env: EnvConfig) -> list[Chunk]:
    rollout = Rollout(agent, make_vector(env, SLOTS, 1), 10, SEED)
    rollout.explore([0, 1, 2], 4)
    return [chunk for _ in range(STEPS) for chunk in rollout.step(3)] + rollout.flush()


def in_two(agent: Agent, env: EnvConfig) -> list[Chunk]:
    vector = make_vector(env, SLOTS, 1)
    seeds = np.random.SeedSequence(SEED).generate_state(2)
    rng = np.random.default_rng(int(seeds[0]))
    obs = unpack_start(pack_start(vector.reset(int(seeds[1]))), SLOTS, vector.spec)
    slots, chunks = Slots(agent, obs, 10), []
    slots.explore([0, 1, 2], 4)
    for _ in range(STEPS):
        act = agent.act(slots.inputs, slots.epsilons, rng)
        told = Actions.of(decode(encode(Actions(version=3, actions=act.action).message(1)))).actions
        assert vector.spec.actions.fault(told, SLOTS) == ""
        arrays = pack_step(vector.step(told), vector.spec.stack)
        sent = {name: array.copy() for name, array in arrays.items()}
        chunks += slots.take(act, unpack_step(sent, slots.inputs.obs, vector.spec), 3)
    return chunks + slots.flush()


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("name", AGENTS)
def test_both_make_the_same_chunks(name: str, env: str) -> None:
    if env == "stacks":
        pytest.importorskip("cv2")
    check_same_chunks(name, ENVS[env])


@pytest.mark.parametrize("env", SPACES)
@pytest.mark.parametrize("name", ["impala", "impala with memory"])
def test_both_make_the_same_chunks_of_every_space(name: str, env: str) -> None:
    check_same_chunks(name, SPACES[env])


def check_same_chunks(name: str, env: EnvConfig) -> None:
    agent = make_agent(AGENTS[name], make_vector(env, SLOTS, 1).spec, seed=2)
    one, two = in_one(agent, env), in_two(agent, env)
    assert len(one) == len(two) > 3
    for a, b in zip(one, two, strict=True):
        assert a.version == b.version
        np.testing.assert_array_equal(a.priorities, b.priorities)
        for field in agent.fields:
            np.testing.assert_array_equal(a.fields[field.name], b.fields[field.name], field.name)


@pytest.mark.parametrize(("slots", "unroll_steps"), [(8, 4), (6, 12), (5, 7)])
def test_slots_that_step_together_complete_their_unrolls_one_after_the_other(
    slots: int, unroll_steps: int
) -> None:
    """In every step about as many, so that batches come evenly and none waits."""
    vector = make_vector(ENVS["vectors"], slots, 1)
    agent = make_agent(ImpalaConfig(**SMALL, unroll_steps=unroll_steps), vector.spec, seed=2)
    rollout = Rollout(agent, vector, 10, SEED)
    done = [len(rollout.step(0)) for _ in range(6 * unroll_steps)]
    assert max(done) == -(-slots // unroll_steps)
    # After the first round, in which some have begun late, every slot has one in each round.
    assert {sum(done[at : at + unroll_steps]) for at in range(2 * unroll_steps, 5 * unroll_steps)} == {slots}
    vector.close()


def test_a_batch_of_several_groups_is_taken_apart_again() -> None:
    first = Inputs.start(np.arange(4.0).reshape(2, 2), 3, ActionSpec.discrete(2))
    second = Inputs.start(np.arange(6.0).reshape(3, 2), 3, ActionSpec.discrete(2))
    joined = Inputs.joined([first, second])
    assert joined.obs.shape == (5, 2)
    assert joined.memory.shape == (5, 3)
    act = Act(np.arange(5), {"x": np.arange(10).reshape(5, 2)}, np.arange(15.0).reshape(5, 3))
    rows = act.rows(slice(2, 5))
    assert rows.action.tolist() == [2, 3, 4]
    assert rows.extras["x"].tolist() == [[4, 5], [6, 7], [8, 9]]
    assert rows.memory is not None
    assert rows.memory[0].tolist() == [6, 7, 8]
    assert Act(np.arange(5)).rows(slice(0, 2)).memory is None
