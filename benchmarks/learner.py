"""Learner speed: an Ape-X update, against the plainest PyTorch version of the same arithmetic; one of SAC.

`python -m benchmarks.learner --json [--seconds S] [--batch-size 512] [--torso nature]`
`python -m benchmarks.learner --json --sac [--seconds S] [--batch-size 256] [--threads 1]`

`--sac` is an update of `halfcheetah-sac`. `update_cpu_ms` is the thread's CPU time, for busy machines.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import torch
from torch import nn

from benchmarks.common import median_ms, parser, report
from troupe.common.agents import make_agent
from troupe.common.agents.apex import ApexConfig
from troupe.common.agents.base import Batch
from troupe.common.agents.sac import SacConfig
from troupe.common.envs import EnvSpec
from troupe.common.machine import keep_freed_memory
from troupe.common.spaces import ActionSpec, Leaf
from troupe.services.learner.service import METRICS_PERIOD_UPDATES

TORQUES = ActionSpec((Leaf(shape=(6,), dtype="float32", low=(-1.0,) * 6, high=(1.0,) * 6),))
CHEETAH = EnvSpec("mujoco:HalfCheetah-v5", (17,), "float32", TORQUES, 0, 1, False)
PONG = EnvSpec("atari:pong", (4, 84, 84), "uint8", ActionSpec.discrete(6), 4, 4, True)


def random_batch(size: int) -> dict[str, np.ndarray]:
    """A batch of 3-step items of random pixels, as replay gives it."""
    rng = np.random.default_rng(0)
    return {
        "obs": rng.integers(0, 255, (size, 7, 84, 84), dtype=np.uint8),
        "action": rng.integers(0, 6, (size, 1)).astype(np.int32),
        "reward": rng.normal(size=(size, 1)).astype(np.float32),
        "discount": np.full((size, 1), 0.97, np.float32),
        "bootstrap_steps": np.full((size, 1), 3, np.uint8),
    }


def sac_figures(size: int, seconds: float) -> dict[str, float]:
    """Of one update of SAC on transitions of numbers; metrics are asked for as rarely as the learner does."""
    rng = np.random.default_rng(0)
    fields: dict[str, np.ndarray] = {
        "obs": rng.normal(size=(size, 2, 17)).astype(np.float32),
        "action": rng.uniform(-1, 1, (size, 1, 6)).astype(np.float32),
        "reward": rng.normal(size=(size, 1)).astype(np.float32),
        "discount": np.full((size, 1), 0.99, np.float32),
        "bootstrap_steps": np.ones((size, 1), np.uint8),
    }
    config = SacConfig(mlp_units=(256, 256), learning_rate=1e-3, policy_learning_rate=3e-4)
    agent, weights = make_agent(config, CHEETAH, seed=0), np.ones(size, np.float32)
    numbers = itertools.count()

    def update() -> None:
        agent.update(Batch(fields, weights, measure=next(numbers) % METRICS_PERIOD_UPDATES == 0))

    cpu_ms = median_ms(update, seconds, clock=time.thread_time)
    return {"update_ms": round(median_ms(update, seconds), 2), "update_cpu_ms": round(cpu_ms, 2)}


class PlainNetwork(nn.Module):
    """The dueling Nature network as papers draw it."""

    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1),
            nn.ReLU(), nn.Flatten(),
        )  # fmt: skip
        self.value = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 1))
        self.advantage = nn.Sequential(nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 6))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Q values `[B, 6]`."""
        x = self.torso(obs.float() / 255.0)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


class PlainUpdate:
    """The same update, fp32, eager, channels first, two stacks per transition."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        self.online, self.target = PlainNetwork(), PlainNetwork()
        self.optimizer = torch.optim.RMSprop(
            self.online.parameters(), 6.25e-5, alpha=0.95, eps=1.5e-7, centered=True
        )
        obs = torch.from_numpy(batch["obs"])
        self.now, self.then = obs[:, :4].contiguous(), obs[:, 3:].contiguous()
        self.action = torch.from_numpy(batch["action"]).long()
        self.reward, self.discount = (torch.from_numpy(batch[k])[:, 0] for k in ("reward", "discount"))

    def __call__(self) -> None:
        """One update."""
        with torch.no_grad():
            best = self.online(self.then).argmax(1, keepdim=True)
            goal = self.reward + self.discount * self.target(self.then).gather(1, best).squeeze(1)
        q = self.online(self.now).gather(1, self.action).squeeze(1)
        loss = nn.functional.smooth_l1_loss(q, goal)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 40.0)
        self.optimizer.step()


def main() -> None:
    """The command line."""
    args = parser(__doc__)
    args.add_argument("--sac", action="store_true", help="an update of halfcheetah-sac instead")
    args.add_argument("--batch-size", type=int, help="512, or 256 of SAC")
    args.add_argument("--torso", choices=("nature", "small"), default="nature")
    args.add_argument("--threads", type=int, default=2)
    options = args.parse_args()
    torch.set_num_threads(options.threads)
    size = options.batch_size or (256 if options.sac else 512)
    if options.sac:
        keep_freed_memory()
        shape = {"batch_size": size, "threads": options.threads}
        report("learner", {"agent": "sac", **shape, **sac_figures(size, options.seconds)})
        return
    batch, weights = random_batch(size), np.ones(size, np.float32)
    plain = median_ms(PlainUpdate(batch), options.seconds) if options.torso == "nature" else None
    keep_freed_memory()  # as the learner does; the plain version ran as PyTorch comes
    agent = make_agent(ApexConfig(torso=options.torso), PONG, seed=0)
    ours = median_ms(lambda: agent.update(Batch(batch, weights, measure=False)), options.seconds)
    figures: dict[str, float | int | str] = {
        "batch_size": size,
        "torso": options.torso,
        "threads": options.threads,
        "update_ms": round(ours, 2),
    }
    if plain is not None:
        figures |= {"fp32_eager_ms": round(plain, 2), "vs_fp32_eager": round(plain / ours, 3)}
    report("learner", figures)


if __name__ == "__main__":
    main()
