import numpy as np
import pytest
import torch

from tests.agents.transitions import PIXELS, VECTOR, batch_of
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.schema import SlotStep
from troupe.common.envs import EnvSpec
from troupe.common.errors import CheckpointError, ConfigError
from troupe.common.rl.importance import importance_weights
from troupe.common.spaces import ActionSpec

COLOURS = EnvSpec("test:colours", (4, 3, 84, 84), "uint8", ActionSpec.discrete(6), 4, 4, True)


@pytest.mark.parametrize("spec", [VECTOR, PIXELS, COLOURS], ids=["vector", "pixels", "colours"])
@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_priorities_are_the_td_errors_computed_by_hand(spec, dueling, double):
    rng = np.random.default_rng(0)
    agent = make_agent(
        ApexConfig(hidden_units=16, mlp_units=(8,), dueling=dueling, double=double), spec, seed=1
    )
    batch = batch_of(rng, spec, 7)
    for _ in range(3):  # move the online network away from the target
        agent.update(Batch(batch, np.ones(7, np.float32)))
    arrays, meta = agent.state()

    def q_values(network, obs):
        probe = make_agent(agent.config, spec, seed=2)
        probe.load_params({k.removeprefix(network): v for k, v in arrays.items() if k.startswith(network)})
        with torch.no_grad():
            return probe.net(torch.from_numpy(obs)).numpy()

    width = spec.stack or 1
    now = np.stack([row[:width] if spec.stack else row[0] for row in batch["obs"]])
    then = np.stack(
        [row[m : m + width] if spec.stack else row[m]
         for row, m in zip(batch["obs"], batch["bootstrap_steps"][:, 0], strict=True)]
    )  # fmt: skip
    q, online, target = q_values("net/", now), q_values("net/", then), q_values("target/", then)
    chosen = (online if double else target).argmax(1)
    rows = np.arange(7)
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * target[rows, chosen]
    want = np.abs(goal - q[rows, batch["action"][:, 0]]) + PRIORITY_FLOOR
    got = agent.update(Batch(batch, np.ones(7, np.float32))).priorities
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert meta["updates"] == 3


def test_munchausen_s_targets_are_of_the_target_network():
    rng = np.random.default_rng(0)
    config = ApexConfig(
        hidden_units=16, mlp_units=(8,), munchausen_alpha=0.7, munchausen_tau=0.5, munchausen_least=-0.4
    )
    agent, batch = make_agent(config, VECTOR, seed=1), batch_of(rng, VECTOR, 7)
    for _ in range(3):
        agent.update(Batch(batch, np.ones(7, np.float32)))
    now = torch.from_numpy(batch["obs"][:, 0])
    then = torch.from_numpy(
        np.stack([row[m] for row, m in zip(batch["obs"], batch["bootstrap_steps"][:, 0], strict=True)])
    )
    with torch.no_grad():
        q = agent.net(now).numpy()
        before, after = (agent.learner.target(obs).numpy() for obs in (now, then))
    rows, action = np.arange(7), batch["action"][:, 0]

    def log_policy(values):
        return values / 0.5 - np.log(np.exp(values / 0.5).sum(1, keepdims=True))

    bonus = np.clip(0.5 * log_policy(before)[rows, action], -0.4, 0.0)
    value = (np.exp(log_policy(after)) * (after - 0.5 * log_policy(after))).sum(1)
    goal = batch["reward"][:, 0] + 0.7 * bonus + batch["discount"][:, 0] * value
    got = agent.update(Batch(batch, np.ones(7, np.float32))).priorities
    np.testing.assert_allclose(got, np.abs(goal - q[rows, action]) + PRIORITY_FLOOR, rtol=1e-4, atol=1e-5)


def test_dueling_advantages_have_mean_zero():
    agent = make_agent(ApexConfig(hidden_units=16, mlp_units=(8,)), VECTOR, seed=0)
    net = agent.net
    obs = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = torch.relu(net.hidden(net.torso(obs)))
        value = net.value(hidden[:, 16:])
        np.testing.assert_allclose(net(obs).mean(1, keepdim=True).numpy(), value.numpy(), rtol=1e-5)


def test_weights_scale_the_gradient():
    rng = np.random.default_rng(0)
    batch = batch_of(rng, VECTOR, 2)
    config = ApexConfig(hidden_units=16, mlp_units=(8,))
    first = make_agent(config, VECTOR, seed=0)
    first.update(Batch(batch, np.array([1.0, 0.0], np.float32)))
    only = {k: np.repeat(v[:1], 2, axis=0) for k, v in batch.items()}
    second = make_agent(config, VECTOR, seed=0)
    second.update(Batch(only, np.array([0.5, 0.5], np.float32)))
    for name, value in first.params().items():
        np.testing.assert_allclose(value, second.params()[name], rtol=1e-4, atol=1e-6)


def test_target_follows_after_its_period():
    rng = np.random.default_rng(0)
    agent = make_agent(
        ApexConfig(hidden_units=8, mlp_units=(8,), target_update_period_updates=3), VECTOR, seed=0
    )
    batch, weights = batch_of(rng, VECTOR, 4), np.ones(4, np.float32)

    def differs():
        arrays, _ = agent.state()
        return any(
            not np.array_equal(v, arrays["target/" + k[4:]]) for k, v in arrays.items() if k[:4] == "net/"
        )

    seen = []
    for _ in range(6):
        agent.update(Batch(batch, weights))
        seen.append(differs())
    assert seen == [True, True, False, True, True, False]


