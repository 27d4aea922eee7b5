"""Rewards of any size: what they are divided by, and that their unit does not matter to what is learned."""

import numpy as np
import pytest
import torch

from tests.agents.contract import VECTORS
from tests.agents.shares import CASES, ROWS, made_batches
from tests.agents.soft import CONTINUOUS
from tests.agents.transitions import VECTOR, batch_of
from tests.agents.unrolled import SMALL, random_batch
from tests.rl import oracles
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.config.algorithms import agent_model
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.envs import make_spec
from troupe.common.rl.normalizers import ReturnScale

APEX = ("apex", "apex, munchausen", "apex, quantiles")
OPTION = {"apex": "normalize_rewards", "r2d2": "normalize_rewards", "sac": "normalize_rewards",
          "impala": "normalize_returns", "policy_gradient": "normalize_returns"}  # fmt: skip
AGENTS = {
    "apex": ({"algorithm": "apex"}, "apex"),
    "apex, munchausen": ({"algorithm": "apex", "munchausen_alpha": 0.9}, "apex"),
    "apex, quantiles": ({"algorithm": "apex", "quantiles": 8, "munchausen_alpha": 0.9}, "apex"),
    "r2d2": (CASES["r2d2"][0], "r2d2"),
    "sac": (CASES["sac"][0], "sac"),
    "sac, with memory": (CASES["sac, with memory"][0], "sac, with memory"),
    "impala": (CASES["impala"][0], "impala"),
    "impala, clear": (
        {**CASES["impala"][0], "clear_policy_cost": 0.1, "clear_value_cost": 0.1, "trust_region": 0.5},
        "impala",
    ),
    "ppo, one step": (CASES["ppo, one step"][0], "ppo, one step"),
}
"""Fields of an agent, and the case of `shares` whose batches it can learn from."""


@pytest.mark.parametrize(("scale", "ends"), [(1.0, 0.1), (1e6, 0.0), (1e-6, 0.5)])
def test_the_size_is_that_of_returns_made_of_such_rewards_by_chance(scale, ends):
    rng = np.random.default_rng(0)
    rewards, discounts = rng.normal(0.3, 1.0, 40), np.where(rng.random(40) < ends, 0.0, 0.9)
    rewards[discounts == 0.0] += 5.0
    returns = np.zeros(200_000)
    for _ in range(200):
        drawn = rng.integers(0, 40, len(returns))
        returns = rewards[drawn] + discounts[drawn] * returns
    kept = ReturnScale()
    for part in np.split(np.arange(40), 4):
        kept.observe(torch.from_numpy(scale * rewards[part]), torch.from_numpy(discounts[part]))
    assert kept.size.item() == pytest.approx(scale * np.sqrt(np.square(returns).mean()), rel=0.01)


def test_without_rewards_nothing_is_divided_and_without_a_discount_the_horizon_ends():
    kept = ReturnScale()
    kept.observe(torch.zeros(0), torch.zeros(0))
    kept.observe(torch.zeros(5), torch.full((5,), 0.9))
    assert kept.size.tolist() == [1.0]
    kept = ReturnScale()
    kept.observe(torch.full((50,), 2.0), torch.ones(50))
    assert kept.size.item() == pytest.approx(2000.0, rel=1e-3)


def agent_of(name, on=True, seed=3):
    fields, case = AGENTS[name]
    # What a network sees of the last reward has the unit of rewards, and is clipped to 1.
    blind = {"see_last_step": False} if name not in ("sac", *APEX) else {}
    config = agent_model(fields["algorithm"])(**fields | blind | {OPTION[fields["algorithm"]]: on})
    return make_agent(config, CONTINUOUS if CASES[case][1] == "reals" else make_spec(VECTORS), seed=seed)


def batches_of(name, scale=1.0):
    """The same batches for every scale, with rewards of all sizes times that."""
    rng = np.random.default_rng(1)
    for fields, lengths, weights in made_batches(AGENTS[name][1]):
        fields["reward"] = scale * rng.normal(0.2, 0.3, fields["reward"].shape).astype(np.float32)
        if "final_value" in fields:
            fields["value"] = scale * rng.normal(size=fields["final_value"].shape).astype(np.float32)
            fields["final_value"] = scale * fields["final_value"]
        yield Batch(fields, weights, lengths, replayed=np.arange(ROWS) < 4 if "clear" in name else None)


