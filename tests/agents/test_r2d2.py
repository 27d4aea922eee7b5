import itertools
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.agents.in_process import evaluate
from tests.agents.replayed import batch_of, learn_by_replay, windows
from tests.harness import only_in_chaos
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.r2d2 import R2d2Config
from troupe.common.config import load_config
from troupe.common.config.env_section import EnvConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.accumulators.sequences import BETWEEN
from troupe.common.data.schema import check_chunk
from troupe.common.envs import EnvSpec, make_vector
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.spaces import ActionSpec
from troupe.services.actor.local_inference import Rollout

VECTOR = EnvSpec("test:vector", (3,), "float32", ActionSpec.discrete(4), 0, 1, False)
SMALL = {
    "mlp_units": (5,), "hidden_units": 8, "lstm_units": 6, "head_units": 4,
    "sequence_steps": 6, "burn_in_steps": 4, "sequence_period_steps": 3, "n_steps": 3, "gamma": 0.9,
}  # fmt: skip


def hand_made(rng, agent):
    """Rows as replay gives them, the steps at which each begins to be learned from, and the lengths.

    With a burn-in of 4, 6 steps to learn from and a period of 3: the first sequence of an episode, a short
    first one that terminated, the second of an episode, which has 3 steps of burn-in only, a whole one from
    the middle, and a last one that was truncated.
    """
    rows = [(True, 6, 0, 0), (True, 4, 0, 1), (True, 9, 3, 0), (False, 10, 4, 0), (False, 8, 4, 2)]
    items, begins = [], []
    for starts, length, begin, end in rows:
        cut = {f.name: rng.normal(size=(f.entries(length), *f.shape)).astype(f.dtype) for f in agent.fields}
        cut["action"] = rng.integers(0, agent.spec.actions.count, length + 1).astype(np.int32)
        cut["ended"][:] = 0
        cut["ended"][0] = 1 if starts else 0
        cut["ended"][length] = end
        cut["reward"] *= 3
        items.append((cut, length, 1.0))
        begins.append(begin)
    return items, begins


class ByHand:
    """The network and the loss in numpy, one step of one row after the other."""

    def __init__(self, config, arrays, spec):
        self.config, self.arrays, self.spec = config, arrays, spec

    def q_values(self, network, cut, length):
        w = {name.removeprefix(network): a.astype(float) for name, a in self.arrays.items()
             if name.startswith(network)}  # fmt: skip
        units = self.config.lstm_units
        state = cut["memory"][: self.config.sequence_period_steps].reshape(-1)[: 2 * units].astype(float)
        hidden, cell = state[:units], state[units:]
        found = []
        for t in range(length + 1):
            before = np.zeros(self.spec.actions.count + 1)
            if t == 0 and cut["ended"][0]:
                hidden, cell = np.zeros(units), np.zeros(units)
            else:
                before[cut["action"][t]] = 1.0
                before[-1] = np.clip(cut["reward"][t], -1, 1)
            torso = np.tanh(w["torso.layers.1.weight"] @ cut["obs"][t] + w["torso.layers.1.bias"])
            gates = w["core.lstm.weight_ih_l0"] @ np.concatenate([torso, before])
            gates += w["core.lstm.bias_ih_l0"] + w["core.lstm.weight_hh_l0"] @ hidden
            i, f, g, o = np.split(gates + w["core.lstm.bias_hh_l0"], 4)
            cell = cell / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
            hidden = np.tanh(cell) / (1 + np.exp(-o))
            streams = np.maximum(0, w["head.hidden.weight"] @ hidden + w["head.hidden.bias"])
            left, right = np.split(streams, 2)
            advantage = w["head.advantage.weight"] @ left + w["head.advantage.bias"]
            value = w["head.value.weight"] @ right + w["head.value.bias"]
            found.append(value + advantage - advantage.mean())
        return np.array(found)

    def h(self, x):
        return np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x

    def h_inverse(self, x):
        return np.sign(x) * (((np.sqrt(1 + 4e-3 * (abs(x) + 1 + 1e-3)) - 1) / 2e-3) ** 2 - 1)

    def errors(self, cut, length, begin):
        """TD errors of the steps from `begin` on."""
        online, target = (self.q_values(name, cut, length) for name in ("net/", "target/"))
        errors = []
        for t in range(begin, length):
            until = min(t + self.config.n_steps, length)
            goal = sum(0.9 ** (k - t) * cut["reward"][k + 1] for k in range(t, until))
            if not (until == length and cut["ended"][length] == 1):
                goal += 0.9 ** (until - t) * self.h_inverse(target[until][online[until].argmax()])
            errors.append(self.h(goal) - online[t][cut["action"][t + 1]])
        return np.array(errors)


