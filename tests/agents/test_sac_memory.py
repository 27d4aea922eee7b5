"""SAC with memory against numpy, and on what cannot be done without."""

import math

import numpy as np
import pytest
import torch

from tests.agents.contract import PIXELS
from tests.agents.in_process import evaluate
from tests.agents.replayed import batch_of, learn_by_replay, windows
from tests.agents.soft import CONTINUOUS, DISCRETE, drawn, perceptron
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.sac import SacConfig
from troupe.common.config import EnvConfig, load_config
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.accumulators.sequences import BETWEEN
from troupe.common.data.schema import check_chunk
from troupe.common.envs import make_vector
from troupe.common.errors import ConfigError
from troupe.services.actor.local_inference import Rollout

SMALL = {
    "mlp_units": (8,), "lstm_units": 4, "sequence_steps": 5, "burn_in_steps": 2, "sequence_period_steps": 3,
    "n_steps": 2, "gamma": 0.9, "tau": 0.3, "learning_rate": 1e-2, "across_episodes": True,
}  # fmt: skip
ENDINGS = ["10001", "00002313", "00000002", "30013023", "01300000"]
"""What led to each entry: a short sequence of one episode, and whole ones across several."""
UNITS = SMALL["lstm_units"]


def hand_made(agent, rng):
    items = []
    for row in ENDINGS:
        length = len(row) - 1
        cut = {f.name: rng.normal(size=(f.entries(length), *f.shape)).astype(f.dtype) for f in agent.fields}
        low, high = (-1, 1) if agent.spec.actions.reals else (0, 4)
        cut["action"] = rng.uniform(low, high, cut["action"].shape).astype(cut["action"].dtype)
        cut["ended"] = np.array([int(each) for each in row], np.uint8)
        items.append((cut, length, 1.0))
    return items


def remembered(arrays, cut, length, spec):
    """Features `[length + 1, F]`: what is seen, and an LSTM's output, in numpy."""
    w = {name.removeprefix("core.lstm."): array.astype(float) for name, array in arrays.items()}
    state = cut["memory"][: SMALL["sequence_period_steps"]].reshape(-1)[: 2 * UNITS].astype(float)
    hidden, cell = state[:UNITS], state[UNITS:]
    features = []
    for t in range(length + 1):
        done = cut["action"][t] if spec.actions.reals else np.eye(4)[cut["action"][t]]
        told = np.concatenate([done, [np.clip(cut["reward"][t], -1, 1)]])
        if cut["ended"][t] == BETWEEN or (t == 0 and cut["ended"][0]):
            hidden, cell, told = np.zeros(UNITS), np.zeros(UNITS), 0 * told
        gates = w["weight_ih_l0"] @ np.concatenate([cut["obs"][t], told]) + w["bias_ih_l0"]
        i, f, g, o = np.split(gates + w["weight_hh_l0"] @ hidden + w["bias_hh_l0"], 4)
        cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        hidden = np.tanh(cell) / (1 + np.exp(-o))
        features.append(np.concatenate([cut["obs"][t], hidden]))
    return np.array(features)


def q(arrays, features, actions):
    """Of each critic, `[2, M]` of these actions, or `[2, M, 4]` of all."""
    if actions is None:
        return np.stack([perceptron(arrays, f"critics.{i}", features) for i in range(2)])
    both = np.concatenate([features, actions], axis=1)
    return np.stack([perceptron(arrays, f"critics.{i}", both)[:, 0] for i in range(2)])