def weights_of(agent):
    return {name: each.detach().numpy().copy() for name, each in agent.net.named_parameters()}


def learned(name, scale, on=True):
    agent = agent_of(name, on)
    for batch in [*batches_of(name, scale)] * 2:
        update = agent.update(batch)
    return weights_of(agent), update.priorities


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("scale", [2.0**10, 2.0**-10])
def test_an_update_is_the_same_whatever_the_unit_of_rewards(name, scale):
    (plain, sizes), (other, scaled) = learned(name, 1.0), learned(name, scale)
    for key, array in plain.items():
        np.testing.assert_allclose(other[key], array, rtol=1e-5, atol=1e-6, err_msg=key)
    if sizes is not None:
        # Transitions have priorities in the unit of rewards, r2d2's sequences in that of its rescaled values.
        unit = 1.0 if name == "r2d2" else scale
        np.testing.assert_allclose(scaled - PRIORITY_FLOOR, unit * (sizes - PRIORITY_FLOOR), rtol=1e-4)
    (off, _), (off_scaled, _) = learned(name, 1.0, on=False), learned(name, scale, on=False)
    assert any(not np.allclose(off[key], off_scaled[key], rtol=1e-4, atol=1e-5) for key in off)


@pytest.mark.parametrize("name", AGENTS)
def test_a_state_goes_on_exactly(name):
    first, second = agent_of(name), agent_of(name, seed=4)
    batches = [*batches_of(name)]
    for batch in batches:
        first.update(batch)
    second.load_state(*first.state())
    for batch in batches:
        one, two = first.update(batch), second.update(batch)
        np.testing.assert_array_equal(one.priorities, two.priorities)
    for key, array in first.state()[0].items():
        np.testing.assert_array_equal(array, second.state()[0][key], err_msg=key)


def test_priorities_are_td_errors_in_the_unit_of_rewards():
    rng, rows = np.random.default_rng(0), np.arange(7)
    config = ApexConfig(hidden_units=16, mlp_units=(8,), double=False, normalize_rewards=True)
    agent, seen = make_agent(config, VECTOR, seed=1), []
    for _ in range(4):
        batch = batch_of(rng, VECTOR, 7)
        batch["reward"] *= 300.0
        seen.append(batch)
        nets = agent.net, agent.learner.target
        now, then = batch["obs"][:, 0], batch["obs"][rows, batch["bootstrap_steps"][:, 0]]
        with torch.no_grad():
            q, following = (
                net(torch.from_numpy(obs)).numpy() for net, obs in zip(nets, (now, then), strict=True)
            )
        got = agent.update(Batch(batch, np.ones(7, np.float32)))
        reward, discount = (np.concatenate([each[key] for each in seen]) for key in ("reward", "discount"))
        mean = reward.mean() / (1 - discount.mean())
        square = ((reward**2).mean() + 2 * (reward * discount).mean() * mean) / (1 - (discount**2).mean())
        size = np.sqrt(square)
        goal = batch["reward"][:, 0] + batch["discount"][:, 0] * size * following.max(1)
        taken = size * q[rows, batch["action"][:, 0]]
        np.testing.assert_allclose(got.priorities, np.abs(goal - taken) + PRIORITY_FLOOR, rtol=1e-4)
        assert got.metrics["learner/q_mean"] == pytest.approx(taken.mean(), rel=1e-4)
        error = np.abs(goal - taken) / size
        loss = np.where(error < 1, 0.5 * error**2, error - 0.5).mean()
        assert got.metrics["learner/loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", ["apex", "apex, quantiles", "sac", "sac, with memory", "r2d2"])