def test_exploration_ladder():
    agent = make_agent(ApexConfig(hidden_units=8), VECTOR, seed=0)
    np.testing.assert_allclose(
        agent.slot_epsilons([0, 1, 359], 360), [0.4, 0.4 ** (1 + 7 / 359), 0.4**8], rtol=1e-6
    )
    np.testing.assert_allclose(agent.slot_epsilons([0], 1), [0.4], rtol=1e-6)


def test_acting_explores_as_often_as_told():
    agent = make_agent(ApexConfig(hidden_units=8, mlp_units=(8,)), VECTOR, seed=0)
    rng = np.random.default_rng(0)
    inputs = Inputs.start(np.tile(rng.normal(size=(1, 3)).astype(np.float32), (4000, 1)), 0, VECTOR.actions)
    epsilon = np.repeat(np.array([0.0, 0.5], np.float32), 2000)
    act = agent.act(inputs, epsilon, rng)
    greedy = act.action[0]
    assert (act.action[:2000] == greedy).all()
    assert np.mean(act.action[2000:] != greedy) == pytest.approx(0.5 * 3 / 4, abs=0.05)
    np.testing.assert_allclose(act.extras["value_max"], agent.values(inputs), rtol=1e-6)
    assert (act.extras["value_taken"] <= act.extras["value_max"]).all()


def test_state_round_trip_continues_exactly():
    rng = np.random.default_rng(0)
    for optimizer in ("adam", "rmsprop"):
        config = ApexConfig(
            hidden_units=8, mlp_units=(8,), optimizer=optimizer, target_update_period_updates=2
        )
        batches = [batch_of(rng, VECTOR, 4) for _ in range(6)]
        weights = np.ones(4, np.float32)
        first = make_agent(config, VECTOR, seed=0)
        for batch in batches[:3]:
            first.update(Batch(batch, weights))
        second = make_agent(config, VECTOR, seed=9)
        second.load_state(*first.state())
        for batch in batches[3:]:
            one, two = first.update(Batch(batch, weights)), second.update(Batch(batch, weights))
            np.testing.assert_array_equal(one.priorities, two.priorities)
        with pytest.raises(CheckpointError):
            make_agent(ApexConfig(hidden_units=9), VECTOR, seed=0).load_state(*first.state())


def test_parameters_of_another_network_are_refused():
    small = make_agent(ApexConfig(hidden_units=8, mlp_units=(8,)), VECTOR, seed=0)
    with pytest.raises(ConfigError, match="do not fit"):
        small.load_params(make_agent(ApexConfig(hidden_units=9, mlp_units=(8,)), VECTOR, seed=0).params())
    with pytest.raises(ConfigError, match="torso"):
        make_agent(
            ApexConfig(torso="nature"),
            EnvSpec("x", (4, 20, 20), "uint8", ActionSpec.discrete(2), 4, 1, True),
            seed=0,
        )


def test_learns_a_chain():
    """Five states in a row, reward only at the right end: the greedy policy must walk right everywhere."""
    spec = EnvSpec("test:chain", (5,), "float32", ActionSpec.discrete(2), 0, 1, False)
    config = ApexConfig(
        hidden_units=32, mlp_units=(32,), optimizer="adam", learning_rate=3e-3, gamma=0.9, n_steps=1,
        target_update_period_updates=50,
    )  # fmt: skip
    agent = make_agent(config, spec, seed=0)
    rng = np.random.default_rng(0)
    eye = np.eye(5, dtype=np.float32)
    items = []
    for _ in range(80):
        accumulator, state = agent.accumulator(8), 2
        accumulator.start(eye[state])
        for t in range(20):
            act = agent.act(Inputs.start(eye[state][None], 0, spec.actions), np.ones(1, np.float32), rng)
            state = min(4, state + 1) if act.action[0] else max(0, state - 1)
            done, cut = state == 4, t == 19
            final = float(agent.values(Inputs.start(eye[state][None], 0, spec.actions))[0])
            for chunk in accumulator.add(SlotStep(
                int(act.action[0]), float(done), act.extras_by_slot()[0], eye[state],
                done, cut and not done, final,
            )):  # fmt: skip
                items += [
                    {k: v[o : o + (2 if k == "obs" else 1)] for k, v in chunk.fields.items()}
                    for o in chunk.offsets
                ]
            if done:
                break
    for _ in range(600):
        picked = rng.integers(0, len(items), 32)
        batch = {k: np.stack([items[i][k] for i in picked]) for k in items[0]}
        agent.update(
            Batch(batch, importance_weights(np.full(32, 1 / len(items)), 1 / len(items), 0.4), measure=False)
        )
    assert agent.act(
        Inputs.start(eye[:4], 0, spec.actions), np.zeros(4, np.float32), rng
    ).action.tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(
        agent.values(Inputs.start(eye[:4], 0, spec.actions)), [0.729, 0.81, 0.9, 1.0], atol=0.08
    )


def test_the_target_takes_statistics_over_with_its_weights_and_not_before():
    rng = np.random.default_rng(0)
    agent = make_agent(ApexConfig(hidden_units=16, target_update_period_updates=2), PIXELS, seed=1)
    weights = np.ones(7, np.float32)
    agent.update(Batch(batch_of(rng, PIXELS, 7), weights))
    target = agent.learner.target
    assert agent.net.inputs.count.item() == 7
    assert target.inputs.count.item() == 0
    agent.update(Batch(batch_of(rng, PIXELS, 7), weights))  # copies what it has learned with
    assert target.inputs.count.item() == 7
    assert agent.net.inputs.count.item() == 14
