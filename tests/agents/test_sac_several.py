"""SAC of several choices at once against numpy, and on choices that only count together."""

import math

import numpy as np
import pytest
import torch

from tests.agents.replayed import batch_of, windows
from tests.agents.soft import SEVERAL, SIZE, close, moved, perceptron, several_of
from troupe.common.agents import Inputs, make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.sac import SacConfig
from troupe.common.config import EnvConfig
from troupe.common.data.accumulators.n_step import PRIORITY_FLOOR
from troupe.common.data.schema import check_chunk
from troupe.common.envs import EnvSpec, make_vector
from troupe.services.actor.local_inference import Rollout


def gumbel(noise):
    """Gumbel noise of draws of a standard normal, by way of uniform ones."""
    uniform = np.vectorize(lambda x: 0.5 * math.erfc(-x / math.sqrt(2.0)))(noise)
    return -np.log(-np.log(uniform))


def softmax(logits):
    chances = np.exp(logits - logits.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def test_losses_of_several_choices_are_expectations_of_each_beside_a_draw_of_the_others():
    config = SacConfig(
        mlp_units=(8,), tau=0.3, learning_rate=1e-2, adjust_entropy_cost=False, entropy_cost=0.7
    )
    agent, batch, net, target = moved(config, SEVERAL)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        now_noise, next_noise = torch.randn((2, SIZE, 5), generator=generator).double().numpy()
    now, then = batch["obs"][:, 0].astype(np.float64), batch["obs"][:, 1].astype(np.float64)

    def q(arrays, obs, action):
        told = np.concatenate([obs, np.eye(2)[action[:, 0]], np.eye(3)[action[:, 1]]], axis=1)
        return np.stack([perceptron(arrays, f"critics.{i}", told)[:, 0] for i in range(2)])

    def soft(critics, obs, noise):
        """The mean Q by both numbers' expectations, and the entropy."""
        logits = perceptron(net, "policy", obs)
        scores = logits + gumbel(noise)
        draw = np.stack([scores[:, :2].argmax(1), scores[:, 2:].argmax(1)], axis=1)
        chances = softmax(logits[:, :2]), softmax(logits[:, 2:])
        means = np.zeros((2, SIZE))
        for number, count in enumerate((2, 3)):
            for value in range(count):
                tried = draw.copy()
                tried[:, number] = value
                means[number] += chances[number][:, value] * q(critics, obs, tried).min(0)
        return means.mean(0), -sum((each * np.log(each)).sum(1) for each in chances)

    mean, entropy = soft(target, then, next_noise)
    goal = batch["reward"][:, 0] + batch["discount"][:, 0] * (mean + 0.7 * entropy)
    errors = goal - q(net, now, batch["action"][:, 0])
    mean, entropy = soft(net, now, now_noise)
    update = agent.update(Batch(batch, np.ones(SIZE, np.float32)))
    close(update.priorities, np.abs(errors).mean(0) + PRIORITY_FLOOR)
    close(update.metrics["learner/policy_loss"], -(mean + 0.7 * entropy).mean())
    close(update.metrics["learner/entropy"], entropy.mean())
    close(update.metrics["learner/critic_loss"], 0.5 * (errors**2).mean(1).sum())


def test_the_policy_of_several_choices_follows_the_gradient_of_the_mean_over_all_actions():
    """The mean of many draws' gradients is that of the sum over all six actions."""
    agent = make_agent(SacConfig(mlp_units=(8,)), SEVERAL, seed=3)
    net, rng, draws = agent.net, np.random.default_rng(3), 40_000
    features = torch.from_numpy(rng.normal(size=(1, 3)).astype(np.float32))
    params = torch.from_numpy(rng.normal(size=(1, 5)).astype(np.float32)).requires_grad_()
    every = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    with torch.no_grad():
        for critic in net.critics:  # so that what is best of one depends on the other
            critic[1].weight.mul_(5.0)
        q = net.q(features.expand(6, -1), every).amin(0)
    left, right = params[0, :2].softmax(0), params[0, 2:].softmax(0)
    mean = (left[every[:, 0]] * right[every[:, 1]] * q).sum()
    (wanted,) = torch.autograd.grad(mean, params)
    noise = torch.randn((draws, 5), generator=torch.Generator().manual_seed(0))
    many = params.expand(draws, -1)
    value, entropy = agent._soft_value(net, features.expand(draws, -1), many, noise)
    estimate = (value - agent._cost * entropy).mean()
    (got,) = torch.autograd.grad(estimate, params)
    assert estimate.item() == pytest.approx(mean.item(), abs=0.01)
    torch.testing.assert_close(got, wanted, atol=0.01, rtol=0.0)
    assert wanted.abs().max() > 0.1


def test_several_choices_that_only_count_together_are_learned():
    """Reward where both numbers agree with what was seen: `a = s` and `b = s + a`, else 0."""
    spec = EnvSpec("test:several", (2,), "float32", several_of(2, 3), 0, 1, False)
    config = SacConfig(
        mlp_units=(32,), learning_rate=5e-3, adjust_entropy_cost=False, entropy_cost=0.05, tau=0.1
    )
    agent, rng, nothing = make_agent(config, spec, seed=0), np.random.default_rng(0), np.zeros((64, 1))
    for _ in range(400):
        seen = rng.integers(0, 2, 64)
        action = np.stack([rng.integers(0, 2, 64), rng.integers(0, 3, 64)], axis=1)
        right = (action[:, 0] == seen) & (action[:, 1] == seen + action[:, 0])
        agent.update(
            Batch(
                {
                    "obs": np.repeat(np.eye(2, dtype=np.float32)[seen][:, None], 2, axis=1),
                    "action": action[:, None].astype(np.int32),
                    "reward": right[:, None].astype(np.float32),
                    "discount": nothing.astype(np.float32),
                    "bootstrap_steps": nothing.astype(np.uint8) + 1,
                },
                np.ones(64, np.float32),
                measure=False,
            )
        )
    inputs = Inputs.start(np.eye(2, dtype=np.float32), 0, spec.actions)
    best = agent.act(inputs, np.zeros(2, np.float32), rng).action
    np.testing.assert_array_equal(best, [[0, 0], [1, 2]])


@pytest.mark.parametrize("memory", [0, 4])
def test_what_actors_store_of_several_choices_is_learned_from_and_a_checkpoint_goes_on(memory):
    env = EnvConfig(id="tests.envs.matching:Match-v0", kwargs={"actions": "multi"}, reward_clip="none")
    config = SacConfig(mlp_units=(8,), lstm_units=memory, across_episodes=memory > 0)
    vector = make_vector(env, 2, 0)
    agent, other = (make_agent(config, vector.spec, seed=seed) for seed in (0, 1))
    rollout, chunks = Rollout(agent, vector, 4, seed=0), []
    rollout.explore([0, 1], 2)
    while sum(len(chunk.offsets) for chunk in chunks) < 6:
        chunks += rollout.step(1)
    vector.close()
    for chunk in chunks:
        check_chunk(chunk, agent.fields)
    fields, lengths = batch_of(windows(chunks, agent.fields)[:6])
    assert fields["action"].shape[2:] == (2,)
    assert set(np.unique(fields["action"][..., 1])) <= {0, 1, 2, 3}
    weights = np.ones(6, np.float32)
    agent.update(Batch(fields, weights, lengths=lengths))
    other.load_state(*agent.state())
    one, two = (each.update(Batch(fields, weights, lengths=lengths)) for each in (agent, other))
    assert one.metrics == two.metrics
    np.testing.assert_array_equal(one.priorities, two.priorities)
