"""SAC against numpy: losses, targets, what it converges to."""

import math

import numpy as np
import pytest
import torch

from tests.agents.replayed import batch_of, windows
from tests.agents.soft import CONTINUOUS, DISCRETE, SEVERAL, SIZE, close, drawn, moved, perceptron, replayed
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.sac import SacConfig
from troupe.common.config import EnvConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.schema import check_chunk
from troupe.common.envs import EnvSpec, make_spec, make_vector
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec, Leaf
from troupe.services.actor.local_inference import Rollout


@pytest.mark.parametrize("min_rows", [1, SIZE + 1], ids=["whole perceptrons", "by layers"])
@pytest.mark.parametrize("bootstrap", ["q", "v"])
def test_losses_of_real_numbers_are_the_papers(bootstrap, min_rows, monkeypatch):
    monkeypatch.setattr("troupe.common.nets.perceptron.MIN_ROWS", min_rows)
    config = SacConfig(
        mlp_units=(8, 5), critics=3, bootstrap=bootstrap, tau=0.3, learning_rate=1e-2,
        deviation_start=0.6, entropy_cost=0.4,
    )  # fmt: skip
    agent, batch, net, target = moved(config, CONTINUOUS)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        now_noise, next_noise = torch.randn((2, SIZE, 2), generator=generator).double().numpy()
    cost = math.exp(net["entropy_cost.position"])
    assert cost != 0.4
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)

    def q(arrays, obs, actions):
        both = np.concatenate([obs, actions], axis=1)
        return np.stack([perceptron(arrays, f"critics.{i}", both)[:, 0] for i in range(3)])

    action, log_prob = drawn(config, perceptron(net, "policy", now), now_noise)
    next_action, next_log_prob = drawn(config, perceptron(net, "policy", then), next_noise)
    if bootstrap == "q":
        follows = q(target, then, next_action).min(0) - cost * next_log_prob
    else:
        follows = perceptron(target, "values", then)[:, 0]
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * follows
    errors = goal - q(net, now, batch["action"][:, 0])
    soft = q(net, now, action).min(0) - cost * log_prob
    weights = np.linspace(0.2, 1.0, SIZE)
    critic_loss = 0.5 * (weights * errors**2).mean(1).sum()
    policy_loss = -(weights * soft).mean()
    # The entropy of two numbers is held at -2; the weight goes down where it is above.
    total = critic_loss + policy_loss - cost * (-2.0 - -log_prob.mean())
    if bootstrap == "v":
        total += 0.5 * (weights * (soft - perceptron(net, "values", now)[:, 0]) ** 2).mean()
    update = agent.update(Batch(batch, weights.astype(np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/critic_loss"], critic_loss)
    close(update.metrics["learner/policy_loss"], policy_loss)
    close(update.metrics["learner/entropy"], -log_prob.mean())
    close(update.metrics["learner/loss"], total)


def test_losses_of_several_actions_are_expectations():
    config = SacConfig(
        mlp_units=(8,), tau=0.3, learning_rate=1e-2, adjust_entropy_cost=False, entropy_cost=0.7
    )
    agent, batch, net, target = moved(config, DISCRETE)
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)

    def chances(obs):
        logits = np.exp(perceptron(net, "policy", obs))
        return logits / logits.sum(1, keepdims=True)

    def q(arrays, obs):
        return np.stack([perceptron(arrays, f"critics.{i}", obs) for i in range(2)])

    pi, next_pi = chances(now), chances(then)
    follows = (next_pi * (q(target, then).min(0) - 0.7 * np.log(next_pi))).sum(1)
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * follows
    errors = goal - q(net, now)[:, np.arange(SIZE), batch["action"][:, 0]]
    policy_loss = (pi * (0.7 * np.log(pi) - q(net, now).min(0))).sum(1).mean()
    update = agent.update(Batch(batch, np.ones(SIZE, np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/policy_loss"], policy_loss)
    close(update.metrics["learner/loss"], 0.5 * (errors**2).mean(1).sum() + policy_loss)


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE, SEVERAL], ids=["reals", "choice", "several"])
def test_no_part_is_taught_by_the_loss_of_another(spec):
    agent = make_agent(SacConfig(mlp_units=(8,), bootstrap="v"), spec, seed=1)
    rng, net = np.random.default_rng(1), agent.net
    transitions = agent.stored.read(replayed(spec, rng))
    loss, measured, _ = agent._judged(transitions, torch.ones(SIZE), agent._noise(2, SIZE, agent.draws))
    for part, name in ((net.policy, "policy_loss"), (net.critics, "critic_loss")):
        own = list(part.parameters())
        alone = torch.autograd.grad(measured[name], own, retain_graph=True)
        for one, all_together in zip(alone, torch.autograd.grad(loss, own, retain_graph=True), strict=True):
            assert one.abs().sum() > 0
            torch.testing.assert_close(one, all_together)


def test_the_target_follows_by_a_share():
    rng = np.random.default_rng(0)
    agent = make_agent(SacConfig(mlp_units=(8,), tau=0.25, target_update_period_updates=2), DISCRETE, seed=0)
    target, name = agent.learner.target, "critics.1.1.weight"
    before = target.state_dict()[name].numpy().copy()
    agent.update(Batch(replayed(DISCRETE, rng), np.ones(SIZE, np.float32)))
    np.testing.assert_array_equal(target.state_dict()[name].numpy(), before)
    agent.update(Batch(replayed(DISCRETE, rng), np.ones(SIZE, np.float32)))
    wanted = 0.75 * before + 0.25 * agent.params()[name]
    np.testing.assert_allclose(target.state_dict()[name].numpy(), wanted, rtol=1e-5)


def test_the_norm_that_is_clipped_is_that_of_the_network_alone():
    config = SacConfig(mlp_units=(8,), max_grad_norm=0.1, entropy_cost=0.5, target_entropy=-40.0)
    agent = make_agent(config, CONTINUOUS, seed=0)
    update = agent.update(Batch(replayed(CONTINUOUS, np.random.default_rng(0)), np.ones(SIZE, np.float32)))
    gradients = {name: each.grad.double().numpy() for name, each in agent.net.named_parameters()}
    # Of cost (H - target) by the logarithm of the cost: its own scale, which is not the network's.
    wanted = 0.5 * (update.metrics["learner/entropy"] + 40.0)
    assert gradients.pop("entropy_cost.position") == pytest.approx(wanted, rel=1e-5)
    assert update.metrics["learner/grad_norm"] > 0.1
    assert math.sqrt(sum((each**2).sum() for each in gradients.values())) == pytest.approx(0.1, rel=1e-4)


# ----------------------------------------------------------------- what it converges to


def bandit(config, reward, updates, seed=0):
    """Learns from actions of every kind, each an episode of one step. Returns 4000 actions that it draws."""
    number = ActionSpec((Leaf(shape=(1,), dtype="float32", low=(-1.0,), high=(1.0,)),))
    spec = EnvSpec("test:bandit", (1,), "float32", number, 0, 1, False)
    agent, rng = make_agent(config, spec, seed=seed), np.random.default_rng(seed)
    nothing = np.zeros((64, 1), np.float32)
    for _ in range(updates):
        action = rng.uniform(-1, 1, (64, 1, 1)).astype(np.float32)
        batch = {
            "obs": np.zeros((64, 2, 1), np.float32), "action": action, "reward": reward(action[:, :, 0]),
            "discount": nothing, "bootstrap_steps": nothing.astype(np.uint8) + 1,
        }  # fmt: skip
        update = agent.update(Batch(batch, np.ones(64, np.float32)))
    inputs = Inputs.start(np.zeros((4000, 1), np.float32), 0, number)
    return agent.act(inputs, np.ones(4000, np.float32), rng).action[:, 0], update.metrics


BANDIT = {"mlp_units": (32,), "learning_rate": 8e-3}


def test_the_policy_of_a_bandit_is_the_one_of_most_reward_and_entropy():
    """`pi ~ exp(r / alpha)`: of a parabola, a normal of deviation `sqrt(alpha / 2k)` round its top."""
    config = SacConfig(**BANDIT, adjust_entropy_cost=False, entropy_cost=0.1)
    actions, metrics = bandit(config, lambda a: (1.0 - 4.0 * (a - 0.3) ** 2).astype(np.float32), 500)
    assert actions.mean() == pytest.approx(0.3, abs=0.03)
    assert actions.std() == pytest.approx(math.sqrt(0.1 / 8.0), abs=0.025)
    assert metrics["learner/entropy"] == pytest.approx(
        0.5 * math.log(2 * math.pi * math.e * 0.1 / 8), abs=0.2
    )


def test_the_entropy_cost_holds_the_entropy_at_its_target():
    config = SacConfig(**BANDIT, target_entropy=-0.7, entropy_cost=0.4)
    actions, metrics = bandit(config, lambda a: (-4.0 * (a + 0.2) ** 2).astype(np.float32), 600)
    deviation = math.exp(-0.7) / math.sqrt(2 * math.pi * math.e)  # of a normal of this entropy
    assert actions.mean() == pytest.approx(-0.2, abs=0.04)
    assert actions.std() == pytest.approx(deviation, rel=0.2)
    assert metrics["learner/entropy_cost"] == pytest.approx(8.0 * deviation**2, rel=0.35)


def test_values_of_a_chain_are_those_of_soft_iteration():
    """Three places, two actions (on, stay); the first two cost, the last pays and ends."""
    gamma, cost = 0.8, 0.3
    earned = np.array([[-0.1, -0.2], [0.2, -0.2], [1.0, 0.1]])
    follows = np.array([[1, 0], [2, 1], [2, 2]])
    goes_on = np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]])
    q = np.zeros((3, 2))
    for _ in range(300):
        value = cost * np.log(np.exp(q / cost).sum(1))
        q = earned + gamma * goes_on * value[follows]
    spec = EnvSpec("test:chain", (3,), "float32", ActionSpec.discrete(2), 0, 1, False)
    config = SacConfig(
        mlp_units=(32,), learning_rate=5e-3, tau=0.05, adjust_entropy_cost=False, entropy_cost=cost
    )
    agent, rng, eye = make_agent(config, spec, seed=0), np.random.default_rng(0), np.eye(3, dtype=np.float32)
    for _ in range(700):
        place, action = rng.integers(0, 3, 64), rng.integers(0, 2, 64)
        batch = {
            "obs": np.stack([eye[place], eye[follows[place, action]]], axis=1),
            "action": action[:, None].astype(np.int32),
            "reward": earned[place, action][:, None].astype(np.float32),
            "discount": (gamma * goes_on[place, action])[:, None].astype(np.float32),
            "bootstrap_steps": np.ones((64, 1), np.uint8),
        }
        agent.update(Batch(batch, np.ones(64, np.float32), measure=False))
    with torch.no_grad():
        learned = agent.net.q(torch.from_numpy(eye)).mean(0).numpy()
        policy = agent.net.policy(torch.from_numpy(eye)).softmax(1).numpy()
    np.testing.assert_allclose(learned, q, atol=0.06)
    wanted = np.exp((q - q.max(1, keepdims=True)) / cost)
    np.testing.assert_allclose(policy, wanted / wanted.sum(1, keepdims=True), atol=0.06)
    values = agent.values(Inputs.start(eye, 0, spec.actions))
    np.testing.assert_allclose(values, cost * np.log(np.exp(q / cost).sum(1)), atol=0.08)


