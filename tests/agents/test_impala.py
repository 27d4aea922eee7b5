import numpy as np
import pytest
import torch

from tests.agents.in_process import evaluate, learn_through_a_queue
from tests.agents.unrolled import SMALL, VECTOR, random_batch, unrolls_of
from tests.rl import oracles
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.agents.policy_gradient import PolicyGradientConfig
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_vector
from troupe.common.errors import CheckpointError, ConfigError

CARTPOLE = EnvConfig(id="gym:CartPole-v1", reward_clip="none")


@pytest.mark.parametrize("lstm", [0, 8])
@pytest.mark.parametrize("env_id", ["gym:CartPole-v1", "atari:breakout"])
def test_learner_computes_the_very_policy_that_acted(env_id, lstm):
    """Across episodes, lost lives, stacks, memory and last steps: with the same weights all ratios are 1."""
    pytest.importorskip("ale_py")
    config = EnvConfig(id=env_id, frame_skip=16, reward_clip="none")
    spec_agent = ImpalaConfig(**(SMALL | {"unroll_steps": 30}), lstm_units=lstm)
    env = make_vector(config, 1, 0)
    agent = make_agent(spec_agent, env.spec, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in agent.net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # far from the uniform first policy
    batch = unrolls_of(agent, config, 3, 9)
    assert (batch["ended"][:, 1:] != 0).any()
    unrolls = agent.stored.read(batch)
    with torch.no_grad():
        logits, _, _ = agent.net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
    assert logits.std() > 0.01
    np.testing.assert_allclose(logits[:-1].numpy(), unrolls.behaviour.numpy(), rtol=1e-3, atol=1e-4)


def test_truncated_episodes_bring_the_value_of_their_last_observation():
    config = EnvConfig(id="tests.envs.counting:Counting-v0", kwargs={"length": 3, "ends_by": "truncation"})
    env = make_vector(config, 1, 0)
    agent = make_agent(ImpalaConfig(**SMALL, see_last_step=False), env.spec, seed=0)
    batch = unrolls_of(agent, config, 1, 2)
    for unroll in range(2):
        for t in range(5):
            episode, time = divmod(unroll * 5 + t + 1, 3)
            want = 0.0
            if time == 0:
                inputs = Inputs.start(np.array([[episode - 1, 3]], np.float32), 0, agent.spec.actions)
                want = agent.values(inputs)[0]
            assert batch["final_value"][unroll, t] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("lstm", [0, 4])
def test_loss_by_hand(reduction, lstm):
    rng = np.random.default_rng(0)
    config = ImpalaConfig(
        **SMALL, lstm_units=lstm, gamma=0.9, rho_bar=0.8, c_bar=1.1, pg_rho_bar=1.3, lambda_=0.9, kl_cost=0.2,
        baseline_cost=0.7, entropy_cost=0.03, reward_clip="soft_asymmetric", loss_reduction=reduction,
    )  # fmt: skip
    agent = make_agent(config, VECTOR, seed=0)
    batch = random_batch(rng, agent, 6)
    unrolls = agent.stored.read(batch)
    with torch.no_grad():
        logits, values, _ = agent.net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
    logits, values = logits.double().numpy()[:-1], values.double().numpy()
    action, reward, ended = (batch[name].T[1:] for name in ("action", "reward", "ended"))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    def taken(x):
        return np.take_along_axis(log_softmax(x), action[..., None].astype(int), -1)[..., 0]

    log_pi, log_mu = taken(logits), taken(batch["behaviour"].transpose(1, 0, 2).astype(float))
    following = np.where(ended == 2, batch["final_value"].T, values[1:])
    sequence = {
        "rewards": 5 * np.tanh(reward / 5) * np.where(reward < 0, 0.3, 1.0), "values": values[:-1],
        "discounts": 0.9 * (ended != 1), "next_values": following, "continues": (ended == 0).astype(float),
    }  # fmt: skip
    vs, advantages = oracles.vtrace(sequence, log_pi - log_mu, 0.8, 1.1, 1.3, 0.9)
    p = log_softmax(logits)
    entropy = -(np.exp(p) * p).sum(-1)
    terms = (
        -log_pi * advantages + 0.7 * 0.5 * (vs - values[:-1]) ** 2 + 0.2 * (log_mu - log_pi) - 0.03 * entropy
    )
    got = agent.update(Batch(batch, np.ones(6, np.float32))).metrics
    want = terms.mean() if reduction == "mean" else terms.sum()
    assert got["learner/loss"] == pytest.approx(want, rel=1e-4)
    assert got["learner/entropy"] == pytest.approx(entropy.mean(), rel=1e-4)


def test_entropy_cost_follows_its_target():
    rng = np.random.default_rng(0)
    for target, rises in ((1.39, True), (0.2, False)):  # the first policy has nearly ln 4 = 1.386 nats
        config = ImpalaConfig(**SMALL, target_entropy=target, entropy_cost=0.01, optimizer="adam")
        agent = make_agent(config, VECTOR, seed=0)
        batch = random_batch(rng, agent, 4)
        seen = [agent.update(Batch(batch, np.ones(4))).metrics["learner/entropy_cost"] for _ in range(4)]
        assert seen[0] == pytest.approx(0.01, rel=1e-4)
        assert (seen[-1] > seen[0]) == rises
        arrays, meta = agent.state()
        again = make_agent(config, VECTOR, seed=1)
        again.load_state(arrays, meta)
        ours, theirs = (a.update(Batch(batch, np.ones(4))).metrics for a in (agent, again))
        assert ours == theirs


def test_learning_rate_follows_a_polynomial():
    config = ImpalaConfig(
        **SMALL, learning_rate=0.1, learning_rate_schedule="polynomial", learning_rate_final=0.02,
        learning_rate_power=2.0,
    )  # fmt: skip
    agent = make_agent(config, VECTOR, seed=0)
    batch = random_batch(np.random.default_rng(0), agent, 4)
    rates = [
        agent.update(Batch(batch, np.ones(4), progress=p)).metrics["learner/learning_rate"]
        for p in (0.0, 0.5, 1.5)
    ]
    np.testing.assert_allclose(rates, [0.1, 0.02 + 0.08 / 4, 0.02])


def test_learning_rate_decays_to_zero():
    agent = make_agent(ImpalaConfig(**SMALL, learning_rate=0.1), VECTOR, seed=0)
    batch = random_batch(np.random.default_rng(0), agent, 4)
    rates = [
        agent.update(Batch(batch, np.ones(4), progress=p)).metrics["learner/learning_rate"]
        for p in (0.0, 0.75, 1.0)
    ]
    np.testing.assert_allclose(rates, [0.1, 0.025, 0.0])
    before = {name: array.copy() for name, array in agent.params().items()}
    agent.update(Batch(batch, np.ones(4), progress=1.0))
    assert all(np.array_equal(before[name], array) for name, array in agent.params().items())
    agent = make_agent(
        ImpalaConfig(**SMALL, learning_rate=0.1, learning_rate_schedule="constant"), VECTOR, seed=0
    )
    assert agent.update(Batch(batch, np.ones(4), progress=0.5)).metrics["learner/learning_rate"] == 0.1


def test_acting_draws_from_the_policy():
    agent = make_agent(ImpalaConfig(**SMALL), VECTOR, seed=0)
    with torch.no_grad():
        agent.net.head.policy.bias.copy_(torch.tensor([0.0, 1.0, 2.0, -1.0]))
    rng = np.random.default_rng(0)
    inputs = Inputs.start(np.zeros((20_000, 3), np.float32), 0, agent.spec.actions)
    act = agent.act(inputs, agent.slot_epsilons(list(range(20_000)), 20_000), rng)
    p = np.exp(act.extras["behaviour"][0]) / np.exp(act.extras["behaviour"][0]).sum()
    np.testing.assert_allclose(np.bincount(act.action, minlength=4) / 20_000, p, atol=0.015)
    assert (agent.act(inputs, np.zeros(20_000, np.float32), rng).action == 2).all()


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_state_round_trip_continues_exactly(optimizer):
    config = ImpalaConfig(**SMALL, lstm_units=4, optimizer=optimizer, rmsprop_momentum=0.5)
    rng = np.random.default_rng(0)
    first, second = make_agent(config, VECTOR, seed=0), make_agent(config, VECTOR, seed=1)
    batches = [random_batch(rng, first, 3) for _ in range(4)]
    for batch in batches[:2]:
        first.update(Batch(batch, np.ones(3)))
    second.load_state(*first.state())
    for batch in batches[2:]:
        assert (
            first.update(Batch(batch, np.ones(3))).metrics == second.update(Batch(batch, np.ones(3))).metrics
        )
    with pytest.raises(CheckpointError, match="not fit"):
        make_agent(ImpalaConfig(**SMALL), VECTOR, seed=0).load_state(*first.state())
    with pytest.raises(CheckpointError, match="'apex'"):
        first.load_state({}, {"algorithm": "apex"})


def test_what_does_not_fit_is_refused_in_one_line():
    agent = make_agent(ImpalaConfig(**SMALL), VECTOR, seed=0)
    with pytest.raises(ConfigError, match="do not fit"):
        agent.load_params(make_agent(ImpalaConfig(mlp_units=(9,)), VECTOR, seed=0).params())
    with pytest.raises(ConfigError, match="torso 'deep' does not suit"):
        make_agent(ImpalaConfig(torso="deep"), VECTOR, seed=0)


def test_it_says_what_it_needs():
    agent = make_agent(ImpalaConfig(lstm_units=16, lstm_layers=2), VECTOR, seed=0)
    assert (agent.config.table.kind, agent.config.table.max_times_sampled) == ("queue", 1)
    assert agent.memory_size == 64


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_cartpole_through_a_queue():
    """With the preset's values, and actors that are three updates behind."""
    from troupe.common.config import load_config

    config = load_config("cartpole-impala")
    agent, _ = learn_through_a_queue(
        config.agent, config.env, slots=config.actor.slots, batch=config.replay.batch_size,
        steps=60_000, seed=1, lag=3,
    )  # fmt: skip
    assert evaluate(agent, config.env) >= 100  # by chance it is 22


REPLAYED = np.array([True, False, True, True, False, False])


def kl(p_logits, q_logits):
    """`KL(p || q)` of categorical distributions, by its definition."""
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p_logits, q_logits))
    return (p * np.log(p / q)).sum(-1)