def test_actors_value_in_the_unit_in_which_priorities_are(name):
    agent = agent_of(name)
    rng, spec = np.random.default_rng(0), agent.spec
    obs = rng.normal(size=(3, *spec.obs_shape)).astype(np.float32)
    inputs = Inputs.start(obs, agent.memory_size, spec.actions)
    epsilon = np.zeros(3, np.float32)
    act, values = agent.act(inputs, epsilon, np.random.default_rng(1)).extras, agent.values(inputs)
    agent.net.scale.size.fill_(250.0)
    # What a network says is in the unit of its scale, but for values that are rescaled in another way.
    unit = 1.0 if name == "r2d2" else 250.0
    after = agent.act(inputs, epsilon, np.random.default_rng(1)).extras
    for key in ("value_taken", "value_max"):
        np.testing.assert_allclose(after[key], unit * act[key], rtol=1e-5)
    np.testing.assert_allclose(agent.values(inputs), unit * values, rtol=1e-5)


@pytest.mark.parametrize("name", ["r2d2", "sac, with memory"])
def test_first_priorities_of_sequences_have_the_unit_of_the_others(name):
    rng = np.random.default_rng(0)
    rewards, taken, best = rng.normal(size=(3, 6)).astype(np.float32)
    ended = np.array([0, 0, 0, 0, 0, 1], np.uint8)
    plain, scaled = agent_of(name, on=False), agent_of(name)
    scaled.net.scale.size.fill_(50.0)
    want = plain.stored.initial_priority(rewards, taken, best, ended) - PRIORITY_FLOOR
    if name == "r2d2":
        got = scaled.stored.initial_priority(50.0 * rewards, taken, best, ended)
        assert got - PRIORITY_FLOOR == pytest.approx(want, rel=1e-4)
    else:
        got = scaled.stored.initial_priority(50.0 * rewards, 50.0 * taken, 50.0 * best, ended)
        assert got - PRIORITY_FLOOR == pytest.approx(50.0 * want, rel=1e-4)


def test_impala_learns_normalised_returns_and_advantages():
    config = ImpalaConfig(
        **SMALL, gamma=0.9, normalize_returns=True, entropy_cost=0.0, see_last_step=False, learning_rate=0.01
    )
    agent, rng = make_agent(config, VECTOR, seed=0), np.random.default_rng(0)
    mean, deviation, seen = 0.0, 0.0, []  # as long as they say nothing, values are 0
    for number in range(3):
        batch = random_batch(rng, agent, 6)
        batch["reward"], batch["final_value"] = 400 * batch["reward"] + 100, 400 * batch["final_value"]
        unrolls = agent.stored.read(batch)
        with torch.no_grad():
            logits, said, _ = agent.net(
                unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
            )
        action, reward, ended = (batch[name].T[1:] for name in ("action", "reward", "ended"))
        logs = [x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits.double().numpy()[:-1],
                batch["behaviour"].transpose(1, 0, 2).astype(float))]  # fmt: skip
        log_pi, log_mu = (np.take_along_axis(x, action[..., None].astype(int), -1)[..., 0] for x in logs)
        values = said.double().numpy() * deviation + mean
        sequence = {
            "rewards": reward.astype(float), "values": values[:-1], "discounts": 0.9 * (ended != 1),
            "next_values": np.where(ended == 2, batch["final_value"].T, values[1:]),
            "continues": (ended == 0).astype(float),
        }  # fmt: skip
        targets, advantages = oracles.vtrace(sequence, log_pi - log_mu, 1.0, 1.0, 1.0, 1.0)
        seen.append(targets.ravel())
        mean, deviation = np.concatenate(seen).mean(), np.concatenate(seen).std()
        # The baseline still says what it said, in the new unit; at first what it said had none.
        baseline = said.double().numpy()[:-1] if not number else (values[:-1] - mean) / deviation
        squares = ((targets - mean) / deviation - baseline) ** 2
        want = (-log_pi * advantages / deviation + 0.5 * 0.5 * squares).mean()
        got = agent.update(Batch(batch, np.ones(6, np.float32))).metrics
        assert got["learner/loss"] == pytest.approx(want, rel=1e-3)
        np.testing.assert_allclose(agent.params()["returns.mean"], mean, rtol=1e-4)
