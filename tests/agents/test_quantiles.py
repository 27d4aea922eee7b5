"""IQN as an option of Ape-X: targets by hand, what it learns of a distribution, and resuming."""

import numpy as np
import pytest
import torch

from tests.agents.transitions import PIXELS, VECTOR, batch_of
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR

SMALL = {"hidden_units": 16, "mlp_units": (8,), "quantiles": 5}


@pytest.mark.parametrize("spec", [VECTOR, PIXELS], ids=["vector", "pixels"])
@pytest.mark.parametrize("kind", ["double", "plain", "munchausen"])
def test_targets_and_losses_by_hand(spec, kind):
    rng = np.random.default_rng(0)
    options = {"double": kind == "double", "huber_delta": 0.7}
    if kind == "munchausen":
        options |= {"munchausen_alpha": 0.8, "munchausen_tau": 0.5, "munchausen_least": -0.6}
    agent, batch = make_agent(ApexConfig(**SMALL, **options), spec, seed=4), None
    for _ in range(3):  # move the online network away from the target
        batch = batch_of(rng, spec, 7)
        agent.update(Batch(batch, np.ones(7, np.float32)))
    generator = torch.Generator().manual_seed(4)
    for _ in range(4):
        shares = torch.rand((2, 7, 5), generator=generator)
    transitions = agent.stored.read(batch)
    target = agent.learner.target
    with torch.no_grad():
        values = agent.net.quantiles(transitions.obs, shares[0]).numpy()
        following = target.quantiles(transitions.next_obs, shares[1]).numpy()
        before, after = (target(obs).numpy() for obs in (transitions.obs, transitions.next_obs))
        chooses = agent.net(transitions.next_obs).numpy() if kind == "double" else following.mean(1)
    losses, errors = np.zeros(7), np.zeros(7)
    for b in range(7):
        reward, discount, action = (batch[name][b, 0] for name in ("reward", "discount", "action"))
        goals = reward + discount * following[b, :, chooses[b].argmax()]
        if kind == "munchausen":
            # The policies are softmaxes of the target's means; the entropy is theirs, for every quantile.
            now, then = (np.exp(q[b] / 0.5) / np.exp(q[b] / 0.5).sum() for q in (before, after))
            value = [
                sum(then[a] * (z[a] - 0.5 * np.log(then[a])) for a in range(len(z))) for z in following[b]
            ]
            goals = reward + 0.8 * max(-0.6, 0.5 * np.log(now[action])) + discount * np.array(value)
        own = values[b, :, batch["action"][b, 0]]
        errors[b] = goals.mean() - own.mean()
        for i, value in enumerate(own):
            difference = goals - value
            size = np.abs(difference)
            huber = np.where(size < 0.7, 0.5 * size**2, 0.7 * (size - 0.35))
            losses[b] += (np.abs(float(shares[0, b, i]) - (difference < 0)) * huber / 0.7).mean()
    update = agent.update(Batch(batch, np.linspace(0.1, 1.0, 7).astype(np.float32)))
    np.testing.assert_allclose(update.priorities, np.abs(errors) + PRIORITY_FLOOR, rtol=1e-3, atol=1e-5)
    wanted = (np.linspace(0.1, 1.0, 7) * losses).mean()
    assert update.metrics["learner/loss"] == pytest.approx(wanted, rel=1e-3)


def test_quantiles_are_those_of_what_comes():
    """An action pays 2, one nothing, one either: its quantiles are 0 below the middle and 2 above."""
    config = ApexConfig(
        hidden_units=32,
        mlp_units=(16,),
        quantiles=16,
        optimizer="adam",
        learning_rate=3e-3,
        n_steps=1,
        huber_delta=0.1,
    )
    agent, rng = make_agent(config, VECTOR, seed=0), np.random.default_rng(0)
    for _ in range(350):
        action = rng.integers(0, 3, (64, 1)).astype(np.int32)
        reward = np.choose(action, [2 * np.ones((64, 1)), np.zeros((64, 1)), 2 * rng.integers(0, 2, (64, 1))])
        batch = {
            "obs": np.ones((64, 2, 3), np.float32),
            "action": action,
            "reward": reward.astype(np.float32),
            "discount": np.zeros((64, 1), np.float32),
            "bootstrap_steps": np.ones((64, 1), np.uint8),
        }
        agent.update(Batch(batch, np.ones(64, np.float32), measure=False))
    obs = torch.ones(1, 3)
    with torch.no_grad():
        low, high = agent.net.quantiles(obs, torch.tensor([[0.25, 0.75]]))[0].numpy()
        means = agent.net(obs)[0].numpy()
    np.testing.assert_allclose(low[:3], [2, 0, 0], atol=0.3)
    np.testing.assert_allclose(high[:3], [2, 0, 2], atol=0.3)
    np.testing.assert_allclose(means[:3], [2, 0, 1], atol=0.25)


def test_what_is_drawn_goes_on_where_it_stopped():
    rng = np.random.default_rng(0)
    first, second = (make_agent(ApexConfig(**SMALL), VECTOR, seed=seed) for seed in (0, 5))
    batch, weights = batch_of(rng, VECTOR, 4), np.ones(4, np.float32)
    first.update(Batch(batch, weights))
    second.load_state(*first.state())
    one, two = first.update(Batch(batch, weights)), second.update(Batch(batch, weights))
    np.testing.assert_array_equal(one.priorities, two.priorities)
