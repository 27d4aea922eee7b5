"""Critics of SAC that give chances, layer norm, and the mean of critics: by hand, and what they learn."""

import numpy as np
import pytest
import torch

from tests.agents.soft import CONTINUOUS, DISCRETE, SIZE, close, drawn, moved
from tests.rl.test_categorical import projected_by_hand
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.sac import SacConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.errors import ConfigError


def normalised_perceptron(arrays, name, x):
    """Layers, each normalised before its ReLU, and a linear one, in numpy."""
    layers = sorted({key.rpartition(".")[0] for key in arrays if key.startswith(f"{name}.")})
    for layer in layers:
        weight, bias = arrays[f"{layer}.weight"].astype(np.float64), arrays[f"{layer}.bias"]
        if weight.ndim == 2:
            x = x @ weight.T + bias
            continue
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * weight + bias
        x = np.maximum(x, 0.0)
    return x


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


@pytest.mark.parametrize("counts", ["least", "mean"])
@pytest.mark.parametrize("atoms", [0, 9])
def test_losses_by_hand(counts, atoms):
    config = SacConfig(
        mlp_units=(8, 5), critics=3, critics_count=counts, atoms=atoms, value_min=-1.0, value_max=3.0,
        layer_norm=True, tau=0.3, learning_rate=1e-2, adjust_entropy_cost=False, entropy_cost=0.4,
    )  # fmt: skip
    agent, batch, net, target = moved(config, CONTINUOUS)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        now_noise, next_noise = torch.randn((2, SIZE, 2), generator=generator).double().numpy()
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)
    places = np.linspace(-1.0, 3.0, atoms) if atoms else np.ones(1)

    def said(arrays, obs, actions):
        both = np.concatenate([obs, actions], axis=1)
        return np.stack([normalised_perceptron(arrays, f"critics.{i}", both) for i in range(3)])

    def means(outputs):
        return softmax(outputs) @ places if atoms else outputs[..., 0]

    def agreed(q):
        return q.min(0) if counts == "least" else q.mean(0)

    action, log_prob = drawn(config, normalised_perceptron(net, "policy", now), now_noise)
    next_action, next_log_prob = drawn(config, normalised_perceptron(net, "policy", then), next_noise)
    reward, discount = batch["reward"], batch["discount"]
    after, own = said(target, then, next_action), said(net, now, batch["action"][:, 0])
    if atoms:
        chances = softmax(after).mean(0)
        if counts == "least":
            least = means(after).argmin(0)
            chances = softmax(after)[least, np.arange(SIZE)]
        values = reward + discount * (places - 0.4 * next_log_prob[:, None])
        wanted = projected_by_hand(values, chances, -1.0, 3.0)
        losses, goal = -(wanted * np.log(softmax(own))).sum(-1), wanted @ places
    else:
        goal = reward[:, 0] + discount[:, 0] * (agreed(means(after)) - 0.4 * next_log_prob)
        losses = 0.5 * (goal - means(own)) ** 2
    weights = np.linspace(0.2, 1.0, SIZE)
    policy_loss = -(weights * (agreed(means(said(net, now, action))) - 0.4 * log_prob)).mean()
    update = agent.update(Batch(batch, weights.astype(np.float32)))
    close(update.priorities, np.abs(goal - means(own)).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/critic_loss"], (weights * losses).mean(1).sum())
    close(update.metrics["learner/policy_loss"], policy_loss)
    close(update.metrics["learner/q_mean"], means(own).mean())


def test_a_state_goes_on_exactly_and_knows_its_places():
    config = SacConfig(mlp_units=(8,), atoms=5, layer_norm=True)
    first, batch, *_ = moved(config, CONTINUOUS)
    second = make_agent(config, CONTINUOUS, seed=1)
    second.load_state(*first.state())
    one, two = (agent.update(Batch(batch, np.ones(SIZE, np.float32))) for agent in (first, second))
    np.testing.assert_array_equal(one.priorities, two.priorities)
    assert not any("places" in name for name in first.params())


def test_chances_are_those_of_what_comes():
    """What is done at a negative observation pays 1, or -3 as often; at a positive one always -1."""
    config = SacConfig(
        mlp_units=(32,), learning_rate=5e-3, atoms=9, value_min=-4.0, value_max=4.0, layer_norm=True
    )
    agent, rng = make_agent(config, CONTINUOUS, seed=0), np.random.default_rng(0)
    for _ in range(300):
        obs = rng.choice([-1.0, 1.0], (64, 1, 1)) * np.ones((64, 2, 3))
        paid = np.where(obs[:, 0, :1] < 0, rng.choice([1.0, -3.0], (64, 1)), -1.0)
        batch = {
            "obs": obs.astype(np.float32),
            "action": rng.uniform(-1, 1, (64, 1, 2)).astype(np.float32),
            "reward": paid.astype(np.float32),
            "discount": np.zeros((64, 1), np.float32),
            "bootstrap_steps": np.ones((64, 1), np.uint8),
        }
        agent.update(Batch(batch, np.ones(64, np.float32), measure=False))
    obs = torch.tensor([[-1.0] * 3, [1.0] * 3])
    with torch.no_grad():
        chances = agent.net.said(obs, torch.zeros(2, 2)).softmax(-1).mean(0).numpy()
    either, surely = np.zeros(9), np.zeros(9)
    either[[1, 5]], surely[3] = 0.5, 1.0
    np.testing.assert_allclose(chances, [either, surely], atol=0.15)


def test_where_there_are_no_chances():
    with pytest.raises(ConfigError, match="real numbers"):
        make_agent(SacConfig(atoms=5), DISCRETE)
    for wrong in ({"lstm_units": 4}, {"bootstrap": "v"}, {"value_min": 10.0}):
        with pytest.raises(ValueError, match="atoms"):
            SacConfig(atoms=5, **wrong)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_products_between_hidden_layers_are_short_in_the_learner_alone(layer_norm):
    fields = {"mlp_units": (32, 32), "layer_norm": layer_norm}
    exact, batch, *_ = moved(SacConfig(**fields), CONTINUOUS)
    short, *_ = moved(SacConfig(**fields, compute_dtype="bfloat16"), CONTINUOUS)
    one, two = (agent.update(Batch(batch, np.ones(SIZE, np.float32))) for agent in (exact, short))
    np.testing.assert_allclose(two.priorities, one.priorities, rtol=0.05, atol=0.02)
    assert (one.priorities != two.priorities).all()
    assert all(array.dtype == np.float32 for name, array in short.params().items() if "weight" in name)
    policy, x = short.net.policy, torch.randn(5, 3)
    with torch.no_grad():
        seen = x.numpy()
        for layer in policy[0].layers[1:]:
            if isinstance(layer, torch.nn.Linear):
                weight = layer.weight if layer.in_features == 3 else layer.weight.bfloat16().float()
                given = seen if layer.in_features == 3 else torch.from_numpy(seen).bfloat16().float().numpy()
                seen = given @ weight.numpy().T + layer.bias.numpy()
            else:
                seen = layer(torch.from_numpy(seen)).numpy()
        wanted = seen @ policy[1].weight.numpy().T + policy[1].bias.numpy()
        np.testing.assert_allclose(policy(x), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())
    actor = make_agent(SacConfig(**fields, compute_dtype="bfloat16"), CONTINUOUS, seed=1)
    actor.load_params(short.params())
    assert not actor.net.policy.short
    assert short.learner.target.policy.short
