"""IQL, TD3 and TD3+BC against numpy, and on a data set from which cloning learns less."""

import numpy as np
import pytest
import torch

from tests.agents.soft import CONTINUOUS, DISCRETE, SEVERAL, SIZE, close, moved, perceptron, replayed
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.iql import IqlConfig, advantage_weights, expectile_loss
from troupe.common.agents.td3 import Td3Config, smoothed
from troupe.common.agents.td3_bc import Td3BcConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.envs import EnvSpec
from troupe.common.errors import ConfigError
from troupe.common.spaces import ActionSpec, Leaf

PLAIN = {"mlp_units": (8, 5), "normalize_vectors": False, "tau": 0.3, "learning_rate": 1e-2}
WEIGHTS = np.linspace(0.2, 1.0, SIZE)


def q_of(arrays, obs, actions, count=2):
    """Each critic's Q of actions: reals beside the observation, of one choice by its place."""
    if actions.ndim == 1:
        return np.stack(
            [perceptron(arrays, f"critics.{i}", obs)[np.arange(len(obs)), actions] for i in range(count)]
        )
    both = np.concatenate([obs, actions], axis=1)
    return np.stack([perceptron(arrays, f"critics.{i}", both)[:, 0] for i in range(count)])


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def log_prob_of(config, params, actions):
    """Of the policy: a normal for reals, else logits."""
    if actions.ndim == 1:
        return log_softmax(params)[np.arange(len(params)), actions]
    mean, raw = np.split(params, 2, axis=1)
    shift = np.log(np.expm1(config.deviation_start - config.deviation_floor))
    deviation = config.deviation_floor + np.log1p(np.exp(raw + shift))
    density = np.exp(-0.5 * ((actions - mean) / deviation) ** 2) / (deviation * np.sqrt(2 * np.pi))
    return np.log(density).sum(1)


# ------------------------------------------------------------------------- IQL


def test_the_expectile_is_where_its_loss_is_least():
    values = np.random.default_rng(0).normal(size=2000)
    for share in (0.3, 0.5, 0.8):
        places = np.linspace(-2, 2, 2001)
        losses = [expectile_loss(torch.from_numpy(values - place), share).mean().item() for place in places]
        best = places[np.argmin(losses)]
        # By definition: what lies above, weighted, balances what lies below.
        above, below = (values - best).clip(min=0).sum(), (best - values).clip(min=0).sum()
        assert share * above == pytest.approx((1 - share) * below, rel=0.02)


