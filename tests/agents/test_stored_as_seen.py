"""What actors store against what they saw: each step is noted as it happens and found by its observation.

Each observation occurs once in a whole test, so nothing that is swapped, shifted or crosses the end of an
episode finds its place.
"""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.agents.pqn import PqnConfig
from troupe.common.agents.sac import SacConfig
from troupe.common.config import EnvConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.accumulators.unrolls import RUNNING, TERMINATED, TRUNCATED
from troupe.common.envs import make_vector
from troupe.services.actor.local_inference import Rollout

ENV = EnvConfig(id="tests.envs.diary:Diary-v0", reward_clip="none")
SLOTS, STEPS = 3, 150
GAMMA = 0.9


class Seen(NamedTuple):
    """One step of one slot."""

    obs: np.ndarray
    action: int
    reward: np.float32
    ended: int
    following: np.ndarray
    """What truly followed."""
    extras: dict
    final_value: float
    """What the agent said of `following` where the episode was cut."""


def key(obs):
    return tuple(np.asarray(obs, int).tolist())


def written_down(agent, spread=0.3):
    """Chunks of an agent's play, and its steps by slot, each in its order. Weights are far from the first."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    vector = make_vector(ENV, SLOTS, 0)
    rollout, seen, chunks = Rollout(agent, vector, 5, seed=0), [[] for _ in range(SLOTS)], []
    rollout.explore(list(range(SLOTS)), SLOTS)
    taken, valued = [], []
    act, values, step = agent.act, agent.values, vector.step

    def acting(inputs, *rest):
        taken.append((inputs.obs.copy(), act(inputs, *rest)))
        return taken[-1][1]

    def valuing(inputs):
        valued.append((inputs.obs.copy(), values(inputs)))
        return valued[-1][1]

    def stepping(action):
        done = step(action)
        before, said = taken[-1]
        for slot in range(SLOTS):
            ended = TERMINATED if done.terminated[slot] else TRUNCATED if done.truncated[slot] else RUNNING
            following = done.final_obs[slot] if ended else done.obs[slot]
            extras = {name: each[slot].copy() for name, each in said.extras.items()}
            seen[slot].append(
                [before[slot].copy(), int(action[slot]), done.reward[slot], ended, following.copy(), extras]
            )
        return done

    agent.act, agent.values, vector.step = acting, valuing, stepping
    for _ in range(STEPS):
        chunks += rollout.step(1)
    vector.close()
    worth = {key(obs): value for rows, said in valued for obs, value in zip(rows, said, strict=True)}
    return chunks, [
        [Seen(*each, worth[key(each[4])] if each[3] == TRUNCATED else 0.0) for each in steps]
        for steps in seen
    ]


@pytest.mark.parametrize(
    "config",
    [
        ApexConfig(mlp_units=(8,), hidden_units=8, n_steps=3, gamma=GAMMA),
        SacConfig(mlp_units=(8,), n_steps=2, gamma=GAMMA),
    ],
    ids=["apex", "sac"],
)
def test_every_step_is_one_item_with_its_own_return_and_priority(config):
    agent = make_agent(config, make_vector(ENV, 1, 0).spec, seed=3)
    chunks, seen = written_down(agent)
    places = {key(step.obs): (slot, t) for slot, steps in enumerate(seen) for t, step in enumerate(steps)}
    found, endings = set(), set()
    for chunk in chunks:
        for offset, priority in zip(chunk.offsets, chunk.priorities, strict=True):
            fields = {name: array[offset:] for name, array in chunk.fields.items()}
            slot, t = places[key(fields["obs"][0])]
            assert (slot, t) not in found
            found.add((slot, t))
            total, discount, count = 0.0, 1.0, 0
            for step in seen[slot][t : t + config.n_steps]:
                total, discount, count = total + discount * step.reward, discount * GAMMA, count + 1
                if step.ended:
                    break
            endings.add((step.ended, count))
            first, bootstrap = seen[slot][t], 0.0 if step.ended == TERMINATED else discount
            assert fields["action"][0] == first.action
            assert fields["bootstrap_steps"][0] == count
            assert fields["reward"][0] == pytest.approx(total, abs=1e-5)
            assert fields["discount"][0] == pytest.approx(bootstrap)
            np.testing.assert_array_equal(fields["obs"][count], step.following)
            worth = step.final_value
            if step.ended == RUNNING:
                worth = seen[slot][t + count].extras["value_max"]
            error = total + bootstrap * worth - first.extras["value_taken"]
            assert priority == pytest.approx(abs(error) + PRIORITY_FLOOR, rel=1e-3, abs=1e-4)
    # All but the last few, which wait for their bootstrap or their chunk.
    assert len(found) > SLOTS * (STEPS - 20)
    assert {ended for ended, _ in endings} == {RUNNING, TERMINATED, TRUNCATED}
    assert {count for _, count in endings} == set(range(1, config.n_steps + 1))


UNROLL = {"mlp_units": (8,), "unroll_steps": 7}


@pytest.mark.parametrize(
    "config",
    [
        PolicyGradientConfig(**UNROLL, lstm_units=0),
        PqnConfig(**UNROLL, lstm_units=0),
        ImpalaConfig(**UNROLL, lstm_units=4),
        PolicyGradientConfig(**UNROLL, lstm_units=4),
    ],
    ids=["ppo", "pqn", "impala, lstm", "ppo, lstm"],
)
def test_unrolls_hold_every_step_once_and_in_its_order(config):
    agent = make_agent(config, make_vector(ENV, 1, 0).spec, seed=3)
    chunks, seen = written_down(agent)
    places = {key(step.obs): (slot, t) for slot, steps in enumerate(seen) for t, step in enumerate(steps)}
    found, endings = set(), set()
    for chunk in chunks:
        fields = chunk.fields
        slot, begin = places[key(fields["obs"][0])]
        if agent.memory_size:
            memory = fields["memory"].ravel()[: agent.memory_size]
            np.testing.assert_allclose(memory, seen[slot][begin].extras["memory"], rtol=1e-6)
        for t in range(config.unroll_steps + 1):
            place = slot, begin + t
            step = seen[slot][begin + t] if begin + t < STEPS else None
            if step is not None:
                np.testing.assert_array_equal(fields["obs"][t], step.obs)
            if begin + t:
                before = seen[slot][begin + t - 1]
                stored = [fields[name][t] for name in ("action", "reward", "ended")]
                assert stored == [before.action, before.reward, before.ended]
                endings.add(before.ended)
            if t == config.unroll_steps:
                continue
            assert place not in found
            found.add(place)
            assert fields["final_value"][t] == pytest.approx(step.final_value, rel=1e-5)
            if "behaviour" in fields:
                np.testing.assert_array_equal(fields["behaviour"][t], step.extras["behaviour"])
    assert len(found) > SLOTS * (STEPS - 2 * config.unroll_steps)
    assert endings == {RUNNING, TERMINATED, TRUNCATED}


def test_values_of_cut_episodes_are_of_their_last_observation():
    agent = make_agent(ApexConfig(mlp_units=(8,), hidden_units=8), make_vector(ENV, 1, 0).spec, seed=3)
    values = agent.values
    _, seen = written_down(agent)
    cut = [step for steps in seen for step in steps if step.ended == TRUNCATED]
    assert len(cut) > 10
    inputs = Inputs.start(np.stack([step.following for step in cut]), 0, agent.spec.actions)
    np.testing.assert_allclose([step.final_value for step in cut], values(inputs), rtol=1e-4)
