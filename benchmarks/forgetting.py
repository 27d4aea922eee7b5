"""What an agent forgets when its task changes: IMPALA by itself, with replay, and with CLEAR.

`python -m benchmarks.forgetting [--seeds 1 2 3] [--steps S] [--json]`

Two games of Catch are learned one after the other. In the second, left and right have changed places; the
agent sees which game it plays. After each, both are evaluated. The agent, its unrolls and replay's tables are
those of a run; sockets and processes are left out, so that a seed gives the same figures again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.common import report
from troupe.common.agents import Agent, make_agent
from troupe.common.agents.base import Batch
from troupe.common.config import Config, EnvConfig, load_config
from troupe.common.data.schema import Chunk
from troupe.common.envs import make_spec, make_vector
from troupe.common.wire.replay.codec import decode_insert, encode_insert
from troupe.services.actor.local_inference import Rollout
from troupe.services.evaluator.games import play
from troupe.services.replay.storage.replay import Replay

CELLS = 7
GAMES = (False, True)
"""Whether left and right have changed places."""


class CatchEnv(gymnasium.Env):
    """A ball falls straight down: 1 if the paddle is where it comes down, else -1.

    Actions: left, stay, right. What is seen is float32 `[23]`: a one for the ball's row, its column, the
    paddle's column, and the game.
    """

    def __init__(self, swapped: bool = False) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (3 * CELLS + 2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)
        self._swapped = swapped
        self._row = self._column = self._paddle = 0

    def _obs(self) -> np.ndarray:
        obs = np.zeros(3 * CELLS + 2, np.float32)
        obs[[self._row, CELLS + self._column, 2 * CELLS + self._paddle, 3 * CELLS + self._swapped]] = 1.0
        return obs

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """A ball somewhere in the top row, the paddle in the middle of the bottom."""
        super().reset(seed=seed)
        self._row, self._column, self._paddle = 0, int(self.np_random.integers(CELLS)), CELLS // 2
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move the paddle by a cell, and the ball down by one."""
        move = int(action) - 1
        self._paddle = min(max(self._paddle + (-move if self._swapped else move), 0), CELLS - 1)
        self._row += 1
        over = self._row == CELLS - 1
        reward = (1.0 if self._column == self._paddle else -1.0) if over else 0.0
        return self._obs(), reward, over, False, {}


if "SwappedCatch-v0" not in gymnasium.registry:
    gymnasium.register("SwappedCatch-v0", entry_point="benchmarks.forgetting:CatchEnv")

FRESH = '{name = "fresh", limiter = "queue", capacity = 8, share = 4}'
AGAIN = (
    '{name = "again", sampler = "uniform", remover = "uniform", capacity = 20_000, min_items = 4, share = 4}'
)
BASE = {
    "env.id": "benchmarks.forgetting:SwappedCatch-v0",
    "agent.unroll_steps": "6",
    "agent.learning_rate": "3e-3",
    "agent.learning_rate_schedule": "constant",
    "agent.entropy_cost": "0.01",
    "agent.gamma": "0.95",
    "replay.batch_size": "8",
    "replay.tables": f"[{FRESH}, {AGAIN}]",
}
WAYS: dict[str, dict[str, str]] = {
    "impala": {"replay.batch_size": "4", "replay.tables": f"[{FRESH}]"},
    "replay": {},
    "clear": {"agent.clear_policy_cost": "0.01", "agent.clear_value_cost": "0.005"},
}


def make_config(env: str | None = None, **more: str) -> Config:
    """The configuration of one way, with other fields on top."""
    return load_config("cartpole-impala", None, {**BASE, **({"env.id": env} if env else {}), **more}, {})


def learned(
    config: Config, agent: Agent, replay: Replay, envs: list[EnvConfig], seed: int
) -> Iterator[EnvConfig]:
    """Learn in one environment after the other, `run.total_steps` in each; gives each that is behind it."""
    shares, sequence = config.replay.shares(), 0
    again = {table.name for table in config.replay.sampled_tables() if not table.is_queue}
    replayed = np.concatenate([np.full(rows, name in again) for name, rows in shares.items()])
    for phase, env in enumerate(envs):
        slots = config.actor.slots
        rollout = Rollout(agent, make_vector(env, slots, seed), 0, seed + phase)
        rollout.explore(list(range(slots)), slots)
        while rollout.timing.steps < config.run.total_steps:
            for chunk in rollout.step(0):
                sequence += 1
                _insert(replay, chunk, agent, list(shares), sequence)
                sample = replay.sample(shares)
                if not isinstance(sample, str):
                    agent.update(
                        Batch(
                            sample.arrays,
                            np.ones(len(replayed), np.float32),
                            measure=False,
                            lengths=sample.lengths,
                            replayed=replayed,
                        )
                    )
        rollout.env.close()
        yield env


def _insert(replay: Replay, chunk: Chunk, agent: Agent, tables: list[str], sequence: int) -> None:
    """What an actor's insert comes to, without a socket."""
    chunk.more = dict.fromkeys(tables[1:], chunk.items)
    replay.insert(decode_insert(encode_insert(chunk, agent.fields, tables[0], incarnation=1), sequence))


def mean_return(agent: Agent, env: EnvConfig) -> float:
    """Of 100 games, by the most likely actions."""
    result = play(agent, env, episodes=100, slots=20, seed=99, epsilon=0.0, max_episode_frames=1000)
    assert result is not None
    return result.mean_return


def measure(way: str, seed: int, steps: int) -> dict[str, float]:
    """Returns in both games: after the first, and after the second."""
    config = make_config(**WAYS[way], **{"run.total_steps": str(steps)})
    games = [config.env.model_copy(update={"kwargs": {"swapped": swapped}}) for swapped in GAMES]
    agent = make_agent(config.agent, make_spec(games[0]), seed=seed)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(Path(folder), config.replay.shard_tables(1), budget_bytes=1 << 28, seed=seed)
        for phase, _ in enumerate(learned(config, agent, replay, games, seed), 1):
            for number, game in enumerate(games, 1):
                figures[f"game {number} after {phase}"] = mean_return(agent, game)
        replay.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40_000, help="steps in each game")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    options = parser.parse_args()
    figures: dict[str, float | int | str] = {"steps": options.steps, "seeds": str(options.seeds)}
    for way in options.ways:
        runs = [measure(way, seed, options.steps) for seed in options.seeds]
        for name in runs[0]:
            values = [run[name] for run in runs]
            figures[f"{way}: {name}"] = round(statistics.mean(values), 2)
            if not options.json:
                print(f"{way:8} {name}: {statistics.mean(values):5.2f}  {values}", flush=True)
    report("forgetting", figures)


if __name__ == "__main__":
    main()