def test_weights_of_advantages_are_exponential_up_to_a_limit():
    advantages = np.array([-2.0, 0.0, 0.5, 1.0, 1e6])
    with np.errstate(over="ignore"):
        wanted = np.minimum(np.exp(3.0 * advantages), 10.0)
    close(advantage_weights(torch.from_numpy(advantages), 3.0, 10.0), wanted)
    close(advantage_weights(torch.from_numpy(advantages), 0.0, 10.0), np.ones(5))


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["reals", "choice"])
def test_losses_of_iql_are_the_papers(spec):
    config = IqlConfig(**PLAIN, expectile=0.8, advantage_weight=2.0, max_weight=1.5, deviation_start=0.6)
    agent, batch, net, target = moved(config, spec)
    with torch.no_grad():  # weights on both sides of their limit
        agent.net.values[1].bias -= 0.7
    net["values.1.bias"] -= 0.7
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)
    action = batch["action"][:, 0]
    value = perceptron(net, "values", now)[:, 0]
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * perceptron(net, "values", then)[:, 0]
    errors = goal - q_of(net, now, action)
    off = q_of(target, now, action).min(0) - value
    value_loss = (WEIGHTS * np.where(off < 0, 0.2, 0.8) * off**2).mean()
    liked = np.minimum(np.exp(2.0 * off), 1.5)
    assert (liked == 1.5).any()
    assert (liked < 1.5).any()
    policy_loss = -(WEIGHTS * liked * log_prob_of(config, perceptron(net, "policy", now), action)).mean()
    critic_loss = 0.5 * (WEIGHTS * errors**2).mean(1).sum()
    update = agent.update(Batch(batch, WEIGHTS.astype(np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/critic_loss"], critic_loss)
    close(update.metrics["learner/value_loss"], value_loss)
    close(update.metrics["learner/policy_loss"], policy_loss)
    close(update.metrics["learner/loss"], critic_loss + value_loss + policy_loss)


# -------------------------------------------------------------- TD3 and TD3+BC


def test_targets_are_smoothed_by_noise_within_bounds():
    action, noise = torch.tensor([0.0, 0.0, 0.9, -0.9]), torch.tensor([1.0, 9.0, 3.0, -3.0])
    close(smoothed(action, noise, 0.2, 0.5), [0.2, 0.5, 1.0, -1.0])


NOISY = {**PLAIN, "target_noise": 0.4, "target_noise_limit": 0.3}


@pytest.mark.parametrize(
    "config", [Td3Config(**NOISY), Td3BcConfig(**NOISY, q_weight=1.7)], ids=["td3", "bc"]
)
@pytest.mark.parametrize("updates", [4, 5])
def test_losses_of_td3_are_the_papers(config, updates):
    """The fifth update moves neither policy nor target, the sixth does."""
    agent, batch, net, target = moved(config, CONTINUOUS, updates)
    generator = torch.Generator().manual_seed(7)
    for _ in range(updates + 1):
        noise = torch.randn((SIZE, 2), generator=generator).double().numpy()
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)
    action = batch["action"][:, 0]
    next_action = np.tanh(perceptron(target, "policy", then)) + np.clip(0.4 * noise, -0.3, 0.3)
    follows = q_of(target, then, next_action.clip(-1, 1)).min(0)
    errors = batch["reward"][:, 0] + batch["discount"][:, 0] * follows - q_of(net, now, action)
    critic_loss = 0.5 * (WEIGHTS * errors**2).mean(1).sum()
    chosen = np.tanh(perceptron(net, "policy", now))
    q = q_of(net, now, chosen)[0]
    cloning = (WEIGHTS * ((chosen - action) ** 2).mean(1)).mean()
    policy_loss = -(WEIGHTS * q).mean()
    if config.algorithm == "td3_bc":
        policy_loss = cloning + 1.7 / np.abs(q).mean() * policy_loss
    update = agent.update(Batch(batch, WEIGHTS.astype(np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/critic_loss"], critic_loss)
    after, held = agent.params(), agent.learner.target.state_dict()
    name = "policy.1.weight"
    if updates == 4:
        assert "learner/policy_loss" not in update.metrics
        np.testing.assert_array_equal(after[name], net[name])
        np.testing.assert_array_equal(held[name].numpy(), target[name])
        return
    close(update.metrics["learner/policy_loss"], policy_loss)
    if config.algorithm == "td3_bc":
        close(update.metrics["learner/cloning_loss"], cloning)
    close(update.metrics["learner/loss"], critic_loss + policy_loss)
    assert (after[name] != net[name]).any()
    np.testing.assert_allclose(
        held[name].numpy(), 0.7 * target[name] + 0.3 * after[name], rtol=1e-4, atol=1e-6
    )


def test_ddpg_is_td3_with_other_values():
    """One critic, the target policy's own action, and a policy that moves at every update."""
    config = Td3Config(**PLAIN, critics=1, target_noise=0.0, policy_period_updates=1)
    agent, batch, net, target = moved(config, CONTINUOUS)
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)
    follows = q_of(target, then, np.tanh(perceptron(target, "policy", then)), 1)[0]
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * follows
    errors = goal - q_of(net, now, batch["action"][:, 0], 1)[0]
    q = q_of(net, now, np.tanh(perceptron(net, "policy", now)), 1)[0]
    update = agent.update(Batch(batch, np.ones(SIZE, np.float32)))
    close(update.priorities, np.abs(errors) + PRIORITY_FLOOR)
    close(update.metrics["learner/loss"], 0.5 * (errors**2).mean() - q.mean())


def test_losses_of_td3_bc_for_a_choice_are_expectations():
    config = Td3BcConfig(**PLAIN, policy_period_updates=1)
    agent, batch, net, target = moved(config, DISCRETE)
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)
    action = batch["action"][:, 0]
    every = [np.full(SIZE, place) for place in range(4)]
    after = np.exp(log_softmax(perceptron(target, "policy", then)))
    follows = (after * np.stack([q_of(target, then, a).min(0) for a in every], axis=1)).sum(1)
    errors = batch["reward"][:, 0] + batch["discount"][:, 0] * follows - q_of(net, now, action)
    logs = log_softmax(perceptron(net, "policy", now))
    q = (np.exp(logs) * np.stack([q_of(net, now, a)[0] for a in every], axis=1)).sum(1)
    policy_loss = -logs[np.arange(SIZE), action].mean() - 2.5 / np.abs(q).mean() * q.mean()
    update = agent.update(Batch(batch, np.ones(SIZE, np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/policy_loss"], policy_loss)


# ------------------------------------------------------------------------- both


@pytest.mark.parametrize(
    "config", [IqlConfig(mlp_units=(8,)), Td3BcConfig(mlp_units=(8,), policy_period_updates=1)]
)
@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=["reals", "choice"])
def test_no_part_is_taught_by_the_loss_of_another(config, spec):
    agent = make_agent(config, spec, seed=1)
    transitions = agent.stored.read(replayed(spec, np.random.default_rng(1)))
    noise = torch.randn(SIZE, spec.actions.reals, generator=torch.Generator().manual_seed(0))
    loss, _, _, measured = agent._losses(transitions, torch.ones(SIZE), noise)
    net = agent.net
    for part, name in ((net.policy, "policy_loss"), (net.critics, "critic_loss"), (net.values, "value_loss")):
        if part is None:
            continue
        own = list(part.parameters())
        alone = torch.autograd.grad(measured[name], own, retain_graph=True)
        for one, all_together in zip(alone, torch.autograd.grad(loss, own, retain_graph=True), strict=True):
            assert one.abs().sum() > 0
            torch.testing.assert_close(one, all_together)


def test_td3_refuses_other_actions_than_real_numbers_with_bounds():
    for spec in (DISCRETE, SEVERAL):
        with pytest.raises(ConfigError, match=r"td3 needs real numbers.* take --algo sac"):
            make_agent(Td3Config(mlp_units=(8,)), spec)


def test_iql_takes_several_choices_and_unbounded_numbers_and_td3_bc_refuses_them():
    unbounded = ActionSpec((Leaf(shape=(2,), dtype="float32", low=(None, None), high=(None, None)),))
    for spec in (SEVERAL, EnvSpec("test:unbounded", (3,), "float32", unbounded, 0, 1, False)):
        agent = make_agent(IqlConfig(mlp_units=(8,)), spec)
        assert agent.update(
            Batch(replayed(spec, np.random.default_rng(0)), np.ones(SIZE, np.float32))
        ).metrics
        with pytest.raises(ConfigError, match="take --algo iql") as refused:
            make_agent(Td3BcConfig(mlp_units=(8,)), spec)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", [Td3Config, Td3BcConfig])
def test_actors_act_with_noise_and_evaluators_without(kind):
    agent = make_agent(kind(mlp_units=(8,), exploration_noise=0.3), CONTINUOUS)
    inputs = Inputs.start(np.zeros((4000, 3), np.float32), 0, CONTINUOUS.actions)
    still = agent.act(inputs, np.zeros(4000, np.float32), np.random.default_rng(0)).action
    drawn = agent.act(inputs, np.ones(4000, np.float32), np.random.default_rng(0)).action
    assert (still == still[0]).all()
    assert (drawn - still).std(0) == pytest.approx([0.3, 0.3], rel=0.05)
    assert np.abs(drawn).max() <= 1
    assert drawn.dtype == still.dtype == np.float32


# ----------------------------------------------------------- better than cloning


@pytest.mark.parametrize("config", [IqlConfig(), Td3BcConfig(exploration_noise=1.0)], ids=["iql", "td3_bc"])
def test_what_actors_do_is_an_item_that_can_be_learned_from(config):
    agent = make_agent(config, LINE, seed=0)
    inputs = Inputs.start(np.zeros((100, 1), np.float32), 0, LINE.actions)
    (stored,) = (field for field in agent.fields if field.name == "action")
    for chance in (0.0, 1.0):
        action = agent.act(inputs, np.full(100, chance, np.float32), np.random.default_rng(0)).action
        assert action.dtype == np.float32
        assert stored.bad_rows(action) is None
    assert 20 < np.count_nonzero(np.abs(action) == 1.0) < 60, "what is drawn beyond a bound is the bound"


STEPS = 10
LINE = EnvSpec(
    "test:line", (1,), "float32",
    ActionSpec((Leaf(shape=(1,), dtype="float32", low=(-1.0,), high=(1.0,)),)), 0, 1, False,
)  # fmt: skip


def on_the_line(place, action):
    """A step costs the square of where it begins: what an action is good for shows in the next step alone."""
    return -(place**2), np.clip(place + 0.5 * action, -2, 2)


def mixed_play(size, rng):
    """Steps of a player that goes back to 0 in three of ten steps, and anywhere in the others."""
    place = rng.uniform(-2, 2, size)
    action = np.where(rng.random(size) < 0.3, np.clip(-2 * place, -1, 1), rng.uniform(-1, 1, size))
    reward, then = on_the_line(place, action)
    column = {
        "obs": np.stack([place, then], 1)[:, :, None],
        "action": action[:, None, None],
        "reward": reward[:, None],
    }
    fields = {name: array.astype(np.float32) for name, array in column.items()}
    fields["discount"] = np.full((size, 1), 0.9, np.float32)
    return fields | {"bootstrap_steps": np.ones((size, 1), np.uint8)}


def mean_return(agent):
    place, total = np.linspace(-2, 2, 21), 0.0
    for _ in range(STEPS):
        inputs = Inputs.start(place[:, None].astype(np.float32), 0, LINE.actions)
        action = agent.act(inputs, np.zeros(21, np.float32), np.random.default_rng(0)).action
        reward, place = on_the_line(place, action[:, 0].clip(-1, 1))
        total += reward.mean()
    return total


@pytest.mark.parametrize(
    ("config", "cloning"),
    [
        (IqlConfig(expectile=0.9, advantage_weight=3.0, mlp_units=(32, 32)), {"advantage_weight": 0.0}),
        (Td3BcConfig(mlp_units=(32, 32)), {"q_weight": 0.0}),
    ],
    ids=["iql", "td3_bc"],
)
def test_it_plays_better_than_the_data_set_and_cloning_does_not(config, cloning):
    rng, kept = np.random.default_rng(0), mixed_play(2000, np.random.default_rng(1))
    returns = []
    for changed in ({}, cloning):
        fields = config.model_dump() | {"learning_rate": 3e-3, "tau": 0.03, "gamma": 0.9} | changed
        agent = make_agent(type(config)(**fields), LINE, seed=0)
        for _ in range(400):
            rows = rng.integers(0, 2000, 128)
            batch = {name: array[rows] for name, array in kept.items()}
            agent.update(Batch(batch, np.ones(128, np.float32), measure=False))
        returns.append(mean_return(agent))
    best = sum_of_best()
    assert returns[0] > best - 0.6
    assert returns[1] < best - 1.5


@pytest.mark.parametrize(
    "fields",
    [{}, {"critics": 1, "target_noise": 0.0, "policy_period_updates": 1}],
    ids=["td3", "ddpg"],
)
def test_td3_learns_from_what_its_own_actors_do(fields):
    config = Td3Config(mlp_units=(32, 32), learning_rate=3e-3, tau=0.03, gamma=0.9, **fields)
    agent, rng, kept = make_agent(config, LINE, seed=0), np.random.default_rng(0), []
    before = mean_return(agent)
    for _ in range(40):
        place = rng.uniform(-2, 2, 50)
        inputs = Inputs.start(place[:, None].astype(np.float32), 0, LINE.actions)
        action = agent.act(inputs, np.ones(50, np.float32), rng).action[:, 0]
        kept.append((place, action, *on_the_line(place, action)))
        place, action, reward, then = (np.concatenate(each) for each in zip(*kept, strict=True))
        for _ in range(10):
            rows = rng.integers(0, len(place), 128)
            batch = {
                "obs": np.stack([place, then], 1)[rows, :, None].astype(np.float32),
                "action": action[rows, None, None].astype(np.float32),
                "reward": reward[rows, None].astype(np.float32),
                "discount": np.full((128, 1), 0.9, np.float32),
                "bootstrap_steps": np.ones((128, 1), np.uint8),
            }
            agent.update(Batch(batch, np.ones(128, np.float32), measure=False))
    assert before < sum_of_best() - 4
    assert mean_return(agent) > sum_of_best() - 0.3


def sum_of_best():
    place, total = np.linspace(-2, 2, 21), 0.0
    for _ in range(STEPS):
        reward, place = on_the_line(place, np.clip(-2 * place, -1, 1))
        total += reward.mean()
    return total