def updated(config, batch, replayed=REPLAYED):
    """The metrics of the first update of an agent, and what its network said of the batch before."""
    agent = make_agent(config, VECTOR, seed=0)
    unrolls = agent.stored.read(batch)
    with torch.no_grad():
        logits, values, _ = agent.net(
            unrolls.obs, unrolls.last_action, unrolls.last_reward, unrolls.ended != 0, unrolls.memory
        )
    metrics = agent.update(Batch(batch, np.ones(6, np.float32), replayed=replayed)).metrics
    return metrics, logits.double().numpy()[:-1], values.double().numpy()[:-1]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clear_by_hand(reduction):
    options = {**SMALL, "loss_reduction": reduction}
    clear = ImpalaConfig(**options, clear_policy_cost=0.3, clear_value_cost=0.6)
    batch = random_batch(np.random.default_rng(5), make_agent(clear, VECTOR, seed=0), 6)
    got, logits, values = updated(clear, batch)
    without = ImpalaConfig(**options), {k: v for k, v in batch.items() if k != "value"}
    plain, _, _ = updated(*without)
    mu = batch["behaviour"].transpose(1, 0, 2).astype(float)
    terms = (0.3 * kl(mu, logits) + 0.6 * (values - batch["value"].T) ** 2) * REPLAYED
    want = terms.mean() if reduction == "mean" else terms.sum()
    assert got["learner/loss"] - plain["learner/loss"] == pytest.approx(want, rel=1e-4)
    assert got["learner/cloning_loss"] == pytest.approx(terms[:, REPLAYED].mean(), rel=1e-4)
    assert got["learner/replayed_kl"] == pytest.approx(kl(mu, logits)[:, REPLAYED].mean(), rel=1e-4)
    fresh, _, _ = updated(clear, batch, None)
    assert fresh["learner/loss"] == pytest.approx(updated(*without, None)[0]["learner/loss"])
    assert "learner/cloning_loss" not in fresh