# ----------------------------------------------------------------- what it is for


def match(actions, **fields):
    return EnvConfig(
        id="tests.envs.matching:Match-v0", kwargs={"actions": actions}, reward_clip="none", **fields
    )


def test_it_stores_real_numbers_and_goes_on_where_it_stopped():
    env = match("box")
    vector = make_vector(env, 2, 0)
    config = SacConfig(mlp_units=(8,), normalize_vectors=True)
    agent, other = (make_agent(config, vector.spec, seed=seed) for seed in (0, 1))
    rollout, chunks = Rollout(agent, vector, 4, seed=0), []
    rollout.explore([0, 1], 2)
    while len(chunks) < 6:
        chunks += rollout.step(1)
    vector.close()
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
        assert chunk.fields["action"].dtype == np.float32
        assert chunk.fields["action"].shape == (1, 2)
    fields, _ = batch_of(windows(chunks, agent.fields)[:4])
    assert fields["action"].std() > 0
    agent.update(Batch(fields, np.ones(4, np.float32)))
    other.load_state(*agent.state())
    one, two = (each.update(Batch(fields, np.ones(4, np.float32))).metrics for each in (agent, other))
    assert one == two
    beyond = dict(fields, action=fields["action"] * 0 + 1.5)
    field = next(field for field in agent.fields if field.name == "action")
    assert field.bad_rows(beyond["action"]).all()


@pytest.mark.parametrize("actions", ["tuple", "dict"])
def test_what_it_cannot_choose_is_refused_in_a_line(actions):
    with pytest.raises(ConfigError, match="algorithm policy_gradient") as refused:
        make_agent(SacConfig(), make_spec(match(actions)))
    assert "\n" not in str(refused.value)


def test_it_sees_several_parts_pictures_among_them():
    vector = make_vector(EnvConfig(id="tests.envs.matching:Told-v0", reward_clip="none"), 2, 0)
    agent = make_agent(SacConfig(torso="small", mlp_units=(8,)), vector.spec, seed=0)
    rollout, chunks = Rollout(agent, vector, 4, seed=0), []
    rollout.explore([0, 1], 2)
    while len(chunks) < 4:
        chunks += rollout.step(1)
    vector.close()
    before = {name: array.copy() for name, array in agent.params().items()}
    fields, _ = batch_of(windows(chunks, agent.fields)[:4])
    agent.update(Batch(fields, np.ones(4, np.float32)))
    changed = {name for name, array in agent.params().items() if (array != before[name]).any()}
    assert any(name.startswith("encoder.") for name in changed)
