"""DQN for CartPole-v1 in one process, with a replay server: double Q-learning on 3-step returns.

    troupe replay serve --data-dir replay-data --table default:capacity=50000,min_items=500
    python examples/dqn.py

Stop and start the server meanwhile: training waits for it, and nothing is lost.
"""

import argparse
import copy

import gymnasium
import numpy as np
import torch
from torch import nn

from troupe import NStepWriter, ReplayClient

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--replay", default="tcp://127.0.0.1:5560", help="address of the server")
arguments.add_argument("--steps", type=int, default=15_000)
args = arguments.parse_args()

torch.manual_seed(0)
torch.set_num_threads(1)
rng = np.random.default_rng(0)
env = gymnasium.make("CartPole-v1")
network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
target = copy.deepcopy(network)
optimizer = torch.optim.Adam(network.parameters(), lr=5e-4)

actor = ReplayClient(args.replay, name="actor")
writer = NStepWriter(actor, n_steps=3, gamma=0.99, chunk_steps=10)
learner = ReplayClient(args.replay, name="learner")
batches = learner.batches(64, prefetch=2)  # two are on their way while one is learned from


def learn() -> None:
    """One update, and the priorities that come of it."""
    batch = next(batches)
    obs = torch.tensor(batch.fields["obs"])  # [B, 1 + 3, 4]
    rows = torch.arange(len(obs))
    action, reward, discount, after = (
        torch.tensor(batch.fields[name][:, 0]) for name in ("action", "reward", "discount", "bootstrap_steps")
    )
    following = obs[rows, after.long()]
    with torch.no_grad():
        best = network(following).argmax(dim=1)
        goal = reward + discount * target(following)[rows, best]
    errors = goal - network(obs[:, 0])[rows, action]
    weights = torch.tensor(batch.weights(beta=0.4))
    optimizer.zero_grad()
    (weights * nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none")).mean().backward()
    optimizer.step()
    priorities = errors.detach().abs().numpy() + 1e-3
    writer.priority = max(writer.priority, float(priorities.max()))  # what is new is sampled soon
    learner.update(batch, priorities)
    learner.recycle(batch)


obs, _ = env.reset(seed=0)
writer.start(obs)
episode_return, returns = 0.0, [0.0]
for step in range(1, args.steps + 1):
    if rng.random() < max(0.02, 1 - step / 3000):
        action = int(rng.integers(2))
    else:
        action = int(network(torch.as_tensor(obs)).argmax())
    obs, reward, terminated, truncated, _ = env.step(action)
    writer.append(action, float(reward), obs, terminated, truncated)
    episode_return += float(reward)
    if terminated or truncated:
        returns.append(episode_return)
        episode_return = 0.0
        obs, _ = env.reset()
        writer.start(obs)
    if step >= 1000:
        learn()
    if step % 200 == 0:
        target.load_state_dict(network.state_dict())
    if step % 1000 == 0:
        print(f"{step} steps, mean return of 20 episodes {np.mean(returns[-20:]):.1f}", flush=True)
print(f"stored: {writer.flush(60)}")