def test_loss_and_priorities_by_hand():
    rng = np.random.default_rng(0)
    agent = make_agent(R2d2Config(**SMALL, learning_rate=0.01), VECTOR, seed=0)
    items, begins = hand_made(rng, agent)
    fields, lengths = batch_of(items)
    for _ in range(5):  # move the online network away from the target
        agent.update(Batch(fields, np.ones(5, np.float32), lengths=lengths))
    by_hand = ByHand(agent.config, agent.state()[0], VECTOR)
    errors = [by_hand.errors(cut, n, begin) for (cut, n, _), begin in zip(items, begins, strict=True)]
    assert [len(e) for e in errors] == [6, 4, 6, 6, 4]
    weights = rng.random(5).astype(np.float32)
    got = agent.update(Batch(fields, weights, lengths=lengths))
    loss = np.mean([w * 0.5 * np.sum(e**2) for w, e in zip(weights, errors, strict=True)])
    assert got.metrics["learner/loss"] == pytest.approx(loss, rel=1e-4)
    want = [0.9 * abs(e).max() + 0.1 * abs(e).mean() + PRIORITY_FLOOR for e in errors]
    assert got.priorities.dtype == np.float64
    np.testing.assert_allclose(got.priorities, want, rtol=1e-4)


def parts(cut, length):
    """A sequence across episodes taken apart: what is of one episode, as a row of its own, and its place."""
    edges = [0, *(t for t in range(1, length + 1) if cut["ended"][t] == BETWEEN), length + 1]
    for a, b in pairwise(edges):
        part = {name: array[a:b].copy() for name, array in cut.items() if name != "memory"}
        part["memory"] = cut["memory"]
        if a:
            part["ended"][0] = 1
        yield part, a, b - a - 1


def test_across_episodes_each_is_learned_from_as_if_it_were_alone():
    rng = np.random.default_rng(4)
    agent = make_agent(R2d2Config(**SMALL, across_episodes=True, learning_rate=0.01), VECTOR, seed=0)
    # Entries by what led there. The first begins the stream; burn-in, ends of both kinds, single steps.
    endings = ["1000130", "00002313130", "01300000002", "30001302300", "23000000000"]
    items = []
    for row in endings:
        length = len(row) - 1
        cut = {f.name: rng.normal(size=(f.entries(length), *f.shape)).astype(f.dtype) for f in agent.fields}
        cut["action"] = rng.integers(0, 4, length + 1).astype(np.int32)
        cut["ended"] = np.array([int(each) for each in row], np.uint8)
        items.append((cut, length, 1.0))
    fields, lengths = batch_of(items)
    for _ in range(5):
        agent.update(Batch(fields, np.ones(5, np.float32), lengths=lengths))
    by_hand, errors = ByHand(agent.config, agent.state()[0], VECTOR), []
    for cut, length, _ in items:
        begin = length - SMALL["sequence_steps"]
        found = [by_hand.errors(part, own, max(0, begin - place)) for part, place, own in parts(cut, length)]
        errors.append(np.concatenate(found))
    between = [row[len(row) - 6 :].count("3") for row in endings]
    assert [len(e) for e in errors] == [6 - count for count in between]
    got = agent.update(Batch(fields, np.ones(5, np.float32), lengths=lengths))
    loss = np.mean([0.5 * np.sum(e**2) for e in errors])
    assert got.metrics["learner/loss"] == pytest.approx(loss, rel=1e-4)
    steps = np.concatenate(errors)
    assert got.metrics["learner/td_error_mean"] == pytest.approx(abs(steps).mean(), rel=1e-4)
    want = [0.9 * abs(e).max() + 0.1 * abs(e).mean() + PRIORITY_FLOOR for e in errors]
    np.testing.assert_allclose(got.priorities, want, rtol=1e-4)


CATCH = "tests.envs.catch:Catch-v0"