def soft_value(config, net, critics, own, features, noise, cost):
    """Value and entropy `[M]`: policy of `net` on its `own` features, `critics` on theirs."""
    params = perceptron(net, "policy", own)
    if noise.shape[1]:
        action, log_prob = drawn(config, params, noise)
        return q(critics, features, action).min(0) - cost * log_prob, -log_prob
    pi = np.exp(params - params.max(1, keepdims=True))
    pi /= pi.sum(1, keepdims=True)
    entropy = -(pi * np.log(pi)).sum(1)
    return (pi * q(critics, features, None).min(0)).sum(1) + cost * entropy, entropy


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["reals", "choice"])
@pytest.mark.parametrize("bootstrap", ["q", "v"])
def test_losses_and_priorities_by_hand(spec, bootstrap):
    config = SacConfig(
        **SMALL, bootstrap=bootstrap, deviation_start=0.6, adjust_entropy_cost=False, entropy_cost=0.4
    )
    agent, rng = make_agent(config, spec, seed=7), np.random.default_rng(0)
    assert agent.memory_size
    items = hand_made(agent, rng)
    fields, lengths = batch_of(items)
    for _ in range(3):  # the target network stays behind
        agent.update(Batch(fields, np.ones(5, np.float32), lengths=lengths))
    arrays = agent.state()[0]
    net, target = (
        {k.removeprefix(part): v.copy() for k, v in arrays.items() if k.startswith(part)}
        for part in ("net/", "target/")
    )
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        noise = torch.randn((2, 5, 5, spec.actions.reals), generator=generator).double().numpy()
    weights = np.linspace(0.2, 1.0, 5)
    value, errors, weight, entropies, value_errors = [], [], [], [], []
    for row, (cut, length, _) in enumerate(items):
        begin = max(0, length - 5)
        own, its = (remembered(each, cut, length, spec) for each in (net, target))
        if bootstrap == "v":
            follows = perceptron(target, "values", its)[begin + 1 :, 0]
        else:
            after = slice(begin + 1, None)
            its_noise = noise[1, : length - begin, row]
            follows, _ = soft_value(config, net, target, own[after], its[after], its_noise, 0.4)
        goals = []
        for t in range(begin, length):
            goal, discount, k = 0.0, 1.0, t
            while True:
                goal, discount = goal + discount * cut["reward"][k + 1], discount * 0.9
                if cut["ended"][k + 1] == 1:
                    break
                if cut["ended"][k + 1] or k + 1 in (t + 2, length):
                    goal += discount * follows[k - begin]
                    break
                k += 1
            goals.append(goal)
        steps = np.flatnonzero(cut["ended"][begin + 1 : length + 1] != BETWEEN)
        features = own[begin:][steps]
        soft, entropy = soft_value(config, net, net, features, features, noise[0, steps, row], 0.4)
        done = cut["action"][begin + 1 : length + 1][steps]
        if spec.actions.reals:
            said = q(net, features, done)
        else:
            said = q(net, features, None)[:, np.arange(len(steps)), done]
        value.append(soft)
        errors.append(np.array(goals)[steps] - said)
        weight.append(np.full(len(steps), weights[row]))
        entropies.append(entropy)
        if bootstrap == "v":
            value_errors.append(soft - perceptron(net, "values", features)[:, 0])
    w = np.concatenate(weight)
    assert len(w) == 4 + 3 + 5 + 3 + 5
    policy_loss = -(w * np.concatenate(value)).mean()
    critic_loss = 0.5 * (w * np.concatenate(errors, axis=1) ** 2).mean(1).sum()
    total = policy_loss + critic_loss
    if bootstrap == "v":
        total += 0.5 * (w * np.concatenate(value_errors) ** 2).mean()
    update = agent.update(Batch(fields, weights.astype(np.float32), lengths=lengths))
    got = {name.removeprefix("learner/"): number for name, number in update.metrics.items()}
    assert got["critic_loss"] == pytest.approx(critic_loss, rel=1e-3)
    assert got["policy_loss"] == pytest.approx(policy_loss, rel=1e-3)
    assert got["entropy"] == pytest.approx(np.concatenate(entropies).mean(), rel=1e-3)
    assert got["loss"] == pytest.approx(total, rel=1e-3)
    sizes = [abs(each).mean(0) for each in errors]
    wanted = [0.9 * size.max() + 0.1 * size.mean() + PRIORITY_FLOOR for size in sizes]
    np.testing.assert_allclose(update.priorities, wanted, rtol=1e-3)