@pytest.mark.parametrize("estimator", ["impala", "gae", "vtrace", "n_step"])
def test_what_an_old_network_thought_of_a_time_limit_is_not_learned_from(estimator):
    ppo = {"epochs": 1, "minibatch_steps": 0}
    config = (
        ImpalaConfig(**SMALL)
        if estimator == "impala"
        else PolicyGradientConfig(**SMALL, **ppo, advantages=estimator)
    )
    batch = random_batch(np.random.default_rng(5), make_agent(config, VECTOR, seed=0), 6)

    def loss_where(rows):
        final = batch["final_value"] + 9.0 * rows[:, None].astype(np.float32)
        return updated(config, batch | {"final_value": final})[0]["learner/baseline_loss"]

    as_it_is = loss_where(np.zeros(6, bool))
    assert loss_where(REPLAYED) == as_it_is
    assert loss_where(~REPLAYED) > 2.0 * as_it_is


def implied(pi_logits, mu_logits):
    """Logits of the policy that V-trace values where weights are clipped at 1."""
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (pi_logits, mu_logits))
    return np.log(np.minimum(p, q))


@pytest.mark.parametrize("of", ["implied", "behaviour"])
def test_beyond_the_trust_region_replayed_steps_teach_neither_policy_nor_value(of):
    plain = ImpalaConfig(**SMALL, entropy_cost=0.0, trust_region_of=of)
    batch = random_batch(np.random.default_rng(6), make_agent(plain, VECTOR, seed=0), 6)
    batch["behaviour"] *= 0.5
    _, logits, _ = updated(plain, batch)
    mu = batch["behaviour"].transpose(1, 0, 2).astype(float)
    away = kl(logits, mu if of == "behaviour" else implied(logits, mu))
    limit = float(np.sort(away[:, REPLAYED], axis=None)[7:9].mean())
    some, _, _ = updated(plain.model_copy(update={"trust_region": limit}), batch)
    assert some["learner/untrusted_share"] == pytest.approx((away[:, REPLAYED] > limit).mean(), rel=1e-4)
    assert 0.3 < some["learner/untrusted_share"] < 0.6
    none, _, _ = updated(plain.model_copy(update={"trust_region": 1e-9}), batch)
    assert none["learner/untrusted_share"] == pytest.approx(1.0)
    # What is left is the loss of the fresh rows, in the mean of all.
    rows = ~REPLAYED
    left, _, _ = updated(plain, {name: array[rows] for name, array in batch.items()}, None)
    assert none["learner/loss"] == pytest.approx(left["learner/loss"] / 2, rel=1e-4)


