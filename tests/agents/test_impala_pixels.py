"""IMPALA from pixels: its gradient against one computed from what was seen, and that it learns from it."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.agents.in_process import learn_through_a_queue, stacked_fields
from tests.envs.catch import SIDE
from tests.harness import only_in_chaos
from troupe.common.agents import make_agent
from troupe.common.agents.base import Batch
from troupe.common.agents.impala import ImpalaConfig
from troupe.common.config.env_section import EnvConfig
from troupe.common.envs import make_vector
from troupe.services.actor.local_inference import Rollout

CATCH = EnvConfig(
    id="tests.envs.catch:Catch-v0", frame_skip=1, frame_size=42, frame_stack=4, noop_max=0,
    episodic_life=False, reward_clip="none", max_episode_frames=1_000,
)  # fmt: skip
SLOTS, STEPS, UNROLLS = 3, 8, 10  # an episode has 6 steps: unrolls begin and end anywhere in them


class Recorder:
    """Stands between a rollout and its environment, and keeps what came: `[time][...]`."""

    def __init__(self, env):
        self.env, self.spec, self.num_slots = env, env.spec, env.num_slots
        self.restarts_total = 0
        self.obs, self.actions, self.rewards, self.ended = [], [], [], []

    def reset(self, seed=None):
        self.obs.append(self.env.reset(seed).copy())
        return self.obs[-1]

    def step(self, actions):
        step = self.env.step(actions)
        self.actions.append(actions.copy())
        self.rewards.append(step.reward.copy())
        self.ended.append(step.terminated.copy())
        self.obs.append(step.obs.copy())
        return step


def seen_by(params, obs):
    """Pixels `[N, stack, H, W]` by the statistics that come with the weights; padding is 0."""
    mean, variance = (params[f"inputs.{name}"].detach().view(SIDE, SIDE) for name in ("mean", "variance"))
    x = ((torch.as_tensor(obs, dtype=torch.float64) - mean) / (variance + 1).sqrt()).clamp(-5, 5)
    return x * torch.as_tensor(obs.any((2, 3), keepdims=True))


def network(params, obs, last_action, last_reward, first):
    """The shallow network in plain calls and float64: logits `[N, A]` and values `[N]`."""
    x = seen_by(params, obs)
    x = functional.conv2d(x, params["torso.torso.convolutions.0.weight"],
                          params["torso.torso.convolutions.0.bias"], stride=4).relu()  # fmt: skip
    x = functional.conv2d(x, params["torso.torso.convolutions.2.weight"],
                          params["torso.torso.convolutions.2.bias"], stride=2).relu()  # fmt: skip
    x = x.permute(0, 2, 3, 1).flatten(1)  # pixel by pixel
    x = functional.linear(x, params["torso.project.weight"], params["torso.project.bias"]).relu()
    before = np.concatenate([np.eye(3)[last_action], np.clip(last_reward, -1, 1)[:, None]], axis=1)
    x = torch.cat([x, torch.as_tensor(before * ~first[:, None])], dim=1)
    logits = functional.linear(x, params["head.policy.weight"], params["head.policy.bias"])
    return logits, functional.linear(x, params["head.baseline.weight"], params["head.baseline.bias"])[:, 0]


def advantage_actor_critic(params, seen, slot, begin, gamma, entropy_cost):
    """Loss terms `[T]` of one unroll on its own policy: n-step returns to its end, from full observations."""
    times = range(begin, begin + STEPS + 1)
    zero = np.zeros(SLOTS)
    obs = np.stack([seen.obs[t][slot] for t in times])
    last_action = np.array([seen.actions[t - 1][slot] if t else 0 for t in times])
    last_reward = np.array([(seen.rewards[t - 1] if t else zero)[slot] for t in times])
    first = np.array([bool(seen.ended[t - 1][slot]) if t else True for t in times])
    logits, values = network(params, obs, last_action, last_reward, first)
    following, returns = values[-1].item(), []
    for t in reversed(times[:-1]):
        following = float(seen.rewards[t][slot]) + gamma * following * (not seen.ended[t][slot])
        returns.insert(0, following)
    returns = torch.tensor(returns, dtype=torch.float64)
    logs = logits[:-1].log_softmax(-1)
    taken = logs[range(STEPS), [int(seen.actions[t][slot]) for t in times[:-1]]]
    entropy = -(logs.exp() * logs).sum(-1)
    advantages = (returns - values[:-1]).detach()
    return -taken * advantages + 0.5 * 0.5 * (returns - values[:-1]).square() - entropy_cost * entropy


def test_gradient_is_that_of_what_was_seen():
    """On its own policy V-trace is the n-step return: this checks everything from pixels to gradient."""
    config = ImpalaConfig(
        torso="shallow", hidden_units=16, unroll_steps=STEPS, gamma=0.9, entropy_cost=0.02,
        max_grad_norm=0.0, loss_reduction="mean",
    )  # fmt: skip
    seen = Recorder(make_vector(CATCH, SLOTS, 5))
    agent = make_agent(config, seen.spec, seed=3)
    torch.manual_seed(3)
    with torch.no_grad():
        agent.net.head.policy.weight.normal_(0, 0.3)  # far from the uniform first policy
    agent.net.observe(torch.randint(0, 40, (50, *seen.spec.obs_shape)))  # some statistics
    rollout, chunks = Rollout(agent, seen, 0, 5), []
    rollout.explore(list(range(SLOTS)), SLOTS)
    while len(chunks) < UNROLLS * SLOTS:
        chunks += rollout.step(0)
    chunks = chunks[: UNROLLS * SLOTS]  # the first ones of every slot, for slots take turns
    assert {float(reward) for rewards in seen.rewards for reward in rewards} == {-1.0, 0.0, 1.0}
    params = {
        name: torch.tensor(array, dtype=torch.float64, requires_grad=True)
        for name, array in agent.params().items()
    }
    terms = [
        advantage_actor_critic(params, seen, slot, slot * STEPS // SLOTS + unroll * STEPS, 0.9, 0.02)
        for unroll in range(UNROLLS)
        for slot in range(SLOTS)
    ]
    loss = torch.cat(terms).mean()
    loss.backward()
    metrics = agent.update(Batch(stacked_fields(chunks), np.ones(len(chunks), np.float32))).metrics
    assert metrics["learner/loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in agent.net.named_parameters():
        want = params[name].grad.numpy()
        assert np.abs(want).max() > 0, name
        np.testing.assert_allclose(
            parameter.grad.numpy(), want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=name
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_to_catch_from_pixels():
    """A mean return of -0.7 is that of chance."""
    config = ImpalaConfig(
        torso="shallow", hidden_units=128, unroll_steps=10, entropy_cost=0.003, optimizer="adam",
        optimizer_epsilon=1e-5, learning_rate=2e-3, learning_rate_schedule="constant", max_grad_norm=0.5,
    )  # fmt: skip
    _, episodes = learn_through_a_queue(config, CATCH, slots=16, batch=8, steps=36_000, seed=1, lag=1)
    assert np.mean([episode.return_raw for episode in episodes[:500]]) < -0.5
    assert np.mean([episode.return_raw for episode in episodes[-500:]]) > 0.2


@pytest.mark.slow
@pytest.mark.timeout(900)
@only_in_chaos
def test_on_a_grey_ground_it_learns_with_normalised_pixels_only():
    """A mean return of -0.58 is that of chance; which is where pixels divided by 255 stay."""
    env = CATCH.model_copy(update={"id": "tests.envs.grey_catch:GreyCatch-v0"})
    returns = {}
    for normalize in (True, False):
        config = ImpalaConfig(
            normalize_pixels=normalize, torso="shallow", hidden_units=128, unroll_steps=10, lambda_=0.95,
            entropy_cost=0.003, optimizer="adam", optimizer_epsilon=1e-5, learning_rate=2e-3,
            learning_rate_schedule="constant", max_grad_norm=10.0,
        )  # fmt: skip
        _, episodes = learn_through_a_queue(config, env, slots=16, batch=8, steps=64_000, seed=1, lag=1)
        returns[normalize] = np.mean([episode.return_raw for episode in episodes[-600:]])
    assert returns[True] > -0.25
    assert returns[False] < -0.4
