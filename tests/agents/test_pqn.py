"""PQN: targets and loss against sums in numpy, exploration by the learner's schedule, and that it learns."""

import numpy as np
import pytest
import torch

from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.agents.unrolled import VECTOR, random_batch
from tests.rl import oracles
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.pqn import PqnConfig
from troupe.common.config import load_config
from troupe.common.wire.control.params import decode_params, encode_params

SMALL = {"mlp_units": (8,), "hidden_units": 8, "unroll_steps": 5, "reward_clip": "none"}


def agent_of(seed=0, **fields):
    return make_agent(PqnConfig(**SMALL | fields), VECTOR, seed=seed)


def q_of(agent, batch):
    """Q `[T + 1, B, A]` float64 of a batch's observations."""
    unrolls = agent.stored.read(batch)
    with torch.no_grad():
        q, _ = agent.net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
    return q.double().numpy()


def targets_of(q, batch, gamma, lambda_, scale):
    action, reward, ended = (batch[name].T[1:] for name in ("action", "reward", "ended"))
    best = q.max(-1)
    sequence = {
        "rewards": scale * reward.astype(float), "discounts": gamma * (ended != 1),
        "next_values": np.where(ended == 2, batch["final_value"].T, best[1:]),
        "continues": (ended == 0).astype(float),
    }  # fmt: skip
    taken = np.take_along_axis(q[:-1], action[..., None].astype(int), -1)[..., 0]
    return oracles.lambda_return(sequence, lambda_), taken


@pytest.mark.parametrize("memory", [0, 4])
def test_loss_by_hand(memory):
    agent = agent_of(lstm_units=memory, gamma=0.9, lambda_=0.7, reward_scale=0.5, epochs=1, minibatch_steps=0)
    batch = random_batch(np.random.default_rng(0), agent, 6)
    assert "behaviour" not in batch, "nothing is stored that is not learned from"
    targets, taken = targets_of(q_of(agent, batch), batch, 0.9, 0.7, 0.5)
    got = agent.update(Batch(batch, np.ones(6, np.float32))).metrics
    assert got["learner/loss"] == pytest.approx((0.5 * (targets - taken) ** 2).mean(), rel=1e-4)
    assert got["learner/td_error_mean"] == pytest.approx(abs(targets - taken).mean(), rel=1e-4)


def test_targets_are_those_of_the_network_before_all_passes():
    agent = agent_of(gamma=0.9, lambda_=0.7, epochs=3, minibatch_steps=15, learning_rate=0.05)
    batch = random_batch(np.random.default_rng(0), agent, 6)
    targets, _ = targets_of(q_of(agent, batch), batch, 0.9, 0.7, 1.0)
    seen, loss = [], agent._loss
    agent._loss = lambda steps: seen.append(steps.target.flatten()) or loss(steps)
    agent.update(Batch(batch, np.ones(6, np.float32)))
    assert len(seen) == 6
    for first in (0, 2, 4):
        one_pass = torch.cat(seen[first : first + 2]).sort().values
        np.testing.assert_allclose(one_pass, np.sort(targets.flatten()), rtol=1e-3, atol=1e-5)
    moved, _ = targets_of(q_of(agent, batch), batch, 0.9, 0.7, 1.0)
    assert abs(moved - targets).max() > 0.01


def test_actors_explore_as_the_schedule_of_the_learner_says():
    learner, actor = agent_of(epsilon_final=0.1, epsilon_share=0.5), agent_of(seed=1)
    batch, rng = random_batch(np.random.default_rng(0), learner, 6), np.random.default_rng(0)
    inputs = Inputs.start(np.zeros((20_000, 3), np.float32), 0, learner.spec.actions)
    best = learner.act(inputs, np.zeros(20_000, np.float32), rng).action[0]
    for progress, epsilon in ((0.0, 1.0), (0.25, 0.55), (0.5, 0.1), (1.0, 0.1)):
        got = learner.update(Batch(batch, np.ones(6, np.float32), progress=progress)).metrics[
            "learner/epsilon"
        ]
        assert got == pytest.approx(epsilon)
        actor.load_params(decode_params(*encode_params(learner.params(), bfloat16=True)))
        best = actor.act(inputs, np.zeros(20_000, np.float32), rng).action[0]
        action = actor.act(inputs, actor.slot_epsilons(list(range(20_000)), 20_000), rng).action
        others = (action != best).mean()
        assert others == pytest.approx(0.75 * epsilon, abs=0.02)  # a random action may be the best of four
    again = agent_of(seed=2)
    again.load_state(*learner.state())
    assert again.net.exploration.item() == pytest.approx(0.1)


def test_layer_norm_is_where_the_paper_has_it():
    names = [type(module).__name__ for module in agent_of().net.modules()]
    assert "LayerNorm" in names
    assert "LayerNorm" not in [type(module).__name__ for module in agent_of(layer_norm=False).net.modules()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_cartpole():
    config = load_config("cartpole-pqn")
    agent, _ = learn_through_a_queue(
        config.agent, config.env, slots=config.actor.slots, batch=config.replay.batch_size,
        steps=50_000, seed=1,
    )  # fmt: skip
    assert evaluate(agent, config.env) >= 250