def test_an_implied_policy_of_several_numbers_is_refused():
    spec = make_vector(EnvConfig(id="gym:Pendulum-v1", reward_clip="none"), 1, 0).spec
    with pytest.raises(ConfigError, match=r"trust_region_of implied is for one choice of several.*behaviour"):
        make_agent(ImpalaConfig(**SMALL, trust_region=0.3), spec, seed=0)
    make_agent(ImpalaConfig(**SMALL, trust_region=0.3, trust_region_of="behaviour"), spec, seed=0)


def test_the_value_of_each_step_is_stored_for_value_cloning_and_not_otherwise():
    make = lambda **more: make_agent(ImpalaConfig(**SMALL, **more), make_vector(CARTPOLE, 2, 0).spec, seed=0)  # noqa: E731
    agent = make(clear_value_cost=0.1, see_last_step=False)
    batch = unrolls_of(agent, CARTPOLE, 2, 4)
    assert batch["value"].shape == (4, 5)
    for b, t in ((0, 0), (1, 3), (3, 4)):
        inputs = Inputs.start(batch["obs"][b, t][None], 0, agent.spec.actions)
        assert batch["value"][b, t] == pytest.approx(agent.values(inputs)[0], rel=1e-4)
    assert "value" not in {field.name for field in make(clear_policy_cost=0.1).fields}
