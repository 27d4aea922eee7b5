"""A run's configuration where it learns from a data set, and the chunks that the set becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from troupe.common.agents import Agent
from troupe.common.config import Config
from troupe.common.data.schema import Chunk, SlotStep
from troupe.common.datasets.trajectory import Trajectory
from troupe.common.envs.base import clip_rewards
from troupe.common.errors import ConfigError


def fitted(config: Config, agent: Agent, steps: int) -> Config:
    """The configuration with a table that holds `steps` transitions for good, and without actors.

    Raises:
        ConfigError: the algorithm cannot learn from a data set, which says why, and which one can; or the
            set is smaller than a batch.
    """
    replay, actor = config.replay, config.actor
    if reason := _no_dataset_because(config, agent):
        raise ConfigError(f"{config.agent.algorithm} cannot learn from a data set: {reason}; take --algo iql")
    if actor.hindsight_copies:
        raise ConfigError("actor.hindsight_copies adds nothing to a data set: leave it out")
    if steps < replay.batch_size:
        raise ConfigError(
            f"the data set has {steps} steps, fewer than replay.batch_size ({replay.batch_size}): lower that"
        )
    # Shards get chunks in turn: one may have a chunk more than its share.
    room = steps + (replay.shards * (actor.chunk_steps + 1) if replay.shards > 1 else 0)
    update = {
        "capacity_items": room,
        "min_items": 1,  # all are there from the beginning
        "samples_per_insert": 0.0,
        "samples_per_insert_error": None,
        "durable": "process" if replay.durable == "none" else replay.durable,  # else a shard begins empty
    }
    return config.model_copy(
        update={
            "replay": replay.model_copy(update=update),
            "actor": actor.model_copy(update={"processes": 0}),
        }
    )


def _no_dataset_because(config: Config, agent: Agent) -> str:
    if config.agent.table.kind == "queue":
        return "it learns from what the newest policy does, once"
    if agent.memory_size:
        return "with memory it needs the states of its own network at each step"
    if config.replay.tables:
        return "replay.tables names tables of its own, and a data set fills one"
    return ""


def chunks(
    trajectories: Iterable[Trajectory], agent: Agent, chunk_steps: int, reward_clip: str
) -> Iterator[tuple[Chunk, bool]]:
    """The chunks that an agent's accumulator makes of episodes, each with whether it is an episode's last.

    All items have priority 1.

    Args:
        trajectories: one after the other.
        agent: that is to learn from them.
        chunk_steps: steps of a chunk.
        reward_clip: `env.reward_clip`.

    Raises:
        ConfigError: the algorithm stores what only acting gives.
    """
    for trajectory in trajectories:
        accumulator = agent.accumulator(chunk_steps)
        accumulator.start(trajectory.obs[0])
        rewards = clip_rewards(trajectory.rewards, reward_clip).tolist()
        last = trajectory.steps - 1
        for step, (action, reward) in enumerate(zip(trajectory.actions, rewards, strict=True)):
            terminated = step == last and trajectory.terminated
            cut = step == last and not terminated
            # Values are for priorities alone, which nobody knows yet.
            extras = {"value_taken": 0.0, "value_max": 0.0}
            taken = SlotStep(action, reward, extras, trajectory.obs[step + 1], terminated, cut)
            try:
                made = accumulator.add(taken)
            except KeyError as missing:
                raise ConfigError(
                    f"the algorithm stores {missing} of each step, which no data set holds; take --algo iql"
                ) from None
            for chunk in made:
                chunk.priorities = np.ones_like(chunk.priorities)
                yield chunk, step == last