@pytest.mark.parametrize(
    ("env_id", "burn_in", "across"),
    [
        *itertools.product(["gym:CartPole-v1", "atari:breakout"], [0, 4], [False]),
        *itertools.product(["gym:CartPole-v1", CATCH], [0, 4], [True]),
    ],
)
def test_learner_computes_the_very_values_that_acted(env_id, burn_in, across):
    """The stored state belongs to the first step of the burn-in, and to no other."""
    pytest.importorskip("ale_py")
    env_config = EnvConfig(id=env_id, frame_skip=8, reward_clip="none")
    if env_id == CATCH:
        env_config = EnvConfig(id=env_id, frame_skip=1, frame_size=42, noop_max=0, fire_reset=False)
    slots = 3
    env = make_vector(env_config, slots, 0)
    torso = "small" if env.spec.pixels else "mlp"
    options = SMALL | {"burn_in_steps": burn_in, "across_episodes": across}
    agent = make_agent(R2d2Config(**options, torso=torso), env.spec, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    taken = []
    initial = agent.stored.initial_priority
    agent.stored.initial_priority = lambda r, t, b, e: (taken.append(t[e != BETWEEN]), initial(r, t, b, e))[1]
    rollout, chunks = Rollout(agent, env, 12, 0), []
    rollout.explore(list(range(slots)), slots)
    while len(taken) < 40:
        chunks += rollout.step(0)
    env.close()
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
    items = windows(chunks, agent.fields)
    fields, lengths = batch_of(items)
    assert (fields["ended"][:, 0] == 0).sum() >= 3
    if across:
        assert len({len(each) for each in taken}) > 1, "none crosses the end of an episode"
        assert set(lengths[len(lengths) // 2 :].tolist()) == {burn_in + SMALL["sequence_steps"]}
    else:
        assert len(set(lengths.tolist())) > 2

    def values(fields):
        sequences = agent.stored.read(fields | agent.stored.aligned(fields, lengths))
        with torch.no_grad():
            q, _ = agent._errors(sequences)
        return [q[counts].numpy() for q, counts in zip(q.T, sequences.counts.T, strict=True)]

    for got, want in zip(values(fields), taken, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    # With the same weights as target, the learner's priorities are the actors'.
    priorities = agent.update(Batch(fields, np.ones(len(items), np.float32), lengths=lengths)).priorities
    np.testing.assert_allclose(priorities, [item[2] for item in items], rtol=2e-3, atol=1e-4)


def test_a_state_from_another_step_would_show():
    """What the test above relies on: with the state of the end of the burn-in, values differ."""
    rng = np.random.default_rng(0)
    agent = make_agent(R2d2Config(**SMALL), VECTOR, seed=0)
    (cut, length, _), begin = (part[3] for part in hand_made(rng, agent))
    batch = {name: array[None] for name, array in cut.items()}
    sequences = agent.stored.read(batch | agent.stored.aligned(batch, np.array([length])))
    _, late = agent.net.remember(
        sequences.obs[:begin], sequences.last_action[:begin], sequences.last_reward[:begin],
        sequences.first[:begin], sequences.memory,
    )  # fmt: skip
    right = agent._unroll(agent.net, sequences)
    wrong = agent._unroll(agent.net, sequences._replace(memory=late))
    assert (right - wrong).abs().max() > 1e-3


def test_no_gradient_flows_through_the_burn_in():
    agent = make_agent(R2d2Config(**SMALL), VECTOR, seed=0)
    items, _ = hand_made(np.random.default_rng(0), agent)
    fields, lengths = batch_of(items)
    sequences = agent.stored.read(fields | agent.stored.aligned(fields, lengths))
    obs, memory = sequences.obs.clone().requires_grad_(), sequences.memory.clone().requires_grad_()
    q = agent._unroll(agent.net, sequences._replace(obs=obs, memory=memory))
    q.square().sum().backward()
    assert obs.grad[:4].abs().max() == 0
    assert (obs.grad[4:].abs().amax(dim=2) > 0).all()
    assert memory.grad is None


def test_padding_counts_for_nothing():
    rng = np.random.default_rng(0)
    agents = [make_agent(R2d2Config(**SMALL), VECTOR, seed=0) for _ in range(2)]
    items, _ = hand_made(rng, agents[0])
    fields, lengths = batch_of(items)
    other = {name: array.copy() for name, array in fields.items()}
    for row, length in enumerate(lengths):
        for field in agents[0].fields:
            rest = other[field.name][row, field.entries(int(length)) :]
            rest[...] = (rng.normal(size=rest.shape) * 50).astype(field.dtype)
        other["action"] %= 4
    assert any(not np.array_equal(fields[name], other[name]) for name in fields)
    weights = np.ones(5, np.float32)
    for _ in range(3):
        one, two = (
            agent.update(Batch(batch, weights, lengths=lengths))
            for agent, batch in zip(agents, (fields, other), strict=True)
        )
        assert one.metrics == two.metrics
        np.testing.assert_array_equal(one.priorities, two.priorities)
    for name, array in agents[0].params().items():
        np.testing.assert_array_equal(array, agents[1].params()[name])


def test_weights_scale_the_gradient():
    agents = [make_agent(R2d2Config(**SMALL), VECTOR, seed=0) for _ in range(2)]
    items, _ = hand_made(np.random.default_rng(0), agents[0])
    fields, lengths = batch_of([items[3], items[4]])
    agents[0].update(Batch(fields, np.array([1.0, 0.0], np.float32), lengths=lengths))
    fields, lengths = batch_of([items[3], items[3]])
    agents[1].update(Batch(fields, np.array([0.5, 0.5], np.float32), lengths=lengths))
    for name, array in agents[0].params().items():
        np.testing.assert_allclose(array, agents[1].params()[name], rtol=1e-4, atol=1e-6)


def test_target_follows_after_its_period_and_state_round_trip_continues_exactly():
    config = R2d2Config(**SMALL, target_update_period_updates=3)
    first, second = make_agent(config, VECTOR, seed=0), make_agent(config, VECTOR, seed=1)
    fields, lengths = batch_of(hand_made(np.random.default_rng(0), first)[0])

    def follows(agent):
        arrays, _ = agent.state()
        return all(np.array_equal(a, arrays["target/" + k[4:]]) for k, a in arrays.items() if k[:4] == "net/")

    seen = []
    for _ in range(4):
        first.update(Batch(fields, np.ones(5, np.float32), lengths=lengths))
        seen.append(follows(first))
    assert seen == [False, False, True, False]
    second.load_state(*first.state())
    for _ in range(4):
        one, two = (a.update(Batch(fields, np.ones(5, np.float32), lengths=lengths)) for a in (first, second))
        assert one.metrics == two.metrics
        np.testing.assert_array_equal(one.priorities, two.priorities)
    with pytest.raises(CheckpointError, match="not fit"):
        make_agent(R2d2Config(**(SMALL | {"lstm_units": 7})), VECTOR).load_state(*first.state())
    with pytest.raises(CheckpointError, match="'apex'"):
        first.load_state({}, {"algorithm": "apex"})


def test_exploration_ladder_and_actions():
    agent = make_agent(R2d2Config(**SMALL), VECTOR, seed=0)
    np.testing.assert_allclose(
        agent.slot_epsilons([0, 1, 255], 256), [0.4, 0.4 ** (1 + 7 / 255), 0.4**8], rtol=1e-5
    )
    rng = np.random.default_rng(0)
    inputs = Inputs.start(
        np.tile(rng.normal(size=(1, 3)).astype(np.float32), (4000, 1)), agent.memory_size, agent.spec.actions
    )
    act = agent.act(inputs, np.repeat(np.array([0.0, 0.5], np.float32), 2000), rng)
    assert (act.action[:2000] == act.action[0]).all()
    assert np.mean(act.action[2000:] != act.action[0]) == pytest.approx(0.5 * 3 / 4, abs=0.05)
    np.testing.assert_allclose(act.extras["value_max"], agent.values(inputs), rtol=1e-6)
    assert (act.extras["value_taken"] <= act.extras["value_max"]).all()
    assert act.memory.shape == (4000, 12)


def test_what_does_not_fit_is_refused_in_one_line():
    agent = make_agent(R2d2Config(**SMALL), VECTOR, seed=0)
    with pytest.raises(ConfigError, match="do not fit"):
        agent.load_params(make_agent(R2d2Config(mlp_units=(9,)), VECTOR, seed=0).params())
    with pytest.raises(ConfigError, match="torso 'deep' does not suit"):
        make_agent(R2d2Config(torso="deep"), VECTOR, seed=0)
    with pytest.raises(ConfigError, match="sequence_period_steps"):
        load_config("memory-r2d2", overrides={"agent.sequence_period_steps": "50"})


def test_learns_from_sequences_of_several_episodes():
    """A cue, a blank, and the question: six steps in a sequence are of two or three episodes."""
    options = {"env.kwargs.cues": "3", "env.kwargs.delay": "1", "env.kwargs.questions": "1"}
    options |= {"agent.across_episodes": "true", "agent.sequence_steps": "6", "agent.lstm_units": "24"}
    options |= {"agent.head_units": "24", "replay.batch_size": "32", "replay.min_items": "200"}
    options |= {"agent.target_update_period_updates": "20", "agent.learning_rate": "5e-3"}
    config = load_config("memory-r2d2", overrides=options)
    agent, _ = learn_by_replay(config, updates=120, seed=0)
    assert evaluate(agent, config.env, 60) >= 0.9


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learns_to_remember():
    """With the preset's values. Asked 5, 10 and 15 steps after the cue, by sequences of 8 and 4 of burn-in:
    the last one of an episode lives on the stored state, and without it a quarter of them are right."""
    config = load_config("memory-r2d2")
    agent, _ = learn_by_replay(config, updates=700, seed=2)
    assert evaluate(agent, config.env, 100) >= 0.85


@pytest.mark.slow
@pytest.mark.timeout(600)
@only_in_chaos
def test_without_memory_nothing_is_better_than_chance():
    config = load_config("cartpole-apex").model_copy(update={"env": load_config("memory-r2d2").env})
    agent, rollout = learn_by_replay(config, updates=1500, seed=1)
    assert len(rollout.episodes) > 100
    assert evaluate(agent, config.env, 200) == pytest.approx(0.25, abs=0.12)