def test_the_policy_teaches_neither_memory_nor_critics():
    agent = make_agent(SacConfig(**SMALL, bootstrap="v"), CONTINUOUS, seed=1)
    fields, lengths = batch_of(hand_made(agent, np.random.default_rng(1)))
    sequences = agent.stored.read(fields | agent.stored.aligned(fields, lengths))
    features, _ = agent.net.remember(*sequences.burned_in(agent.net, 2))
    features = features[:-1][sequences.counts]
    count = len(features)
    actions, noise = torch.zeros(count, 2), torch.randn(count, 2)
    _, measured, _ = agent._loss(features, actions, torch.ones(count), torch.ones(count), noise)
    taught = {}
    for name in ("policy_loss", "critic_loss"):
        agent.net.zero_grad()
        measured[name].backward(retain_graph=True)
        taught[name] = {k.partition(".")[0] for k, p in agent.net.named_parameters() if p.grad is not None}
    assert taught == {"policy_loss": {"policy"}, "critic_loss": {"core", "critics"}}


SAID = EnvConfig(id="tests.envs.said:Said-v0", reward_clip="none")


@pytest.mark.parametrize(("env", "across"), [(SAID, False), (SAID, True), (PIXELS, True)])
def test_learner_values_what_was_done_as_it_was_valued_then(env, across):
    """The stored state belongs to the first step of the burn-in, and no episode sees another's."""
    vector = make_vector(env, 3, 0)
    options = SMALL | {"across_episodes": across, "hidden_units": 8}
    agent = make_agent(SacConfig(**options, torso="auto", normalize_pixels=False), vector.spec, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    taken, initial = [], agent.stored.initial_priority
    agent.stored.initial_priority = lambda r, t, b, e: (taken.append(t[e != BETWEEN]), initial(r, t, b, e))[1]
    rollout, chunks = Rollout(agent, vector, 6, seed=0), []
    rollout.explore([0, 1, 2], 3)
    while len(taken) < 24:
        chunks += rollout.step(1)
    vector.close()
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
    fields, lengths = batch_of(windows(chunks, agent.fields))
    assert (fields["ended"][:, 1:-1] == BETWEEN).any() == across
    sequences = agent.stored.read(fields | agent.stored.aligned(fields, lengths))
    with torch.no_grad():
        features, _ = agent.net.remember(*sequences.burned_in(agent.net, 2))
        features, done = features[:-1].flatten(0, 1), sequences.last_action[3:].flatten(0, 1)
        found = agent.net.q_taken(features, done).amin(0).unflatten(0, sequences.counts.shape)
    for got, counts, wanted in zip(found.T, sequences.counts.T, taken, strict=True):
        np.testing.assert_allclose(got[counts].numpy(), wanted, rtol=1e-3, atol=1e-4)
    assert np.std(np.concatenate(taken)) > 1e-2


LEARNS = {
    "run.total_steps": "10000", "env.id": SAID.id, "agent.mlp_units": "[32]", "agent.learning_rate": "4e-3",
    "agent.tau": "0.05", "agent.entropy_cost": "0.05", "agent.adjust_entropy_cost": "false",
    "replay.batch_size": "32", "replay.min_items": "100", "replay.samples_per_insert": "16",
}  # fmt: skip


@pytest.mark.parametrize("memory", [True, False])
def test_what_was_said_is_repeated_by_whoever_remembers(memory):
    fields = dict(LEARNS)
    if memory:
        sequences = {"sequence_steps": "3", "burn_in_steps": "1", "sequence_period_steps": "2"}
        sequences |= {"lstm_units": "16", "across_episodes": "true", "see_last_step": "false"}
        fields |= {f"agent.{name}": value for name, value in sequences.items()}
    config = load_config("pendulum-sac", overrides=fields)
    agent, _ = learn_by_replay(config, updates=300, seed=0)
    earned = evaluate(agent, config.env, 60)
    if memory:
        assert earned > -0.15
    else:  # the variance of what was said, if all were as likely in 60 games as they are
        assert earned < -0.4


def test_fields_of_memory_mean_nothing_without_one():
    for name, value in {"burn_in_steps": "7", "across_episodes": "true", "see_last_step": "false"}.items():
        with pytest.raises(ConfigError, match=f"{name} has no effect without memory"):
            load_config("pendulum-sac", overrides={f"agent.{name}": value})
    assert not math.isnan(load_config("pendulum-sac", overrides={"agent.lstm_units": "8"}).agent.gamma)
